"""The expected lengths of trajectories, and the engines that have the trajectories: the
trajectories under way, ranked by predicted length among the trajectories that prefer
the same pool, and the remaining work of each engine's assigned trajectories.

The index is derived from the state (`Work.estimate`, `kv_token_steps` and
`assigned_engine`) and never written to a snapshot; `check` compares it with a fresh
one. A rank is a position in one sorted list: a change costs a search and a move in
memory, microseconds for 10,000 trajectories.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from rollweave.core.run import Run
from rollweave.core.state import Stage, Trajectory
from rollweave.schema.base import EngineId, TrajectoryId


class Work(msgspec.Struct):
    """The work that an attempt has yet to do, and the engine that is to do it."""

    estimate: int = 0  # tokens that it will probably still sample
    kv_token_steps: int = 0  # the context sizes at each of these tokens, summed
    # level of its sampled and estimated length (core/policy/scheduling)
    length_bucket: int | None = None
    prediction_requested_for: int = -1  # turn before which a prediction was last requested
    predicted_at_turn: int = -1  # turn to which the last received prediction applies
    prompt_tokens: int = 0  # that were learned from
    last_output_tokens: int = 0
    tool_s: float = 0.0  # seconds in which its environment stepped
    # the engine for which its turns wait (core/policy/scheduling)
    assigned_engine: EngineId | None = None
    kv_resident: bool = False  # its assigned engine holds its KV, or should
    kv_demand: int = 0  # tokens of KV that it needs through its next turn


class DomainLengths(msgspec.Struct):
    """Lengths and times of a task domain's trajectories.

    Means are running means and None before the first value.
    """

    lengths: list[int] = []  # sampled tokens of the newest finished trajectories
    length_sum: int = 0  # sum of `lengths`
    predicted_length: float | None = None  # mean; used as long as none has finished
    context_growth: float | None = None  # tokens of context for each sampled one
    prompt_tokens: float | None = None
    turn_tokens: float | None = None  # sampled tokens of a turn
    turn_s: float | None = None  # seconds of a turn on its engine
    tool_s: float | None = None  # seconds of an environment's step


class Lengths(msgspec.Struct):
    """The part of the state."""

    trajectories: dict[TrajectoryId, Work] = {}
    domains: dict[str, DomainLengths] = {}  # by task domain


def work_of(run: Run, trajectory: Trajectory) -> Work:
    """Return what the trajectory has yet to sample."""
    works: dict[TrajectoryId, Work] = run.parts[Lengths].trajectories
    return works[trajectory.id]


def domain_of(run: Run, trajectory: Trajectory) -> DomainLengths:
    """Return the lengths and times of the trajectory's task domain."""
    name = run.state.groups[trajectory.group_id].name
    domains = run.part(Lengths).domains
    stats = domains.get(name)
    if stats is None:
        stats = domains[name] = DomainLengths()
    return stats


Key = tuple[int, TrajectoryId]
"""(−tokens, id): longest first."""

ORDERED = (Stage.QUEUED, Stage.INIT, Stage.RUN_QUEUED, Stage.RUN)
"""Stages in which a trajectory has tokens to sample."""


KvPlace = tuple[int, float, TrajectoryId, int]
"""(−length bucket if ranks are buckets, launch time, id, tokens): the order in which
residents claim an engine's KV cache, and how much of it a resident claims.
"""


@dataclass(slots=True)
class EngineWork:
    """The tokens that an engine's assigned trajectories have yet to sample, and the KV
    tokens that their contexts will occupy, summed over the tokens to sample.
    """

    remaining: list[Key] = field(default_factory=list)
    tokens: int = 0
    occupied: int = 0
    kv_residents: list[KvPlace] = field(default_factory=list)
    # cached by placement/assignment; None after a change
    work_s: float | None = field(default=None, compare=False)

    @property
    def longest(self) -> int:
        return -self.remaining[0][0] if self.remaining else 0


@dataclass(slots=True)
class IndexEntry:
    """A trajectory as it was last indexed."""

    pool: str
    rank: Key
    remaining: Key
    assigned_engine: EngineId | None
    occupied: int
    kv_place: KvPlace | None


