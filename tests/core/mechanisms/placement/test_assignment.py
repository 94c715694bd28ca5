"""The assignment of trajectories to engines: by work, by rank, and by what KV holds."""

import pytest

from rollweave.core.mechanisms.lengths.index import reindex, work_of
from rollweave.core.mechanisms.placement import assignment
from rollweave.core.mechanisms.placement.assignment import KV_KEPT_TURNS, REPLAN_GROWTH
from rollweave.core.policy.scheduling import overdue_rank
from rollweave.schema.base import EngineId
from tests.support.states import E0, E1, members, running

# KV.


def test_kv_holds_those_that_claim_it_first() -> None:
    """Three residents need 40 tokens each; the cache has 100."""
    run = running(10, 10, 10, engine=E0)
    engine = run.state.engines[E0]
    assert [assignment.fits_in_kv(run, one, engine) for one in members(run)] == [True, True, False]
    engine.abilities.kv_tokens = 120
    assert [assignment.fits_in_kv(run, one, engine) for one in members(run)] == [True] * 3
    engine.abilities.kv_tokens = 10
    assert [assignment.fits_in_kv(run, one, engine) for one in members(run)] == [True, False, False]


def test_a_stranger_comes_after_all_residents() -> None:
    run = running(10, 10, 10, engine=E0)
    first = members(run)[0]
    work_of(run, first).kv_resident = False
    reindex(run, first)
    assert not assignment.fits_in_kv(run, first, run.state.engines[E0])
    assert assignment.fits_in_kv(run, first, run.state.engines[E1])


@pytest.mark.parametrize("exempt", ["unpredicted", "overdue", "slow tools"])
def test_kv_does_not_hold_back_a_trajectory_that_is(exempt: str) -> None:
    run = running(10, 10, 10, engine=E0)
    last = members(run)[-1]
    match exempt:
        case "unpredicted":
            work_of(run, last).predicted_at_turn = -1
        case "overdue":
            last.turn.rank = overdue_rank(last.turn.arrival)
        case "slow tools":
            run.state.mechanisms["lengths"].domains["a"].tool_s = 2.1
    assert assignment.fits_in_kv(run, last, run.state.engines[E0])


def test_tools_as_slow_as_turns_are_worth_the_kv() -> None:
    run = running(10, 10, 10, engine=E0)
    run.state.mechanisms["lengths"].domains["a"].tool_s = (
        run.state.mechanisms["lengths"].domains["a"].turn_s
    )
    assert not assignment.fits_in_kv(run, members(run)[-1], run.state.engines[E0])


def test_no_kv_is_kept_for_environments_that_work_long() -> None:
    """Seconds are counted from the environment's start, in mean turns of 2 s."""
    run = running(10, 10, 10, engine=E0)
    away, _, last = members(run)
    away.turn, away.since = None, 1.0
    run.now = 1.0 + 2.0 * KV_KEPT_TURNS
    assert not assignment.fits_in_kv(run, last, run.state.engines[E0])
    run.now += 0.1
    assert assignment.fits_in_kv(run, last, run.state.engines[E0])
    run.state.engines[E0].abilities.kv_tokens = 79
    assert not assignment.fits_in_kv(run, last, run.state.engines[E0]), "one is left"
    run.state.mechanisms["lengths"].domains["a"].turn_s = 1e9
    assert not assignment.fits_in_kv(run, last, run.state.engines[E0])


def test_an_empty_cache_takes_any_context() -> None:
    run = running(10, 10, engine=E0)
    away, last = members(run)
    run.state.engines[E0].abilities.kv_tokens = 10
    away.turn, run.now = None, 100.0
    assert assignment.fits_in_kv(run, last, run.state.engines[E0])


# Work.


