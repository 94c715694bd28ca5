"""Engines that gave turns back rest: they get no others for a time, which doubles until
one of their turns is done.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.core import dispatching, turns
from rollweave.core.mechanisms.loans import must_return, to_borrow
from rollweave.core.policy.retry import rest_s
from rollweave.core.run import Run
from rollweave.core.state import EngineStatus, OnEngine, Queued, Trajectory
from rollweave.core.turns import set_timer
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import EngineId
from rollweave.schema.events import Lender
from tests.support.kinds import of
from tests.support.states import E0, E1, members, running


def lending(*, turns: int = 2) -> Run:
    """Return a run with turns in the queue, its own engine e0, and e1, which is
    lent.
    """
    run = running(*[5] * turns, rollout={"scheduling": "turn"})
    for engine in run.state.engines.values():
        engine.status, engine.version, engine.publication_id = EngineStatus.SERVING, 3, 5
    run.state.engines[E1].abilities.lent = True
    run.fleet_changed()
    for trajectory in members(run):
        run.state.pools.run[trajectory.id] = None
        dispatching.enqueue(run, trajectory, trajectory.open_turn)
    run.out = []
    return run


def place_on(run: Run, trajectory: Trajectory, engine_id: EngineId) -> None:
    """Give the queued turn of a trajectory to this engine."""
    slots = {engine.id: engine.abilities.max_slots for engine in run.state.engines.values()}
    for engine in run.state.engines.values():
        engine.abilities.max_slots = (
            slots[engine.id] if engine.id == engine_id else len(engine.active)
        )
    run.fleet_changed()
    dispatching.dispatch(run)
    for engine in run.state.engines.values():
        engine.abilities.max_slots = slots[engine.id]
    run.fleet_changed()
    place = trajectory.open_turn.place
    assert isinstance(place, OnEngine)
    assert place.engine == engine_id


def give_back(run: Run, trajectory: Trajectory) -> None:
    turns.on_returned(
        run,
        e.TurnReturned(
            trajectory_id=trajectory.id,
            attempt=trajectory.attempt,
            turn=trajectory.open_turn.number,
            dispatch=trajectory.open_turn.dispatch,
        ),
    )


def timer(run: Run) -> float:
    return [command.at for command in of(run.out, c.SetTimer)][-1]


def test_an_engine_that_gave_turns_back_gets_others_once_it_has_rested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollweave.core.turns.CHECKS_PER_LIMIT", 1)  # seldom
    run = lending(turns=1)
    (one,) = members(run)
    place_on(run, one, E1)
    run.now = 10.0
    give_back(run, one)
    assert run.state.engines[E1].barred == {"rests": 12.0}
    assert timer(run) == 12.0, "the engine is looked at again then"
    (warning,) = of(run.out, c.Warn)
    assert (warning.component, warning.message) == (E1, "gave turns back: gets no others for 2 s")
    assert run.state.counters.watchdog == {"engine_rests": 1}
    run.state.engines[E0].status = EngineStatus.LOADING
    run.fleet_changed()
    dispatching.dispatch(run)
    assert isinstance(one.open_turn.place, Queued), "the only engine rests"
    run.now = 11.9
    turns.end_rests(run)
    dispatching.dispatch(run)
    assert isinstance(one.open_turn.place, Queued)
    run.now = 12.0
    turns.end_rests(run)
    dispatching.dispatch(run)
    assert isinstance(one.open_turn.place, OnEngine), "no other engine takes turns"
    run.state.turns.timer_at = 0.0  # it has fired
    set_timer(run)
    assert timer(run) > 20.0


def test_a_turn_that_was_given_back_waits_for_another_engine_that_takes_turns() -> None:
    run = lending(turns=1)
    (one,) = members(run)
    place_on(run, one, E1)
    give_back(run, one)
    own = run.state.engines[E0]
    own.abilities.max_slots = 0
    run.fleet_changed()
    run.now = 60.0
    turns.end_rests(run)
    dispatching.dispatch(run)
    assert isinstance(one.open_turn.place, Queued)
    own.abilities.max_slots = 4
    run.fleet_changed()
    dispatching.dispatch(run)
    assert one.open_turn.place == OnEngine(engine=E0, given=1)


def test_all_turns_of_one_stall_are_one_return() -> None:
    run = lending(turns=2)
    first, second = members(run)
    place_on(run, first, E1)
    assert isinstance(second.open_turn.place, OnEngine)
    give_back(run, first)
    give_back(run, second)
    engine = run.state.engines[E1]
    assert (engine.failures.returns, engine.barred) == (1, {"rests": 2.0})
    assert run.state.counters.turns_returned == 2


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["return", "done", "wait"]), st.integers(0, 40)), max_size=30
    )
)
def test_rests_follow_a_slow_reference(steps: list[tuple[str, int]]) -> None:
    """A plain history of what happened decides how long each rest is."""
    run = lending(turns=1)
    (one,) = members(run)
    engine = run.state.engines[E1]
    history: list[str] = []
    until = 0.0
    for what, seconds in steps:
        run.now += seconds
        turns.end_rests(run)
        resting = run.now < until
        assert ("rests" in engine.barred) == resting
        assert run.fleet.loads[E1].slots == (0 if resting else 4)
        if what == "wait" or resting:
            continue
        one.open_turn.avoid = []
        place_on(run, one, E1)
        if what == "return":
            give_back(run, one)
            since = len(history) - max(
                [at + 1 for at, before in enumerate(history) if before == "done"], default=0
            )
            until = run.now + min(60.0, 2.0 * 2**since)
        else:
            engine.failures.returns = 0  # as `turns.on_done` does
            turn = one.open_turn
            run.fleet.vacate(engine, one.id, turn)
            turn.dispatch += 1
            dispatching.enqueue(run, one, turn)
        history.append(what)


def test_a_turn_that_is_done_ends_the_growth() -> None:
    run = lending(turns=1)
    (one,) = members(run)
    place_on(run, one, E1)
    engine = run.state.engines[E1]
    engine.failures.returns = 5
    turns.on_done(
        run,
        e.TurnDone(
            trajectory_id=one.id,
            attempt=one.attempt,
            turn=0,
            dispatch=one.open_turn.dispatch,
            output_tokens=3,
            cached_tokens=0,
            version=3,
        ),
    )
    assert engine.failures.returns == 0


LENDERS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.1, 0.25, 0.9]),
        st.sampled_from(["", "", "this", "other"]),
        st.booleans(),
        st.booleans(),
    ),
    max_size=8,
).map(
    lambda every: [
        Lender(name=f"s{number}", kv_use=use, lent_to=run, takes=takes, recalled=recalled)
        for number, (use, run, takes, recalled) in enumerate(every)
    ]
)
HELD = st.sets(st.sampled_from([f"s{number}" for number in range(10)]), max_size=4)


@given(lenders=LENDERS, held=HELD, most=st.integers(0, 6))
def test_the_least_used_free_lenders_are_borrowed(
    lenders: list[Lender], held: set[str], most: int
) -> None:
    chosen: list[str] = []
    while len(held) + len(chosen) < most:
        free = [
            lender
            for lender in lenders
            if lender.lent_to == ""
            and not lender.recalled
            and lender.name not in held
            and lender.name not in chosen
        ]
        if not free:
            break
        least = min(lender.kv_use for lender in free)
        chosen.append(min(lender.name for lender in free if lender.kv_use == least))
    assert to_borrow(lenders, held=held, most=most) == chosen


@given(lenders=LENDERS)
def test_an_engine_is_returned_if_it_is_recalled_or_lent_elsewhere(lenders: list[Lender]) -> None:
    for lender in lenders:
        reason = must_return(lender.name, lenders, run="this")
        assert bool(reason) == (lender.recalled or lender.lent_to == "other")
    assert must_return("unknown", lenders, run="this") == "", "its lease decides"


@given(times=st.integers(1, 10_000))
def test_each_rest_is_twice_as_long_as_the_one_before_up_to_a_minute(times: int) -> None:
    expected = 2.0
    for _ in range(min(times, 50) - 1):
        expected = min(60.0, 2 * expected)
    assert rest_s(times) == expected
    with pytest.raises(ValueError, match="times must be at least 1"):
        rest_s(0)