class LengthIndex:
    def __init__(
        self,
        works: Mapping[TrajectoryId, Work],
        *,
        by_level: bool,
        pool_of: Callable[[Trajectory], str] = lambda _: "",
    ) -> None:
        """Create an empty index of `works`. With `by_level` longer trajectories claim
        the KV cache first (priority longest_first), otherwise earlier ones. `pool_of`
        returns the pool that a trajectory prefers, "" for any engine.
        """
        self._works, self._by_level, self._pool_of = works, by_level, pool_of
        self.keys: dict[str, list[Key]] = {}  # by pool
        self.loads: dict[EngineId, EngineWork] = {}
        self._entries: dict[TrajectoryId, IndexEntry] = {}

    def count(self, pool: str) -> int:
        """Return the number of trajectories that prefer this pool."""
        return len(self.keys.get(pool, ()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LengthIndex) and (self.keys, self.loads, self._entries) == (
            other.keys,
            other.loads,
            other._entries,
        )

    def update(self, trajectory: Trajectory) -> None:
        """Index the trajectory again after its estimate, engine or stage has
        changed.
        """
        self.drop(trajectory.id)
        if trajectory.stage not in ORDERED:
            return
        work = self._works[trajectory.id]
        entry = self._entries[trajectory.id] = IndexEntry(
            pool=self._pool_of(trajectory),
            rank=(-trajectory.output_tokens - work.estimate, trajectory.id),
            remaining=(-work.estimate, trajectory.id),
            assigned_engine=work.assigned_engine,
            occupied=work.kv_token_steps,
            kv_place=self._place(trajectory, work) if work.kv_resident else None,
        )
        insort(self.keys.setdefault(entry.pool, []), entry.rank)
        if entry.assigned_engine is not None:
            load = self.loads.setdefault(entry.assigned_engine, EngineWork())
            load.work_s = None
            insort(load.remaining, entry.remaining)
            load.tokens += work.estimate
            load.occupied += entry.occupied
            if entry.kv_place is not None:
                insort(load.kv_residents, entry.kv_place)

    def drop(self, trajectory_id: TrajectoryId) -> None:
        entry = self._entries.pop(trajectory_id, None)
        if entry is None:
            return
        keys = self.keys[entry.pool]
        del keys[bisect_left(keys, entry.rank)]
        if not keys:
            del self.keys[entry.pool]
        if entry.assigned_engine is not None:
            load = self.loads[entry.assigned_engine]
            load.work_s = None
            del load.remaining[bisect_left(load.remaining, entry.remaining)]
            load.tokens += entry.remaining[0]
            load.occupied -= entry.occupied
            if entry.kv_place is not None:
                del load.kv_residents[bisect_left(load.kv_residents, entry.kv_place)]
            if not load.remaining:
                del self.loads[entry.assigned_engine]

    def works(self, pool: str, *, whole: bool = False) -> list[tuple[int, int]]:
        """Return the tokens to sample and the KV token steps of every trajectory that
        prefers this pool, the longest first; of its `whole` length, which ranks it, or
        of what is left of it.
        """
        return sorted(
            (
                (-(entry.rank if whole else entry.remaining)[0], entry.occupied)
                for entry in self._entries.values()
                if entry.pool == pool
            ),
            reverse=True,
        )

    def rank(self, trajectory_id: TrajectoryId) -> int:
        """Return the position of the trajectory by predicted length among the
        trajectories that prefer its pool; 0 is the longest.
        """
        entry = self._entries[trajectory_id]
        return bisect_left(self.keys[entry.pool], entry.rank)

    def ahead_of(self, trajectory: Trajectory, engine_id: EngineId) -> list[KvPlace]:
        """The residents of this engine that claim its KV cache before the trajectory:
        all of them if the trajectory is not resident there.
        """
        load = self.loads.get(engine_id)
        if load is None:
            return []
        work = self._works[trajectory.id]
        if not work.kv_resident or work.assigned_engine != engine_id:
            return load.kv_residents
        place = self._place(trajectory, work)
        return load.kv_residents[: bisect_left(load.kv_residents, place[:3])]

    def _place(self, trajectory: Trajectory, work: Work) -> KvPlace:
        level = work.length_bucket or 0 if self._by_level else 0
        return (-level, trajectory.launched_at, trajectory.id, work.kv_demand)


def index_of(run: Run) -> LengthIndex:
    """Return the index of the run's trajectories."""
    index: LengthIndex | None = run.derived.get(LengthIndex)
    if index is None:
        index = run.derived[LengthIndex] = _fresh_index(run)
    return index


def reindex(run: Run, trajectory: Trajectory) -> None:
    """Index the trajectory again after its estimate, engine or stage has changed."""
    index = run.derived.get(LengthIndex)
    if index is not None:
        index.update(trajectory)


def _fresh_index(run: Run) -> LengthIndex:
    index = LengthIndex(
        run.part(Lengths).trajectories,
        by_level=run.scheduling.priority == "longest_first",
        pool_of=run.preferred_pool,
    )
    for trajectory in run.state.trajectories.values():
        index.update(trajectory)
    return index


def check(run: Run) -> None:
    """Assert that the index is what a fresh sort gives."""
    assert not run.scheduling.assigns or index_of(run) == _fresh_index(run), "the order"
