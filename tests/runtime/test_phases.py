"""Prefill engines in whole runs: real engines, and KV that moves between processes."""

import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollweave.record.journal import Replay
from rollweave.record.rundir import RunDir
from rollweave.record.store import TrajectoryReader
from rollweave.record.summary import scheduling_line
from rollweave.runtime.launch import train
from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig
from rollweave.schema.status import RunStatus
from tests.support.core import EITHER, always_split, asking
from tests.support.journals import checked_journal
from tests.support.real_runs import lake, living
from tests.support.referee import Referee

pytestmark = pytest.mark.slow


def reading(directory: Path, *phases: str, latency_s: float = 0.0, **sections: Any) -> RunConfig:
    """Return the configuration of a run whose agents read long texts, with an engine of
    each phase.
    """
    engine = {"max_slots": 8, "kv_tokens": 8192, "deterministic": True}
    return lake(
        directory,
        task={
            "env": "packages.sim.benchmarks.phases.reading_tasks:Reading",
            "tag": "reading",
            "options": {"words": 70, "latency_s": latency_s},
            "max_tokens": 1024,
        },
        **{
            "warmup": {"steps": 0},
            "trainer": {"lr": 1e-12},
            "algorithm": {"advantage": "grpo_no_std"},
            "eval": {"every": 0, "final_episodes": 0},
            "engines": [{**engine, "phase": phase} for phase in phases],
            **sections,
        },
    )


def sampled(config: RunConfig) -> dict[str, tuple[tuple[int, ...], tuple[float, ...]]]:
    """Return the tokens and log-probs of all trajectories."""
    run = RunDir(Path(config.run.dir) / config.run.name)
    reader = TrajectoryReader(run.trajectories)
    samples = {}
    for entry in reader.entries:
        sequences = reader.load(entry).sequences
        samples[str(entry.trajectory_id)] = (
            tuple(token for sequence in sequences for token in sequence.tokens),
            tuple(value for sequence in sequences for value in sequence.logprobs),
        )
    return samples


@pytest.mark.parametrize("mode", ["sync", "bounded", "decoupled"])
def test_split_turns_have_the_tokens_of_whole_ones(mode: str, tmp_path: Path) -> None:
    together = reading(tmp_path / "together", "both", "both", rollout={"mode": "sync"})
    assert train(together).error == ""
    apart = reading(tmp_path / "apart", "prefill", "decode", rollout={"mode": mode})
    with always_split():
        summary = train(apart)
        _, events, _ = checked_journal(apart)
    assert summary.error == ""
    assert summary.scheduling["split_turns"] > 16
    assert summary.scheduling["split_failed"] < summary.scheduling["split_turns"]
    ours, theirs = sampled(apart), sampled(together)
    same = ours.keys() & theirs.keys()
    assert len(same) >= 8
    # nothing is learned, so the weights of all versions are nearly the same
    assert {name for name in same if ours[name][0] != theirs[name][0]} == set()
    moves = [event for event in events if isinstance(event, e.MigrationDone)]
    assert any(move.moved_tokens for move in moves), "no KV has moved"


@pytest.mark.parametrize("mode", ["sync", "bounded"])
def test_engines_that_change_their_phase_sample_the_same_tokens(mode: str, tmp_path: Path) -> None:
    together = reading(tmp_path / "together", "both", "both", rollout={"mode": "sync"})
    assert train(together).error == ""
    engines = {"max_slots": 8, "kv_tokens": 8192, "deterministic": True, **EITHER[0]}
    apart = reading(tmp_path / "apart", rollout={"mode": mode}, engines=engines, run={"steps": 6})
    with asking(1):
        summary = train(apart)
    with asking(1):
        checked_journal(apart)
    assert summary.error == ""
    assert summary.scheduling["moved_engines"] >= 2
    assert summary.scheduling["split_turns"] > 16
    ours, theirs = sampled(apart), sampled(together)
    same = ours.keys() & theirs.keys()
    assert len(same) >= 8
    assert {name for name in same if ours[name][0] != theirs[name][0]} == set()
    run = RunDir(Path(apart.run.dir) / apart.run.name)
    assert b"moves from decode to prefill: 100% more turns" in run.metrics.read_bytes()
    assert "moves of engines between prefill and decoding" in scheduling_line(summary.scheduling)
    status = msgspec.json.decode(run.status.read_bytes(), type=RunStatus)
    assert {engine.phase for engine in status.engines} <= {"prefill", "decode"}


def test_a_killed_prefill_engine_loses_nothing(tmp_path: Path) -> None:
    config = reading(
        tmp_path, "prefill", "decode", latency_s=0.1, run={"steps": 4}, watchdog={"restarts": 10}
    )
    with living(config) as life:
        life.until(lambda core: core.state.counters.scheduling.split_turns, "a split turn")
        os.kill(life.children("rollweave.runtime.entrypoints.engine")[0], signal.SIGKILL)
        assert life.finish()["steps"] == 4
    run = RunDir(Path(config.run.dir) / config.run.name)
    referee, replay = Referee(), Replay(run.journal, config)
    history = list(replay)
    referee.watch(history)
    assert replay.differing == 0
    # the run needs it no longer, and may end before it is back
    assert referee.owed() in ([], ["join of e0"])
    assert "EngineLost" in referee.seen
    assert not any(isinstance(event, e.TurnFailed) for _, event, _ in history)
