"""A run derives values from its configuration, and bounds its pools."""

import pytest

from rollweave.core import trajectories
from rollweave.core.core import Core
from rollweave.core.state import Stage
from rollweave.schema import commands as c
from tests.support.core import config
from tests.support.states import members, running


@pytest.mark.parametrize(("mode", "expected"), [("stream", 2), ("bounded", 1)])
def test_only_streamed_steps_are_trained_in_parts(mode: str, expected: int) -> None:
    core = Core(config(mode, trainer={"minibatches": 2}))
    assert core._run.minibatches_per_step == expected


def test_no_more_rewards_are_computed_at_once_than_trajectories_may_run() -> None:
    run = running(*[5] * 10)
    for one in members(run):
        one.stage = Stage.EVAL_QUEUED
        run.state.pools.eval_queued[one.id] = None
    run.out = []
    trajectories.start_evals(run)
    most = run.config.rollout.max_running
    assert most == 8
    assert sum(isinstance(one, c.StartEval) for one in run.out) == most
    assert [one.stage for one in members(run)] == [Stage.EVAL] * most + [Stage.EVAL_QUEUED] * 2
