"""Engines that share a device in the ways of ROSE's baselines."""

import random

import pytest

from rollweave.sim.lender import Lender
from rollweave.sim.run import simulate
from rollweave_papers.sharing import (
    KEPT_S,
    RELOAD_S,
    EarliestDue,
    FixedHalves,
    OneModel,
    TakingTurns,
)
from tests.support.borrowing import config, lenders
from tests.support.simulated_lender import Rig, every_turn_ends


@pytest.mark.parametrize("kind", [TakingTurns, FixedHalves, EarliestDue, OneModel])
@pytest.mark.parametrize("seed", range(6))
def test_every_turn_is_answered_aborted_or_given_back(kind: type[Lender], seed: int) -> None:
    every_turn_ends(Rig(kind), random.Random(f"{kind.__name__}/{seed}"))


def test_an_engine_that_holds_one_model_at_a_time_loads_the_other() -> None:
    """Rollouts come once users were away for long enough, and go when they return."""
    rig = Rig(OneModel)
    first = rig.user(0.0, 40, 10)
    rig.until(1.0)
    assert not rig.rollout(1.0, "t0"), "it holds the serving model"
    served_at = rig.last[first]
    rig.until(served_at + KEPT_S + RELOAD_S - 0.1)
    assert not rig.lender.takes
    rig.until(served_at + KEPT_S + RELOAD_S + 0.1)
    assert rig.lender.takes
    assert rig.rollout(100.0, "t1", output=700)
    second = rig.user(101.0, 40, 10)
    rig.until(101.5)
    assert not rig.lender.takes
    rig.until(1000.0)
    assert rig.returned.keys() == {"t1"}
    assert rig.returned["t1"] > 0
    assert RELOAD_S <= rig.first[second] - 101.0 <= RELOAD_S + 5.0
    assert rig.lender.takes, "users are away again"


def test_an_engine_that_is_woken_serves_again() -> None:
    rig = Rig(OneModel)
    rig.until(KEPT_S + RELOAD_S)
    assert isinstance(rig.lender, OneModel)
    assert rig.lender.holds_rollouts
    rig.lender.wake(rig.now)
    rig.until(rig.now + RELOAD_S)
    assert rig.lender.holds_serving
    user = rig.user(rig.now, 40, 1)
    rig.until(rig.now + 10.0)
    assert rig.first[user] - user.arrived < 5.0


def test_without_admission_users_wait_longer() -> None:
    lent = simulate(config(), serving=lenders())
    spatial = simulate(config(), serving=lenders(sharing="multiplexing"))
    assert lent.serving is not None
    assert spatial.serving is not None
    assert spatial.serving.requests > 0
    assert lent.serving.late_first <= spatial.serving.late_first