def test_the_engine_that_is_done_first_is_the_least_loaded() -> None:
    run = running(50, 20)
    first, second = members(run)
    for one, engine_id in ((first, E0), (second, E1)):
        work_of(run, one).assigned_engine = engine_id
        reindex(run, one)
    engines = run.state.engines
    assert assignment.work_s(run, engines[E0]) > assignment.work_s(run, engines[E1]) > 0
    assert assignment.least_loaded(run) is engines[E1]
    assert assignment.least_loaded(run, among=[E0]) is engines[E0]
    assert assignment.least_loaded(run, among=[]) is None
    work_of(run, second).assigned_engine = E0
    reindex(run, second)
    assert assignment.work_s(run, engines[E1]) == 0.0
    engines[E1].draining = True
    assert assignment.least_loaded(run) is engines[E0]
    engines[E0].version = -1
    assert assignment.least_loaded(run) is None


# Ranks.


def test_ranks_are_planned_once_and_again_after_growth() -> None:
    run = running(100, 1, 1, 1)
    longest, *short = members(run)
    home = assignment.engine_of_rank(run, longest)
    others = {assignment.engine_of_rank(run, one) for one in short}
    assert len({home, *others}) == 2, "both engines get some"
    plans = run.state.counters.scheduling.plans
    assert (plans, run.state.mechanisms["placement"].partitions[""].planned) == (1, 4)
    assert sum(share.size for share in run.state.mechanisms["placement"].partitions[""].shares) == 4
    run.state.mechanisms["placement"].partitions[""].predictions = int(4 * REPLAN_GROWTH)
    assert assignment.engine_of_rank(run, longest) == home
    assert run.state.counters.scheduling.plans == 1
    run.state.mechanisms["placement"].partitions[""].predictions += 1
    assignment.engine_of_rank(run, longest)
    assert run.state.counters.scheduling.plans == 2
    assert run.state.mechanisms["placement"].partitions[""].predictions == 0


def test_a_prediction_from_the_prompt_alone_chooses_the_engine_that_is_done_first() -> None:
    """It is the same for a whole group, whose members would gather on one engine."""
    run = running(100, 1, 1, 1)
    longest, short, *_ = members(run)
    home = assignment.engine_of_rank(run, longest)
    work_of(run, short).assigned_engine = home
    reindex(run, short)
    assignment.assign_usable(run, longest, [])
    assert work_of(run, longest).assigned_engine not in (home, None)


def test_an_engine_that_drains_or_has_no_weights_gets_no_share() -> None:
    for change in ({"draining": True}, {"version": -1}):
        run = running(100, 1, 1, 1)
        for name, value in change.items():
            setattr(run.state.engines[E1], name, value)
        assert {assignment.engine_of_rank(run, one) for one in members(run)} == {E0}
        assert not assignment.is_usable(run, E1)
        assert assignment.is_usable(run, E0)
    assert not assignment.is_usable(run, EngineId("e7"))


def test_a_trajectory_keeps_its_engine_while_that_is_usable() -> None:
    run = running(100, 1, 1, 1)
    longest, short, *_ = members(run)
    home = assignment.engine_of_rank(run, longest)
    work_of(run, short).assigned_engine = home
    reindex(run, short)
    work_of(run, longest).predicted_at_turn = 1
    assignment.assign_usable(run, longest, [])
    assert work_of(run, longest).assigned_engine == home, (
        "its rank's, although the other one is idle"
    )
    work_of(run, longest).kv_resident = True
    assignment.assign_usable(run, longest, [])
    assert work_of(run, longest).kv_resident
    (other,) = {E0, E1} - {home}
    assignment.assign_usable(run, longest, [home])
    expected = (other, False)
    assert (work_of(run, longest).assigned_engine, work_of(run, longest).kv_resident) == expected
    assignment.assign_usable(run, longest, [home, other])
    assert work_of(run, longest).assigned_engine == home, (
        "both have failed it: its rank decides again"
    )
    for engine in run.state.engines.values():
        engine.draining = True
    assignment.assign_usable(run, longest, [])
    assert work_of(run, longest).assigned_engine is None


def test_without_a_prediction_the_least_loaded_engine_is_chosen() -> None:
    run = running(100, 1)
    longest, short = members(run)
    work_of(run, longest).assigned_engine = E0
    reindex(run, longest)
    work_of(run, short).predicted_at_turn = -1
    assignment.assign_usable(run, short, [])
    assert work_of(run, short).assigned_engine == E1
    assert run.state.counters.scheduling.plans == 0
