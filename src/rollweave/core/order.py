"""Trajectories under way by predicted length, and the work that waits at the engines
that are theirs.

Derived from the state (`Trajectory.estimate`, `occupies` and `home`) and never written
to a snapshot; `core/checks` compares with a fresh one. Ranks are positions in one
sorted list: a change costs a search and a move in memory, microseconds for 10,000.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Self

from rollweave.core.state import Stage, State, Trajectory
from rollweave.schema.base import EngineId, TrajectoryId

Key = tuple[int, TrajectoryId]
"""(−tokens, id): longest first."""

ORDERED = (Stage.QUEUED, Stage.INIT, Stage.RUN)
"""Stages in which a trajectory has tokens to come."""


Place = tuple[int, float, TrajectoryId, int]
"""(−level where ranks are levels, launch, id, tokens): who comes first to an engine's
KV cache, and how much it claims.
"""


@dataclass(slots=True)
class Load:
    """What an engine's own trajectories have yet to sample, and the contexts that will
    occupy, summed over these tokens.
    """

    left: list[Key] = field(default_factory=list)
    tokens: int = 0
    occupied: int = 0
    residents: list[Place] = field(default_factory=list)
    # as core/placing has last worked it out; None since a change
    work_s: float | None = field(default=None, compare=False)

    @property
    def longest(self) -> int:
        return -self.left[0][0] if self.left else 0


@dataclass(slots=True)
class Entry:
    """A trajectory as it was counted."""

    rank: Key
    left: Key
    home: EngineId | None
    occupied: int
    place: Place | None


class Order:
    def __init__(self, *, by_level: bool) -> None:
        """`by_level`: longer ones come first to the KV cache (priority longest_first),
        else earlier ones.
        """
        self._by_level = by_level
        self.keys: list[Key] = []
        self.loads: dict[EngineId, Load] = {}
        self._entries: dict[TrajectoryId, Entry] = {}

    @classmethod
    def of(cls, state: State, *, by_level: bool) -> Self:
        order = cls(by_level=by_level)
        for trajectory in state.trajectories.values():
            order.update(trajectory)
        return order

    def __len__(self) -> int:
        return len(self.keys)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Order) and (self.keys, self.loads, self._entries) == (
            other.keys,
            other.loads,
            other._entries,
        )

    def update(self, trajectory: Trajectory) -> None:
        """The trajectory's estimate, home or stage has changed."""
        self.drop(trajectory.id)
        if trajectory.stage not in ORDERED:
            return
        entry = self._entries[trajectory.id] = Entry(
            rank=(-trajectory.output_tokens - trajectory.estimate, trajectory.id),
            left=(-trajectory.estimate, trajectory.id),
            home=trajectory.home,
            occupied=trajectory.occupies,
            place=self._place(trajectory) if trajectory.resident else None,
        )
        insort(self.keys, entry.rank)
        if entry.home is not None:
            load = self.loads.setdefault(entry.home, Load())
            load.work_s = None
            insort(load.left, entry.left)
            load.tokens += trajectory.estimate
            load.occupied += entry.occupied
            if entry.place is not None:
                insort(load.residents, entry.place)

    def drop(self, trajectory_id: TrajectoryId) -> None:
        entry = self._entries.pop(trajectory_id, None)
        if entry is None:
            return
        del self.keys[bisect_left(self.keys, entry.rank)]
        if entry.home is not None:
            load = self.loads[entry.home]
            load.work_s = None
            del load.left[bisect_left(load.left, entry.left)]
            load.tokens += entry.left[0]
            load.occupied -= entry.occupied
            if entry.place is not None:
                del load.residents[bisect_left(load.residents, entry.place)]
            if not load.left:
                del self.loads[entry.home]

    def works(self) -> list[tuple[int, int]]:
        """Of all: tokens to come, and the contexts that they will occupy, the longest
        first.
        """
        return sorted(
            ((-entry.left[0], entry.occupied) for entry in self._entries.values()), reverse=True
        )

    def rank(self, trajectory_id: TrajectoryId) -> int:
        """0 is the longest."""
        return bisect_left(self.keys, self._entries[trajectory_id].rank)

    def before(self, trajectory: Trajectory, engine_id: EngineId) -> list[Place]:
        """Residents of this engine that come before the trajectory: all, where it is
        none of them itself.
        """
        load = self.loads.get(engine_id)
        if load is None:
            return []
        if not trajectory.resident or trajectory.home != engine_id:
            return load.residents
        return load.residents[: bisect_left(load.residents, self._place(trajectory)[:3])]

    def _place(self, trajectory: Trajectory) -> Place:
        level = trajectory.level or 0 if self._by_level else 0
        return (-level, trajectory.launched_at, trajectory.id, trajectory.claims)
