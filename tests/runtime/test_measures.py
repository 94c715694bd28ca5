"""Runs that train by what the trainer measures, through real processes: the fake
trainer waits until there is a choice, and fails on request.
"""

import json
import signal
from pathlib import Path

import pytest

from rollweave.record.journal import Replay
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig
from tests.support import fake_runs
from tests.support.referee import Referee

STEPS = 12
HOLD = 14
"""Number of scored trajectories before a step ends: two are in the step, and twelve of
at most eight groups complete four.
"""


def by(directory: Path, sample: str = "ratio") -> RunConfig:
    """Return a configuration that trains one group of two per step, of up to eight that
    wait, with one engine so that nothing is consolidated, and a critic.
    """
    config = fake_runs.make_config(
        directory,
        steps=STEPS,
        rollout={"mode": "decoupled", "groups_per_step": 1, "max_running": 16},
        buffer={"sample": sample},
        algorithm={"advantage": "gae"},
        engines={"count": 1},
    )
    assert config.model.path is not None
    (Path(config.model.path) / "hold").write_text(str(HOLD))
    return config


def assert_trained_once(config: RunConfig) -> None:
    steps = fake_runs.trained(config)
    assert sorted(steps) == list(range(STEPS))
    ids = [name for batch in steps.values() for name in batch]
    assert len(ids) == len(set(ids)) == 2 * STEPS


def choices(config: RunConfig) -> int:
    """Return the steps that were chosen by a measured value: of the groups that the
    fake trainer measured, each took the last one, whose value it makes the best.
    """
    history = list(Replay(fake_runs.run_dir(config) / "journal.bin", config))
    Referee().watch(history)
    count, last = 0, ""
    for _, event, commands in history:
        for command in commands:
            if isinstance(command, c.MeasureGroups):
                last = command.groups[-1].id
            elif isinstance(command, c.TrainStep) and isinstance(event, e.GroupsMeasured):
                count += 1
                assert [group.id for group in command.groups] == [last]
    return count


@pytest.mark.parametrize("sample", ["ratio", "entropy", "td_error"])
def test_steps_train_the_best_of_the_measured_groups(tmp_path: Path, sample: str) -> None:
    config = by(tmp_path, sample)
    summary = fake_runs.run(config)
    assert (summary.error, summary.steps, summary.account.balanced) == ("", STEPS, True)
    assert_trained_once(config)
    assert choices(config) >= 3
    assert "measuring" in summary.idle["trainer"]
    spans = json.loads((fake_runs.run_dir(config) / "trace.json").read_text())
    measured = [span for span in spans if span.get("name", "").startswith("measure ")]
    assert measured[0]["name"] == "measure 1.0"
    assert measured[0]["args"]["groups"] > 1
    fake_runs.assert_no_processes(config)


@pytest.mark.variants
@pytest.mark.parametrize("what", ["kill-trainer-2", "fail-measure-2"])
def test_a_trainer_that_fails_while_it_measures_is_restarted(tmp_path: Path, what: str) -> None:
    config = by(tmp_path)
    fake_runs.fault(config, what)
    summary = fake_runs.run(config)
    assert (summary.error, summary.steps, summary.account.balanced) == ("", STEPS, True)
    assert summary.watchdog["trainer_restarted"] == 1
    (warning,) = [
        line for line in fake_runs.lines(config, "warning") if "restarted" in line["message"]
    ]
    assert ("step 2 failed: no luck" if what.startswith("fail") else "SIGKILL") in warning[
        "message"
    ]
    assert_trained_once(config)
    assert choices(config) >= 3
    fake_runs.assert_no_processes(config)


def test_nonfinite_log_probs_end_the_run(tmp_path: Path) -> None:
    config = by(tmp_path)
    fake_runs.fault(config, "nan-measure-2")
    summary = fake_runs.run(config)
    assert summary.error.startswith("step 2: no number; batch of groups g")
    assert "last good checkpoint: step 2" in summary.error  # it may still be written
    assert summary.account.balanced
    fake_runs.assert_no_processes(config)
    assert fake_runs.run(config, resume=True).steps == STEPS


def test_a_controller_lost_while_the_trainer_measures_resumes(tmp_path: Path) -> None:
    config = by(tmp_path)
    fake_runs.fault(config, "kill-controller-2")
    assert fake_runs.controller(config).wait(60) == -signal.SIGKILL
    fake_runs.assert_no_processes(config)
    summary = fake_runs.run(config, resume=True)
    assert (summary.error, summary.steps, summary.account.balanced) == ("", STEPS, True)
    assert fake_runs.lines(config, "resumed")[0]["differing"] == 0
    assert_trained_once(config)
