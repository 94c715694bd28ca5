"""Whole runs in every mode and with every failure of an environment: all end, and all
account for everything.
"""

from collections import Counter
from pathlib import Path

import pytest

from rollweave.record.store import TrajectoryReader
from rollweave.schema.config.root import RunConfig
from rollweave.schema.work import BLAME_OF, TRAINABLE, Blame, StopReason
from tests.support.fake_runs import lines, make_config, replay, run, run_dir, trained
from tests.support.game import Blocking
from tests.support.variants import mostly_extended


@pytest.mark.parametrize(
    "mode",
    mostly_extended(["sync", "one_step", "stream", "partial", "bounded"], {"sync", "bounded"}),
)
def test_every_mode_keeps_its_bound_of_staleness(tmp_path: Path, mode: str) -> None:
    rollout = {"mode": mode, "spare_members": 1}
    config = make_config(
        tmp_path, rollout=rollout, trainer={"minibatches": 2}, engines={"count": 1}
    )
    summary = run(config)
    assert (summary.error, summary.steps, summary.account.balanced) == ("", 4, True)
    assert summary.staleness_max <= {"sync": 0}.get(mode, 1)
    assert summary.account.trained == 16
    assert [line["step"] for line in lines(config, "step")] == [0, 1, 2, 3]
    # a streamed step is one entry
    assert sum(line["trajectories"] for line in lines(config, "step")) == 16
    assert replay(config).differing == 0


def test_a_run_survives_environments_that_raise_hang_or_return_garbage(tmp_path: Path) -> None:
    shares = {"raises": 0.06, "hangs": 0.04, "garbage": 0.06, "no_reward": 0.3}
    faults = {"draws": str(tmp_path / "draws"), **shares}
    task = {"env": "tests.support.faulty:FaultyGame", "step_s": 0.3}
    config = make_config(
        tmp_path, steps=3, options={"faults": faults}, task=task, rollout={"retries": 5}
    )
    summary = run(config)
    assert (summary.error, summary.steps, summary.account.balanced) == ("", 3, True)
    assert summary.account.in_flight == 0
    results = ends(config)
    assert results[StopReason.ENV_ERROR] > 0
    assert results[StopReason.ENV_HANG] > 0
    assert results[StopReason.REWARD_ERROR] > 0
    assert sum(map(len, trained(config).values())) == summary.account.trained
    assert sum(summary.retried.values()) > 0
    assert replay(config).differing == 0


def test_a_blocking_environment_is_survived_in_a_process(tmp_path: Path) -> None:
    # a process takes a second to start
    faults = {"hangs_once": str(tmp_path / "hung")}
    env = {"env": "tests.support.faulty:FaultyGame", "options": {"faults": faults}}
    task = {**env, "step_s": 3.0, "isolation": "process"}
    config = make_config(
        tmp_path, steps=1, task=task, eval={"final_episodes": 0}, rollout={"max_running": 4}
    )
    summary = run(config)
    assert (summary.error, summary.steps, summary.account.balanced) == ("", 1, True)
    assert ends(config)[StopReason.ENV_HANG] > 0


def test_a_plain_step_that_never_returns_blocks_only_its_trajectory(tmp_path: Path) -> None:
    task, rollout = {"env": "tests.support.game:Blocking", "step_s": 0.5}, {"retries": 5}
    config = make_config(tmp_path, steps=3, task=task, options={"stuck": True}, rollout=rollout)
    try:
        summary = run(config)
    finally:
        Blocking.released.set()
    assert (summary.error, summary.steps, summary.account.balanced) == ("", 3, True)
    assert ends(config)[StopReason.ENV_HANG] > 0
    (warned, *_) = [
        line["message"] for line in lines(config, "warning") if line["component"] == "environment"
    ]
    assert warned.startswith(
        "step of environment tests.support.game:Blocking was abandoned and has not returned"
    )
    assert replay(config).differing == 0


def test_the_time_of_a_slow_environment_is_attributed_to_it(tmp_path: Path) -> None:
    """This holds although its steps block, and several trajectories step at once."""
    task, rollout = {"env": "tests.support.game:Blocking"}, {"mode": "sync"}
    config = make_config(
        tmp_path, steps=2, task=task, options={"step_s": 0.25, "turns": 4}, rollout=rollout
    )
    assert run(config).error == ""
    idle: Counter[str] = Counter()
    for line in lines(config, "step"):
        idle.update(line["idle"]["engines"])
    assert idle["environment"] > 4 * idle["busy"]


def ends(config: RunConfig) -> Counter[StopReason]:
    """Return how the run's attempts ended, and check that each is consistent in
    itself.
    """
    reader = TrajectoryReader(run_dir(config) / "trajectories")
    results = [reader.load(entry) for entry in reader.entries]
    for trajectory in results:
        assert trajectory.blame is BLAME_OF[trajectory.stop_reason]
        assert (trajectory.reward is not None) <= (trajectory.stop_reason in TRAINABLE)
        assert bool(trajectory.error) == (trajectory.blame is Blame.ENVIRONMENT)
    return Counter(trajectory.stop_reason for trajectory in results)


def test_a_task_source_that_raises_ends_the_run(tmp_path: Path) -> None:
    config = make_config(tmp_path, task={"env": "tests.support.game:NoTasks"})
    summary = run(config)
    assert "drawing a task failed: game #0" in summary.error
    assert "no tasks here" in summary.error
    assert (summary.steps, summary.account.started) == (0, 0)


def test_a_custom_reward_function(tmp_path: Path) -> None:
    config = make_config(tmp_path, steps=2, task={"env": "tests.support.game:Scored"})
    summary = run(config)
    assert (summary.error, summary.steps) == ("", 2)
    assert lines(config, "step")[0]["reward"] == {"game": 2.0}  # one per turn
