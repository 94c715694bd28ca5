"""The bench `cluster` says why it measures nothing, and reads a run's lines on its own
clock.
"""

import json
import time
from pathlib import Path

import pytest

from benchmarks.cluster.run import ClusterRun, LineFollower, lost_trajectories
from packages.ray.benchmarks.bench import bench_cluster
from packages.ray.benchmarks.plan import FIGURES, FIXED, config_of


def test_without_namespaces_every_figure_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.network.shutil.which", lambda _: None)
    result = bench_cluster(quick=True, progress=print)
    assert result.figures == dict.fromkeys(FIGURES)
    assert {*result.conditions} == {*FIGURES}
    assert all("there is no `ip`" in result.conditions[name] for name in FIGURES)


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


def test_a_host_keeps_its_name_with_a_new_node_of_ray(tmp_path: Path) -> None:
    run = ClusterRun(config_of(FIXED, (f'run.dir="{tmp_path}"', "run.name=run"), None))
    run.run.path.mkdir()
    lines = [
        ("host 3", "given up: host 10.77.1.1-12ab34cd is lost: silent for 4 s"),
        ("host 10.77.1.11", "has joined"),
        ("host 10.77.1.2", "has joined"),
    ]
    before = run.now()
    run.run.metrics.write_text(
        "".join(
            json.dumps({"kind": "warning", "at": at, "component": component, "message": message})
            + "\n"
            for at, (component, message) in enumerate(lines)
        )
    )
    run.inspect()
    assert run.lost_after("10.77.1.1", before - 10.0) is not None
    assert run.joined_after("10.77.1.1", before - 10.0) is None
    assert run.joined_after("10.77.1.2", before - 10.0) is not None


def test_only_losses_of_hosts_and_controllers_lose_trajectories() -> None:
    account = {"dropped": {"stale": 3, "engine_failure": 2, "world_lost": 1}}
    assert lost_trajectories(account) == 3
