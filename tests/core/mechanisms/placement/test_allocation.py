"""A planned fleet: what it is planned for, and how the running one becomes it."""

import pytest

from rollweave.core.mechanisms.costs.placement import allocate_groups
from rollweave.core.mechanisms.costs.rates import groups_of
from rollweave.core.mechanisms.lengths.work import occupied
from rollweave.core.mechanisms.placement import allocation
from rollweave.core.policy.turn_times import TurnTimes
from rollweave.core.run import Run
from rollweave.core.state import Phase, Unplaced
from rollweave.schema import commands as c
from tests.support.kinds import of
from tests.support.states import DEGREES, TAIL, fleet


def degrees_of(run: Run) -> list[int]:
    """The degrees of the engines that stay, and of those that are to be started."""
    staying = [one.seat.degree for one in run.state.engines.values() if not one.draining]
    return sorted([*staying, *run.state.membership.pending_degrees])


def test_the_fleet_becomes_the_planned_one() -> None:
    run = fleet(1, 1, 1, 1, 1, lengths=TAIL)
    allocation.plan(run)
    works = allocation._batch(run)
    planned = allocate_groups(
        groups_of(run, works, {degree: ("", degree) for degree in DEGREES}), 5, DEGREES
    )
    assert degrees_of(run) == sorted(planned.degrees) == [1, 4], "the longest gets four GPUs"
    assert run.state.membership.pending_degrees == [4]
    assert run.state.counters.scheduling.reallocations == 1
    assert run.state.mechanisms["placement"].planned_at == 1


def test_engines_of_the_plan_start_when_the_budget_has_room() -> None:
    run = fleet(1, 1, 1, 1, 1, lengths=TAIL)
    allocation.plan(run)
    engines = run.state.engines
    while len(engines) > 1:
        allocation.advance(run)
        assert not of(run.out, c.StartEngine)
        del engines[next(one.id for one in engines.values() if one.draining)]
    allocation.advance(run)
    (started,) = of(run.out, c.StartEngine)
    assert started.degree == 4
    assert run.state.membership.pending_degrees == []


def test_engines_that_wait_for_a_place_use_the_budget() -> None:
    run = fleet(1, lengths=TAIL)
    run.state.hosts.unplaced = [Unplaced(degree=1, group=0)]
    run.state.membership.pending_degrees = [4]
    allocation.advance(run)
    assert run.state.membership.pending_degrees == [4]
    run.state.hosts.unplaced = []
    allocation.advance(run)
    assert run.state.membership.pending_degrees == []


@pytest.mark.parametrize("gain", [1.0, 1.02])
def test_a_fleet_that_saves_little_is_not_worth_its_starts(gain: float) -> None:
    """All trajectories are alike: more GPUs for an engine save next to nothing."""
    run = fleet(1, 1, 1, 1, 1, lengths=[100] * 40, gain=gain)
    allocation.plan(run)
    assert degrees_of(run) == [1] * 5
    assert run.state.counters.scheduling.reallocations == 0


@pytest.mark.parametrize(
    "hindrance", ["pending", "draining", "unplaced", "recent", "ending", "few"]
)
def test_nothing_is_planned(hindrance: str) -> None:
    run = fleet(1, 1, 1, 1, 1, lengths=TAIL if hindrance != "few" else TAIL[:4])
    match hindrance:
        case "pending":
            run.state.membership.pending_degrees = [1]
        case "draining":
            next(iter(run.state.engines.values())).draining = True
        case "unplaced":
            run.state.hosts.unplaced = [Unplaced(degree=1, group=0)]
        case "recent":
            run.state.mechanisms["placement"].planned_at = 1
        case "ending":
            run.state.phase = Phase.EVALUATING
    before = degrees_of(run)
    allocation.plan(run)
    assert degrees_of(run) == before


def test_degrees_that_no_engine_measured_are_left_out_with_a_warning() -> None:
    run = fleet(1, 1, 1, 1, 1, lengths=TAIL)
    del run.state.mechanisms["costs"].measured[""][4]
    allocation.plan(run)
    assert degrees_of(run) == [1, 2, 2]
    (warning,) = of(run.out, c.Warn)
    assert "no engine of degree 4 fits the budget of 5" in warning.message


