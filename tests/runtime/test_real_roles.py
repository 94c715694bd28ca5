"""Whole runs with roles: a reward and an environment call workers, of which one is
killed; a controller is killed; and the run starts the engine of a judge.
"""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rollweave.record.rundir import RunDir
from rollweave.record.store import TrajectoryReader
from tests.support.real_gateway import checkpoint
from tests.support.real_runs import Life, lake, run_dir

JUDGES = "tests.runtime.roles.judges"
ROLE = "rollweave.runtime.entrypoints.role"


def counted(directory: Path, **sections: Any) -> Life:
    config = lake(
        directory,
        task={"env": f"{JUDGES}:Lake", "isolation": "process"},
        roles={"judge": {"cls": f"{JUDGES}:Judge", "count": 2, "arguments": {"word": ""}}},
        rewards=[{"name": "moves", "function": f"{JUDGES}:moves"}],
        workers={"count": 2},
        warmup={"steps": 0},  # transcripts are written outside of the run
        eval={"every": 0, "final_episodes": 0},
        **sections,
    )
    return Life(config)


@pytest.mark.slow
def test_a_run_goes_on_with_a_restarted_worker_of_a_role(tmp_path: Path) -> None:
    life = counted(tmp_path, run={"steps": 4})
    life.until(lambda core: core.state.trainer.step > 0, "a trained step")
    os.kill(life.children(ROLE)[0], signal.SIGKILL)
    summary = life.finish()
    assert summary["steps"] == 4
    assert "is lost, and restarted (1 of 3)" in life.output
    rewards = [
        entry.score.rewards["moves"]
        for entry in TrajectoryReader(run_dir(life.config) / "trajectories").entries
        if entry.score is not None and entry.score.reward is not None
    ]
    assert rewards
    assert set(rewards) == {1.0}  # the empty word is in every move


@pytest.mark.slow
def test_a_killed_controller_leaves_no_worker_of_a_role(tmp_path: Path) -> None:
    life = counted(tmp_path, run={"steps": 100})
    life.until(lambda core: core.state.trainer.step > 0, "a trained step")
    assert len(life.children(ROLE)) == 2
    life.kill()


def judged(directory: Path) -> Life:
    """Begin a run that starts the engine of a judge, whose model is in `model`."""
    model = directory / "model"
    judge = {
        "model": str(model),
        "rubric": "Be fair.",
        "request": {"guided_choice": ["Score: 0.25", "Score: 0.75"], "max_tokens": 20},
    }
    config = lake(
        directory,
        run={"steps": 1},
        rollout={"groups_per_step": 1, "group_size": 2},
        rewards=[{"name": "judge", "judge": judge}],
        eval={"every": 0, "final_episodes": 0},
    )
    return Life(config)


@pytest.mark.slow
def test_a_judge_whose_model_cannot_be_loaded_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"torn")
    life = judged(tmp_path)
    assert life.end() == 2
    (error,) = life.errors
    assert error.startswith("error: rewards.judge.judge.model must be constructed on this host")
    assert "must be a complete safetensors file" in error


@pytest.mark.slow
def test_a_run_starts_the_engine_of_its_judge(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model")
    life = judged(tmp_path)
    life.finish()
    reader = TrajectoryReader(RunDir(run_dir(life.config)).trajectories)
    grades = [one.score.rewards.get("judge") for one in reader.entries if one.score is not None]
    assert set(grades) <= {0.25, 0.75}
    assert grades
