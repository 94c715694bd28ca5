"""Scheduling by trajectory in whole runs: real engines and trainer, a real predictor,
and KV that migrates between processes.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rollweave.rollout.pipeline import Pipeline
from rollweave.runtime.launch import train
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig
from rollweave.schema.serving import STATE_WIDTH
from rollweave.schema.training import LengthContext
from tests.support.journals import checked_journal
from tests.support.real_runs import lake, lines, living


def moving(directory: Path, **sections: Any) -> RunConfig:
    """Return a configuration with more trajectories than slots, slow environments, and
    migrations by rank.
    """
    return lake(
        directory,
        task={
            "env": "rollweave.envs.frozenlake:SlowLake",
            "options": {"maps": "fixed", "latency_s": 0.2, "latency_sigma": 1.0},
        },
        **{
            "run": {"steps": 4},
            "rollout": {"scheduling": "trajectory", "groups_per_step": 3, "max_running": 16},
            "ablation": {"changes": ["rank"]},
            "engines": {"count": 2, "max_slots": 4, "kv_tokens": 4096},
            **sections,
        },
    )


@pytest.mark.slow
def test_trajectories_are_predicted_placed_and_migrated(tmp_path: Path) -> None:
    config = moving(tmp_path)
    summary = train(config)
    assert (summary.error, summary.steps) == ("", 4)
    assert summary.account.balanced
    _, events, commands = checked_journal(config)
    predictions = [event for event in events if isinstance(event, e.PredictionReady)]
    assert predictions
    moves = [event for event in events if isinstance(event, e.MigrationDone)]
    assert any(move.moved_tokens for move in moves), "no KV has moved"
    # On a busy machine new weights, or another context, may have replaced the KV before
    # it was exported.
    failed = [move for move in moves if move.error]
    reasons = ("evicted", "nothing of the context", "publication_id of the KV")
    assert all(any(reason in move.error for reason in reasons) for move in failed), failed
    assert len(moves) == sum(isinstance(command, c.Migrate) for command in commands)
    assert summary.scheduling["migrations"] == len(moves) - len(failed)


def test_the_policy_predicts_from_its_own_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a live run, engines give states, and each prediction after the first turn has
    the one of the turn before.
    """
    contexts = list[LengthContext]()
    complete = Pipeline.length_context

    def kept(pipeline: Pipeline, command: c.Predict) -> LengthContext:
        contexts.append(complete(pipeline, command))
        return contexts[-1]

    monkeypatch.setattr(Pipeline, "length_context", kept)
    config = lake(
        tmp_path,
        run={"steps": 3},
        rollout={"scheduling": "trajectory", "groups_per_step": 4},
        ablation={"changes": ["policy"]},
        eval={"every": 0, "final_episodes": 0},
    )
    summary = train(config, inproc=True)
    assert (summary.error, summary.steps) == ("", 3)
    assert contexts
    assert {len(context.state) for context in contexts} == {0, STATE_WIDTH}
    assert all(bool(context.state) == bool(context.turn) for context in contexts)
    assert all(context.prompt for context in contexts)
    (last,) = lines(config, "step")[-1:]
    assert last["predictor"]["failed"] == 0
    _, events, _ = checked_journal(config)
    assert any(isinstance(event, e.PredictionReady) for event in events)


@pytest.mark.slow
def test_engines_are_reallocated(tmp_path: Path) -> None:
    """Every step may change the degrees; whatever it decides, the budget holds and no
    trajectory is lost.
    """
    config = moving(
        tmp_path, engines={"max_slots": 4, "kv_tokens": 4096, "count": 1}, allocation=None
    )
    data = config.model_dump()
    del data["engines"]["count"], data["engines"]["degree"]
    config = RunConfig.model_validate({**data, "allocation": {"budget": 3}})
    summary = train(config)
    assert (summary.error, summary.steps) == ("", 4)
    _, events, commands = checked_journal(config)
    (started,) = [event for event in events if isinstance(event, e.RunStarted)]
    degrees = {slot.id: slot.degree for slot in started.engines}
    assert sorted(degrees.values()) == [1, 2]
    for command in commands:
        match command:
            case c.RemoveEngine():
                del degrees[command.engine_id]
            case c.StartEngine():
                degrees[command.engine_id] = command.degree
        assert sum(degrees.values()) <= 3
    joined = [event for event in events if isinstance(event, e.EngineJoined)]
    assert all(event.profile for event in joined), "every engine has measured itself"


@pytest.mark.slow
def test_an_engine_killed_during_a_migration_loses_nothing(tmp_path: Path) -> None:
    config = moving(tmp_path, run={"steps": 6}, watchdog={"restarts": 10})
    with living(config) as life:
        life.until(lambda core: core.state.counters.scheduling.migrations, "a migration")
        os.kill(life.children("rollweave.runtime.entrypoints.engine")[0], signal.SIGKILL)
        assert life.finish()["steps"] == 6
    referee, _, _ = checked_journal(config)
    assert "EngineLost" in referee.seen
