"""The queued turns by what they wait for, highest rank first, and the oldest of each
queue, so that none starves.

A queue is keyed by an engine, or None for any engine and then by the pool whose engines
its turns prefer, so that a pool that is full does not block the others; and by whether
the trajectory's KV is there: a turn whose KV must find room first does not block one
whose KV is present.

Derived from the state (`state.turns.queue` and the turns) and never written to a
snapshot. Entries of turns that have left the queue stay in the heaps until they
surface, or until they outnumber the live ones.
"""

import heapq
from bisect import bisect_left, insort
from typing import NamedTuple, Self

from rollweave.core.state import Queued, State, Trajectory, Turn
from rollweave.schema.base import EngineId, TrajectoryId

QueueKey = tuple[EngineId | None, str, bool]


class QueuedTurn(NamedTuple):
    """A queued turn, its trajectory and its place, as found in a queue."""

    trajectory: Trajectory
    turn: Turn
    place: Queued


STALE_ENTRIES = 64
"""Maximum number of stale entries in all heaps beyond the number of live ones."""


class TurnQueues:
    def __init__(self) -> None:
        self._heaps: dict[QueueKey, list[tuple[float, float, TrajectoryId, int]]] = {}
        self._arrivals: dict[QueueKey, list[tuple[int, TrajectoryId]]] = {}
        self._entries = 0
        # The engine that each queued turn waits for, and its number of arrival; and the
        # numbers of those that wait for an engine, in order.
        self._places: dict[TrajectoryId, tuple[EngineId | None, int]] = {}
        self._numbers: dict[EngineId | None, list[int]] = {}

    @classmethod
    def of(cls, state: State) -> Self:
        queues = cls()
        for trajectory_id, arrival in state.turns.queue.items():
            queued = _find(state, trajectory_id, arrival)
            if queued is not None:
                queues.add(queued)
        return queues

    def is_overgrown(self, state: State) -> bool:
        return self._entries > 2 * len(state.turns.queue) + STALE_ENTRIES

    @property
    def engines(self) -> list[EngineId]:
        """The engines that turns may wait for."""
        return list(
            dict.fromkeys(engine_id for engine_id, _, _ in self._heaps if engine_id is not None)
        )

    def add(self, queued: QueuedTurn) -> None:
        """Add a turn that is queued, or requeued with another rank or key. Its former
        entry is outdated then.
        """
        trajectory, turn, place = queued
        key = _key(queued)
        heapq.heappush(
            self._heaps.setdefault(key, []),
            (-turn.rank, place.tiebreak, trajectory.id, turn.arrival),
        )
        heapq.heappush(self._arrivals.setdefault(key, []), (turn.arrival, trajectory.id))
        self._entries += 1
        self.leave(trajectory.id)
        self._places[trajectory.id] = place.engine, turn.arrival
        insort(self._numbers.setdefault(place.engine, []), turn.arrival)

    def leave(self, trajectory_id: TrajectoryId) -> None:
        """Note that the trajectory's turn is no longer queued, or moves."""
        place = self._places.pop(trajectory_id, None)
        if place is not None:
            engine_id, arrival = place
            numbers = self._numbers[engine_id]
            del numbers[bisect_left(numbers, arrival)]
            if not numbers:
                del self._numbers[engine_id]

    def awaits(self, engine_id: EngineId | None) -> bool:
        """True if a turn waits for this engine, or for any."""
        return engine_id in self._numbers

    def count(
        self, engine_id: EngineId, *, but: TrajectoryId | None = None, before: int | None = None
    ) -> int:
        """Return how many turns wait for an engine, without that of the trajectory
        `but`; those that were queued before the arrival `before`, if given.
        """
        numbers = self._numbers.get(engine_id, [])
        own_engine, own = self._places.get(but, (None, 0)) if but is not None else (None, 0)
        if before is None:
            return len(numbers) - (own_engine == engine_id)
        return bisect_left(numbers, before) - (own_engine == engine_id and own < before)

    def first(self, state: State, key: QueueKey) -> QueuedTurn | None:
        """The turn of the highest rank, and of the lowest tiebreak among equal
        ranks.
        """
        heap = self._heaps.get(key)
        while heap:
            rank, _, trajectory_id, arrival = heap[0]
            queued = _find(state, trajectory_id, arrival)
            if queued is not None and _key(queued) == key and queued.turn.rank == -rank:
                return queued
            heapq.heappop(heap)
            self._entries -= 1
        self._heaps.pop(key, None)
        self._arrivals.pop(key, None)
        return None

    def waiting(self, state: State, key: QueueKey) -> list[QueuedTurn]:
        """Return all turns of this queue."""
        entries = [
            (-rank, _find(state, trajectory_id, arrival))
            for rank, _, trajectory_id, arrival in self._heaps.get(key, [])
        ]
        return [
            queued
            for rank, queued in entries
            if queued is not None and _key(queued) == key and queued.turn.rank == rank
        ]

    def oldest(self, state: State, key: QueueKey) -> QueuedTurn | None:
        """The turn that was queued first, though it may have come from another queue
        since.
        """
        arrivals = self._arrivals.get(key)
        while arrivals:
            arrival, trajectory_id = arrivals[0]
            queued = _find(state, trajectory_id, arrival)
            if queued is not None and _key(queued) == key:
                return queued
            heapq.heappop(arrivals)
        return None


def _find(state: State, trajectory_id: TrajectoryId, arrival: int) -> QueuedTurn | None:
    """The turn that joined the queues with this number, if it is still queued."""
    if state.turns.queue.get(trajectory_id) != arrival:
        return None
    trajectory = state.trajectories[trajectory_id]
    turn = trajectory.open_turn
    return QueuedTurn(trajectory, turn, turn.place) if isinstance(turn.place, Queued) else None


def _key(queued: QueuedTurn) -> QueueKey:
    return queued.place.engine, queued.place.pool, queued.place.resident
