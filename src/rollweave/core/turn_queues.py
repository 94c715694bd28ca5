"""The queued turns by what they wait for, highest rank first, and the oldest of each
queue, so that none starves.

A queue is keyed by an engine, or None for any engine, and by whether the trajectory's
KV is there: a turn whose KV must find room first does not block one whose KV is
present.

Derived from the state (`turn_queue` and the turns) and never written to a snapshot.
Entries of turns that have left the queue stay in the heaps until they surface, or until
they outnumber the live ones.
"""

import heapq
from collections import deque
from typing import Self

from rollweave.core.state import State, Trajectory, Turn
from rollweave.schema.base import EngineId, TrajectoryId

QueueKey = tuple[EngineId | None, bool]

STALE_ENTRIES = 64
"""Maximum number of stale entries in all heaps beyond the number of live ones."""


class TurnQueues:
    def __init__(self) -> None:
        self._heaps: dict[QueueKey, list[tuple[float, float, TrajectoryId, int]]] = {}
        self._arrivals: dict[QueueKey, deque[tuple[int, TrajectoryId]]] = {}
        self._entries = 0

    @classmethod
    def of(cls, state: State) -> Self:
        lanes = cls()
        for trajectory_id in state.turn_queue:
            lanes.add(state.trajectories[trajectory_id])
        return lanes

    def is_overgrown(self, state: State) -> bool:
        return self._entries > 2 * len(state.turn_queue) + STALE_ENTRIES

    @property
    def engines(self) -> list[EngineId]:
        """The engines that turns may wait for."""
        return list(
            dict.fromkeys(engine_id for engine_id, _ in self._heaps if engine_id is not None)
        )

    def add(self, trajectory: Trajectory) -> None:
        """Add a turn that is queued, or requeued with another rank or key. Its former
        entry becomes stale.
        """
        key, turn = _key_of(trajectory)
        heapq.heappush(
            self._heaps.setdefault(key, []),
            (-turn.rank, turn.tiebreak, trajectory.id, turn.arrival),
        )
        self._arrivals.setdefault(key, deque()).append((turn.arrival, trajectory.id))
        self._entries += 1

    def first(self, state: State, key: QueueKey) -> TrajectoryId | None:
        """The turn of the highest rank, and of the lowest tiebreak among equal ranks."""
        heap = self._heaps.get(key)
        while heap:
            rank, _, trajectory_id, arrival = heap[0]
            if _waits(state, trajectory_id, arrival, key, -rank):
                return trajectory_id
            heapq.heappop(heap)
            self._entries -= 1
        self._heaps.pop(key, None)
        self._arrivals.pop(key, None)
        return None

    def waiting(self, state: State, key: QueueKey) -> list[TrajectoryId]:
        """All turns of this queue."""
        entries = self._heaps.get(key, [])
        return [
            name for rank, _, name, arrival in entries if _waits(state, name, arrival, key, -rank)
        ]

    def oldest(self, state: State, key: QueueKey) -> TrajectoryId | None:
        """The turn that was queued first."""
        arrivals = self._arrivals.get(key)
        while arrivals:
            arrival, trajectory_id = arrivals[0]
            if _waits(state, trajectory_id, arrival, key, None):
                return trajectory_id
            arrivals.popleft()
        return None


def _key_of(trajectory: Trajectory) -> tuple[QueueKey, Turn]:
    assert trajectory.turn is not None, "a queued turn is open"
    return (trajectory.turn.queue, trajectory.kv_resident), trajectory.turn


def _waits(
    state: State, trajectory_id: TrajectoryId, arrival: int, key: QueueKey, rank: float | None
) -> bool:
    if state.turn_queue.get(trajectory_id) != arrival:
        return False
    now, turn = _key_of(state.trajectories[trajectory_id])
    return now == key and (rank is None or turn.rank == rank)
