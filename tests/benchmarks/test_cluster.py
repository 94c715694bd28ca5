"""The bench `cluster` says why it measures nothing, and reads a run's lines on its own
clock.
"""

import json
import time
from pathlib import Path

import pytest

from benchmarks.cluster.bench import FIGURES, bench_cluster
from benchmarks.cluster.run import LineFollower, lost_trajectories
from benchmarks.cluster.sites import FIGURES as SITES_FIGURES
from benchmarks.cluster.sites import bench_cluster_sites
from benchmarks.cluster.soak import FIGURES as SOAK_FIGURES
from benchmarks.cluster.soak import bench_cluster_soak


def test_without_namespaces_every_figure_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.network.shutil.which", lambda _: None)
    for bench, names in (
        (bench_cluster, FIGURES),
        (bench_cluster_sites, SITES_FIGURES),
        (bench_cluster_soak, SOAK_FIGURES),
    ):
        result = bench(quick=True, progress=print)
        assert result.figures == dict.fromkeys(names)
        assert {*result.conditions} == {*names}
        assert all("there is no `ip`" in result.conditions[name] for name in names)


def test_lines_have_times_on_our_clock(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "at": 900.0}\n')
    following = LineFollower(path)
    following.read()
    assert following.lines == [], "they are another controller's"
    first = {"kind": "warning", "at": 3.0}
    with path.open("a") as file:
        file.write(f'{json.dumps(first)}\n{{"kind": "st')
    before = time.monotonic()
    following.read()
    after = time.monotonic()
    assert following.lines == [first]
    assert before <= following.time_of(first) <= after
    assert following.time_of({"at": 1.0}) == pytest.approx(following.time_of(first) - 2.0)


def test_only_losses_of_hosts_and_controllers_lose_trajectories() -> None:
    account = {"dropped": {"stale": 3, "engine_failure": 2, "world_lost": 1}}
    assert lost_trajectories(account) == 3
