"""A run is read back exactly from its journal: every kind of end, with any
cancellations in between.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from packages.sim.tests.scripted_simulation import KINDS, Scripted
from rollweave.record.store import TrajectoryReader
from rollweave.schema import events as e
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import SegmentKind
from rollweave_sim.workload import Plan, Recorded, read_run, workload, write_trace
from tests.support import fake_runs
from tests.support.commands import invoke
from tests.support.core import config as core_config
from tests.support.simulation import one_domain


def rounded(groups: list[list[list[Plan]]]) -> list[list[list[Any]]]:
    """Round times to the precision of sums of floats."""

    def plain(plan: Plan) -> Any:
        return json.loads(
            json.dumps(msgspec.to_builtins(plan)), parse_float=lambda text: round(float(text), 9)
        )

    return [[[plain(plan) for plan in attempts] for attempts in members] for members in groups]


@pytest.mark.parametrize("mode", ["sync", "bounded", "stream"])
def test_a_run_is_read_back_exactly(mode: str, tmp_path: Path) -> None:
    world = Scripted(one_domain(mode), tmp_path / "run")
    assert world.run().error == ""
    lived = world.expected()
    recorded = workload(str(tmp_path / "run"))
    assert isinstance(recorded, Recorded)
    assert rounded(recorded.groups) == rounded(lived)
    kinds = {
        (plan.stop, plan.fails_in) for members in lived for attempts in members for plan in attempts
    }
    assert kinds == set(KINDS)
    assert world.cancelled  # cut-off attempts are excluded
    assert max(len(attempts) for members in lived for attempts in members) > 1
    assert (
        workload(str(tmp_path / "run" / "journal.bin")).plan(index=1, member=0, attempt=0, seed=0)
        == recorded.groups[1][0][0]
    )


def test_reads_attempts_started_after_a_compaction(tmp_path: Path) -> None:
    world = Scripted(one_domain("sync"), tmp_path / "run", compact_at=150)
    assert world.run().error == ""
    assert any(isinstance(event, e.EnvReady) for _, event in world.journal[:150])
    assert any(isinstance(event, e.EnvReady) for _, event in world.journal[150:])
    assert rounded(read_run(tmp_path / "run").groups) == rounded(world.expected())


def test_a_run_of_several_domains_requires_a_domain(tmp_path: Path) -> None:
    world = Scripted(core_config("sync", rollout={"retries": 3}), tmp_path / "run")
    assert world.run().error == ""
    for name in ("a", "b"):
        recorded = workload(str(tmp_path / "run"), domain=name)
        assert isinstance(recorded, Recorded)
        assert rounded(recorded.groups) == rounded(world.expected(name))
    for wrong in (None, "c"):
        with pytest.raises(ConfigError, match=rf"domain must be one of a, b of .*, got {wrong!r}"):
            workload(str(tmp_path / "run"), domain=wrong)
    with pytest.raises(ConfigError, match=r"--format workload: .* must have one .*, got a, b$"):
        write_trace(tmp_path / "run", tmp_path / "a.jsonl")


def test_refuses_untrustworthy_journals(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Scripted(one_domain("sync"), run).run()
    journal, settings = (run / "journal.bin").read_bytes(), (run / "config.toml").read_text()
    (run / "config.toml").write_text(settings.replace("max_running = 8", "max_running = 7"))
    with pytest.raises(
        ConfigError,
        match=r"must lead to the decisions recorded in it, event .* another configuration",
    ):
        workload(str(run))
    (run / "config.toml").unlink()
    with pytest.raises(ConfigError, match=r"must have the run's config\.toml beside it"):
        workload(str(run))
    (run / "config.toml").write_text(settings)
    (run / "journal.bin").write_bytes(journal[:200] + b"?" + journal[201:])
    with pytest.raises(ConfigError, match=r"must be a complete journal of this version: .* byte"):
        workload(str(run))
    (run / "journal.bin").write_bytes(journal[:400])
    with pytest.raises(
        ConfigError, match="must hold training trajectories that ended by themselves, none in"
    ):
        workload(str(run))


def test_a_live_run_is_read_back_as_in_its_store(tmp_path: Path) -> None:
    config = fake_runs.make_config(tmp_path, steps=2, options={"turns": 3})
    assert fake_runs.run(config).error == ""
    directory = fake_runs.run_dir(config)
    recorded = read_run(directory)
    reader = TrajectoryReader(directory / "trajectories")
    stored = {
        entry.trajectory_id: reader.load(entry)
        for entry in reader.entries
        if entry.score is not None
        and entry.score.reward is not None
        and entry.trajectory_id.startswith("g")
    }
    trace = tmp_path / "run.workload.jsonl"
    code, text, errors = invoke(
        "export", str(directory), "--format", "workload", "--output", str(trace)
    )
    assert (code, errors) == (0, [])
    assert f"({len(trace.read_text().splitlines())} attempts)" in " ".join(text.split())
    again = workload(str(trace))
    assert isinstance(again, Recorded)
    assert again.groups == recorded.groups
    plans = {
        f"g{g}.{m}": attempts[0]
        for g, members in enumerate(recorded.groups)
        for m, attempts in enumerate(members)
    }
    assert set(plans) == set(stored)
    for name, plan in plans.items():
        trajectory = stored[name]  # type: ignore[index]
        spans = [(one.kind, one.end - one.start) for one in trajectory.sequences[0].segments]
        assert plan.prompt_tokens == spans[0][1]
        assert [turn.output_tokens for turn in plan.turns] == [
            length for kind, length in spans if kind is SegmentKind.OUTPUT
        ]
        assert plan.prompt_tokens + sum(
            t.output_tokens + t.observation_tokens for t in plan.turns
        ) == sum(n for _, n in spans)
        scored = (trajectory.stop_reason, trajectory.reward, "")
        assert (plan.stop, plan.reward, plan.fails_in) == scored
        assert plan.init_s >= trajectory.timing.init_s > 0
        assert all(turn.env_s > 0 for turn in plan.turns)
