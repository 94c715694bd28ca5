"""The queues of turns, against a look at all queued turns."""

import hypothesis.strategies as st
from hypothesis import example, given, settings

from rollweave.core.state import Held, Queued, State, Trajectory, Turn
from rollweave.core.turn_queues import STALE_ENTRIES, QueuedTurn, TurnQueues
from rollweave.schema.base import EngineId, GroupId, TrajectoryId
from tests.support.properties import examples

QUEUES = ((None, ""), (None, "fast"), (EngineId("e0"), ""), (EngineId("e1"), ""))
"""Engines that turns wait for, and pools whose engines they prefer."""

changes = st.lists(
    st.tuples(
        st.sampled_from(["queue", "queue", "requeue", "leave"]),
        st.integers(0, 4),  # trajectory
        st.sampled_from(QUEUES),
        st.booleans(),  # its KV is there
        st.integers(0, 2),  # rank
        st.integers(0, 3),  # tiebreak
    ),
    max_size=40,
)


class Queues:
    """The queues, and the state that they are derived from."""

    def __init__(self) -> None:
        self.state, self.queues, self.arrivals = State(), TurnQueues(), 0

    def change(
        self,
        what: str,
        number: int,
        waits_for: tuple[EngineId | None, str],
        resident: bool,
        rank: int,
        tiebreak: int,
    ) -> None:
        name = TrajectoryId(f"t{number}")
        waiting = self.state.turns.queue
        if what == "leave":
            if name in waiting:
                del waiting[name]
                self.queues.leave(name)
                self.state.trajectories[name].open_turn.place = Held()
            return
        if what == "queue":
            self.arrivals += 1
            if waiting.pop(name, None) is not None:
                self.queues.leave(name)
            waiting[name] = self.arrivals
            self.state.trajectories[name] = Trajectory(
                id=name,
                group_id=GroupId("g0"),
                member=number,
                turn=Turn(number=0, context_tokens=0, since=0.0, arrival=self.arrivals),
            )
        elif name not in waiting:
            return
        trajectory = self.state.trajectories[name]
        turn = trajectory.open_turn
        turn.rank = float(rank)
        engine, pool = waits_for
        turn.place = Queued(
            engine=engine, pool=pool, given=0, tiebreak=float(tiebreak), resident=resident
        )
        self.queues.add(QueuedTurn(trajectory, turn, turn.place))


@settings(max_examples=examples(300))
@example(  # an older turn comes from another queue
    changes=[
        ("queue", 1, (None, ""), False, 0, 0),
        ("queue", 0, (None, ""), True, 0, 0),
        ("requeue", 1, (None, ""), True, 0, 0),
    ]
)
@given(changes=changes)
def test_each_queue_gives_the_first_the_oldest_and_all(
    changes: list[tuple[str, int, tuple[EngineId | None, str], bool, int, int]],
) -> None:
    both = Queues()
    for change in changes:
        both.change(*change)
        compare(both)
    both.queues = TurnQueues.of(both.state)
    compare(both)


def compare(both: Queues) -> None:
    waiting = [both.state.trajectories[name] for name in both.state.turns.queue]
    for engine, pool in QUEUES:
        for resident in (True, False):
            own = [
                one
                for one in waiting
                if isinstance(one.open_turn.place, Queued)
                and (one.open_turn.place.engine, one.open_turn.place.pool) == (engine, pool)
                and one.open_turn.place.resident == resident
            ]
            key = engine, pool, resident
            listed = {queued.trajectory.id for queued in both.queues.waiting(both.state, key)}
            assert listed == {one.id for one in own}
            if engine is not None and own:
                assert engine in both.queues.engines
            if engine is not None:
                compare_counts(both, engine, waiting)
            first = both.queues.first(both.state, key)
            oldest = both.queues.oldest(both.state, key)
            if not own:
                assert first is None
                assert oldest is None
                continue
            assert first is not None
            assert oldest is not None
            assert first.trajectory == min(own, key=claim)
            assert oldest.trajectory == min(own, key=lambda one: one.open_turn.arrival)


def compare_counts(both: Queues, engine: EngineId, waiting: list[Trajectory]) -> None:
    places = [(one, one.open_turn.place) for one in waiting]
    own = [one for one, place in places if isinstance(place, Queued) and place.engine == engine]
    assert both.queues.count(engine) == len(own)
    for but in both.state.trajectories.values():
        others = [one for one in own if one.id != but.id]
        assert both.queues.count(engine, but=but.id) == len(others)
        before = but.open_turn.arrival
        counted = both.queues.count(engine, but=but.id, before=before)
        assert counted == sum(one.open_turn.arrival < before for one in others)


def claim(trajectory: Trajectory) -> tuple[float, float, str]:
    turn = trajectory.open_turn
    assert isinstance(turn.place, Queued)
    return (-turn.rank, turn.place.tiebreak, trajectory.id)


def test_queues_are_overgrown_when_most_entries_are_stale() -> None:
    both = Queues()
    for _ in range(STALE_ENTRIES + 2):
        both.change("queue", 0, QUEUES[0], False, 0, 0)
    assert not both.queues.is_overgrown(both.state), "twice as many as live ones, and some"
    both.change("queue", 0, QUEUES[0], False, 0, 0)
    assert both.queues.is_overgrown(both.state)
    both.change("queue", 1, QUEUES[0], False, 0, 0)
    assert not both.queues.is_overgrown(both.state), "there is one more live turn"
    both.change("leave", 1, None, False, 0, 0)
    assert both.queues.first(both.state, (None, "", False)) is not None
    assert not both.queues.is_overgrown(both.state), "stale ones were discarded on the way"