def test_the_plan_waits_for_the_costs_of_engines_that_run() -> None:
    run = fleet(2, 1, 1, 1, lengths=TAIL)
    costs = run.state.mechanisms["costs"].measured[""].pop(2)
    allocation.plan(run)
    assert degrees_of(run) == [1, 1, 1, 2]
    assert not run.out
    run.state.mechanisms["costs"].measured[""][2] = costs
    run.state.trainer.step += 1
    allocation.plan(run)
    assert degrees_of(run) == [1, 4]


def later(run: Run) -> list[str]:
    """Plan after another step, and return the warnings."""
    run.out = []
    run.state.trainer.step += 1
    allocation.plan(run)
    return [command.message for command in of(run.out, c.Warn)]


def test_a_plan_waits_for_costs_for_a_few_steps_only() -> None:
    """Then the engine whose costs are not known stays, and the others are planned."""
    run = fleet(1, 2, 2, lengths=TAIL)
    costs = run.state.mechanisms["costs"].measured[""].pop(1)
    run.state.mechanisms["costs"].turn_times[""] = {1: TurnTimes(count=5)}
    run.state.trainer.step = 0
    run.state.mechanisms["placement"].planned_at = -1
    for _ in range(allocation.WAIT_STEPS):
        assert later(run) == []
        assert degrees_of(run) == [1, 2, 2]
    (warning,) = later(run)
    assert "after 4 steps the engines of degree 1 have finished 5 of the 16 turns" in warning
    assert degrees_of(run) == [1, 4], "4 is the budget that is left"
    run.state.membership.pending_degrees = []
    for engine in [one for one in run.state.engines.values() if one.draining]:
        del run.state.engines[engine.id]
    assert later(run) == [], "it is named once"
    run.state.mechanisms["costs"].measured[""][1] = costs
    for engine in run.state.engines.values():
        engine.draining = False
    run.state.membership.pending_degrees = []
    later(run)
    assert run.state.mechanisms["placement"].awaited == {}


def test_a_fleet_of_unknown_costs_stays() -> None:
    run = fleet(2, 1, 1, lengths=TAIL)
    known = run.state.mechanisms["costs"].measured.pop("")
    for _ in range(allocation.WAIT_STEPS + 3):
        later(run)
        assert degrees_of(run) == [1, 1, 2]
    warned = run.state.counters.watchdog
    assert (warned["degree_1_unlearned"], warned["degree_2_unlearned"]) == (1, 1)
    run.state.mechanisms["costs"].measured[""] = known
    later(run)
    assert degrees_of(run) != [1, 1, 2]


def test_a_degree_that_is_learned_in_time_is_not_named() -> None:
    run = fleet(2, 1, 1, 1, lengths=TAIL)
    costs = run.state.mechanisms["costs"].measured[""].pop(2)
    for _ in range(allocation.WAIT_STEPS):
        assert later(run) == []
    run.state.mechanisms["costs"].measured[""][2] = costs
    assert later(run) == []
    assert degrees_of(run) == [1, 4]


def test_a_batch_is_spaced_evenly_by_length() -> None:
    """Six of a hundred: the middle of each sixth, with the context that it occupies."""
    run = fleet(1, lengths=list(range(1, 101)))
    run.state.mechanisms["lengths"].domains["a"].prompt_tokens = 7.0
    run.state.mechanisms["lengths"].domains["a"].context_growth = 2.0
    expected = [92, 75, 59, 42, 25, 9]
    assert allocation._batch(run) == [
        (length, round(occupied(length, context=7.0, growth=2.0))) for length in expected
    ]
    run.state.mechanisms["lengths"].domains["a"].lengths = [5, 3]
    assert [length for length, _ in allocation._batch(run)] == [5, 3]
    run.state.mechanisms["lengths"].domains.clear()
    assert allocation._batch(run) == []
