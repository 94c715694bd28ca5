"""The aggregates over all engines, against a count of a fleet that is laid out."""

import math

from rollweave.core.fleet import Fleet
from rollweave.core.state import (
    Abilities,
    Engine,
    EngineStatus,
    Loading,
    Seat,
    State,
    Trajectory,
    Turn,
)
from rollweave.schema.base import EngineId, GroupId, TrajectoryId

A, B, C, D, F, G = (EngineId(name) for name in "abcdfg")
RANKS = {"t0": 3.0, "t1": 1.0, "t2": 2.0}


def laid_out() -> State:
    """Two engines serve, one of them with more turns than slots; the others start,
    load, are stale or drain.
    """
    state = State()
    for name, status, fields in (
        (A, EngineStatus.SERVING, {"version": 3, "publication_id": 5, "seat": Seat(pool="fast")}),
        (B, EngineStatus.SERVING, {"version": 4, "publication_id": 6, "leaving": True}),
        (C, EngineStatus.STARTING, {"seat": Seat(pool="slow")}),
        (
            D,
            EngineStatus.LOADING,
            {"version": 2, "publication_id": 4, "loading": Loading(id=6), "seat": Seat(pool="big")},
        ),
        (F, EngineStatus.STALE, {"version": 3, "publication_id": 5}),
        (G, EngineStatus.SERVING, {"version": 1, "draining": True, "seat": Seat(pool="old")}),
    ):
        state.engines[name] = Engine(
            id=name, status=status, abilities=Abilities(max_slots=2), **fields
        )  # type: ignore[arg-type]
    for number, (name, rank) in enumerate(RANKS.items()):
        state.trajectories[TrajectoryId(name)] = Trajectory(
            id=TrajectoryId(name),
            group_id=GroupId("g0"),
            member=number,
            turn=Turn(number=0, context_tokens=10 + number, since=0.0, rank=rank),
        )
        state.engines[A].active[TrajectoryId(name)] = 0
    return state


def test_what_is_counted() -> None:
    fleet = Fleet.of(laid_out())
    assert list(fleet.loads) == [A, B]
    assert (fleet.slots, fleet.active, fleet.free, fleet.busy) == (4, 3, 2, 1)
    assert (fleet.draining, fleet.starting, fleet.updating) == (1, 1, 2)
    assert fleet.departing == (B, G)
    assert fleet.oldest == (2, 4), "a draining engine launches nothing more"
    assert fleet.publication_ids == {5, 6}
    assert fleet.expected_publication_ids == {-1, 5, 6}


def test_a_load_has_the_lowest_rank_that_runs() -> None:
    """Two of the three turns run: those of ranks 3 and 2."""
    loads = Fleet.of(laid_out()).loads
    assert (loads[A].active, loads[A].slots, loads[A].tokens, loads[A].lowest) == (3, 2, 33, 2.0)
    assert (loads[B].active, loads[B].slots, loads[B].tokens) == (0, 2, 0)
    assert loads[B].lowest == -math.inf


def test_a_pool_is_live_while_an_engine_of_it_takes_turns_or_loads_weights() -> None:
    fleet = Fleet.of(laid_out())
    assert fleet.live_pools == {"fast", "big"}
    assert {pool: list(loads) for pool, loads in fleet.loads_by_pool.items()} == {"fast": [A]}
    assert fleet.loads_by_pool["fast"][A] == fleet.loads[A]


def test_changes_of_turns_are_counted_as_they_come() -> None:
    state = laid_out()
    fleet = Fleet.of(state)
    engine, first = state.engines[A], TrajectoryId("t0")
    turn = state.trajectories[first].open_turn
    fleet.vacate(engine, first, turn)
    assert fleet == Fleet.of(state)
    assert (fleet.active, fleet.free, fleet.busy, fleet.loads[A].lowest) == (2, 2, 1, 1.0)
    fleet.occupy(state.engines[B], first, turn)
    assert fleet == Fleet.of(state)
    assert (fleet.active, fleet.free, fleet.busy, fleet.loads[B].tokens) == (3, 1, 2, 10)
    second = state.trajectories[TrajectoryId("t1")].open_turn
    second.rank = 9.0
    fleet.rerank(engine, 1.0, 9.0)
    assert fleet == Fleet.of(state)
    assert fleet.loads[A].lowest == 2.0


def test_no_engine_has_weights_at_first() -> None:
    state = State()
    state.engines[A] = Engine(id=A, status=EngineStatus.STARTING)
    assert Fleet.of(state).oldest is None
    assert Fleet.of(State()).loads == {}
