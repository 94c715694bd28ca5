"""A real training under default settings loses no more than the time between two
checkpoints, whichever process is killed.
"""

import os
import signal
from pathlib import Path

import pytest

from tests.support.real_runs import Life, lake, lines, living, replayed, run_dir, summary, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DEFAULT = {"checkpoint_every": None, "steps": 100_000}


def later_checkpoint(life: Life) -> int:
    """Wait for a checkpoint after the first."""

    def newest() -> int:
        names = (
            path.name.removeprefix("step-")
            for path in (run_dir(life.config) / "checkpoints").glob("step-*")
        )
        return max((int(name) for name in names if name.isdecimal()), default=0)

    return int(wait_for(newest, "a checkpoint by time", life))


def test_a_killed_controller_resumes_from_a_timed_checkpoint_and_reports_the_loss(
    tmp_path: Path,
) -> None:
    config = lake(tmp_path, run=DEFAULT, eval={"every": 0, "final_episodes": 0})
    with living(config) as life:
        later_checkpoint(life)
        life.kill()
    core = replayed(config)
    assert core is not None
    step, checkpoint = core.state.trainer.step, core.state.checkpoints.newest
    assert checkpoint is not None
    more = lake(
        tmp_path,
        run={**DEFAULT, "steps": step + 2},
        eval={"every": 0, "final_episodes": 0},
        trainer={"lr": 2e-4},
    )
    with living(more, resume=True) as life:
        life.finish()
        output = life.output
    (resumed,) = lines(config, "resumed")
    assert (resumed["step"], resumed["steps_lost"]) == (checkpoint, step - checkpoint)
    assert f"resuming at step {checkpoint}" in output
    assert "trainer.lr: 1e-05 → 0.0002" in output
    assert summary(more)["steps"] == step + 2


def test_a_killed_trainer_continues_from_a_timed_checkpoint(tmp_path: Path) -> None:
    config = lake(tmp_path, run=DEFAULT, eval={"every": 0, "final_episodes": 0})
    with living(config) as life:
        checkpoint = later_checkpoint(life)
        life.until(
            lambda core: core.state.trainer.step > checkpoint + 2, "steps after the checkpoint"
        )
        os.kill(life.child("rollweave.runtime.entrypoints.trainer"), signal.SIGKILL)

        def restores() -> list[str]:
            return [
                line["message"]
                for line in lines(config, "warning")
                if "continues from" in line["message"]
            ]

        (message,) = wait_for(restores, "a trainer that continues", life)
        step, rest = message.removeprefix("continues from step ").split(":")
        assert int(step) >= checkpoint
        assert int(rest.split()[0]) > 0  # steps that are trained again
        life.until(lambda core: core.state.trainer.step > int(step), "a step after it")
        life.kill()
