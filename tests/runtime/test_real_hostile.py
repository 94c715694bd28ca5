"""A run goes on although its agents attack the processes that all attempts share."""

import json
from pathlib import Path

import pytest

from rollweave.record.store import TrajectoryReader
from rollweave.runtime.launch import train
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import Programs
from rollweave.schema.work import Blame, StopReason
from tests.support.real_gateway import checkpoint
from tests.support.real_runs import lines, run_dir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_hostile_turns_end_their_own_attempts_and_nothing_else(tmp_path: Path) -> None:
    """One program of three kills every engine that gets its turn, and one sends
    grammars that take half a minute to compile. No engine may fail by itself.
    """
    config = RunConfig.model_validate(
        {
            "run": {"name": "hostile", "dir": str(tmp_path), "steps": 2},
            "model": {"path": str(checkpoint(tmp_path / "model"))},
            "tasks": [
                {
                    "env": "tests.runtime.hostile:Hostile",
                    "tag": "hostile",
                    "max_turns": 3,
                    "max_tokens": 512,
                    "max_turn_tokens": 16,
                }
            ],
            "rollout": {"groups_per_step": 2, "group_size": 2, "max_running": 8},
            "algorithm": {"advantage": "grpo_no_std"},
            "trainer": {"lr": 1e-6},
            "engines": {"count": 2, "max_slots": 8, "kv_tokens": 8192},
            "watchdog": {"restarts": 0},
            "eval": {"every": 0, "final_episodes": 0},
        }
    )
    summary = train(config, programs=Programs(engine="tests.runtime.mortal_engine"))
    assert summary.error == ""
    account = summary.account
    assert account.balanced
    warnings = lines(config, "warning")
    assert not [line for line in warnings if "removed" in line["message"]]
    reader = TrajectoryReader(run_dir(config) / "trajectories")
    ended = [reader.load(entry) for entry in reader.entries]
    deadly = [one for one in ended if json.loads(one.result or "{}").get("kind") == "deadly"]
    assert deadly
    for trajectory in deadly:
        assert trajectory.stop_reason in (StopReason.ENGINES_LOST, StopReason.SURPLUS)
        if trajectory.stop_reason is StopReason.ENGINES_LOST:
            assert trajectory.blame is Blame.AGENT
            assert "turn 0 of" in trajectory.error
            assert "engines e" in trajectory.error
    assert any(one.stop_reason is StopReason.ENGINES_LOST for one in deadly)
    others = [one for one in ended if one not in deadly]
    assert all(one.stop_reason is not StopReason.ENGINES_LOST for one in others)
    refused = [
        json.loads(one.result)["refusals"]
        for one in others
        if json.loads(one.result or "{}").get("kind") == "grammar"
    ]
    assert refused
    for refusals in refused:
        assert ["at most 32768 characters" in refusals[0], "too much CPU time" in refusals[1]] == [
            True,
            True,
        ]
