"""Aggregates over all engines, maintained as they change instead of recounted at every
event.

Derived from the state and never written to a snapshot: a restored core computes them
again. `engine.active` changes only through `occupy` and `vacate`; code that changes an
engine otherwise calls `Run.fleet_changed`. `reading/checks` compares with a fresh
count.
"""

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Any, Self

from rollweave.core.policy.routing import EngineLoad
from rollweave.core.state import Engine, EngineStatus, State, Turn
from rollweave.schema.base import EngineId, TrajectoryId


@dataclass(kw_only=True, slots=True)
class _Turns:
    """The turns of an engine that takes turns."""

    engine: Engine
    ranks: list[float]  # ascending
    tokens: int  # of all contexts


@dataclass(kw_only=True)
class Fleet:
    loads: dict[EngineId, EngineLoad] = field(default_factory=dict)  # only engines that take turns
    loads_by_pool: dict[str, dict[EngineId, EngineLoad]] = field(default_factory=dict)
    # pools with an engine that takes turns, or will once it has loaded other weights
    live_pools: frozenset[str] = frozenset()
    slots: int = 0  # all slots of the engines that take turns
    active: int = 0  # turns on these engines
    # slots of these engines without a turn; an engine with more turns than slots has
    # none
    free: int = 0
    busy: int = 0  # number of these engines that have turns
    prefill: tuple[EngineId, ...] = ()  # engines that take prompts
    draining: int = 0
    departing: tuple[EngineId, ...] = ()  # engines that drain or will drain
    hosts: frozenset[int] = frozenset()  # hosts that have engines
    starting: int = 0
    updating: int = 0  # engines that are stale, suspending or loading
    released: int = 0  # engines that have given their memory back for the trainer
    # version and publication id of the oldest weights of any engine that samples; None
    # if none has weights
    oldest: tuple[int, int] | None = None
    # weights of the engines that could load others now: stale and serving ones
    publication_ids: frozenset[int] = frozenset()
    # weights that an engine that samples has or is loading
    expected_publication_ids: frozenset[int] = frozenset()
    # what mechanisms derive from the engines, by its type
    derived: dict[type, Any] = field(default_factory=dict, compare=False)
    _turns: dict[EngineId, _Turns] = field(default_factory=dict)  # of the engines in `loads`

    @classmethod
    def of(cls, state: State, before: Self | None = None) -> Self:
        """Count all engines.

        `before`, the aggregates until an engine changed, saves going through the turns
        of the engines that it has counted.
        """
        fleet, known = cls(), {} if before is None else before._turns
        live, ids, expected, departing, prefill = set(), set(), set(), [], []
        own: list[tuple[int, int]] = []
        borrowed: list[tuple[int, int]] = []
        required = min(
            (
                engine.version
                for engine in state.engines.values()
                if engine.samples and not (engine.lender or engine.draining) and engine.version >= 0
            ),
            default=-1,
        )
        for engine in state.engines.values():
            if engine.departing:
                departing.append(engine.id)
            if engine.draining:
                fleet.draining += 1
                continue
            status, samples = engine.status, engine.samples
            if status is EngineStatus.STARTING:
                fleet.starting += 1
            elif status is EngineStatus.STALE and engine.released:
                fleet.released += 1
            elif status is not EngineStatus.SERVING or (
                engine.lender and engine.version < required  # it takes no turns until it has newer
            ):
                fleet.updating += 1
            elif samples:
                turns = known.get(engine.id)
                if turns is None or turns.engine is not engine:
                    turns = _turns_of(state, engine)
                fleet._add(engine, turns)
            else:
                prefill.append(engine.id)
            if status in (EngineStatus.STALE, EngineStatus.SERVING):
                ids.add(engine.publication_id)
            if samples:
                loading = status is EngineStatus.LOADING
                expected.add(engine.loading.id if loading else engine.publication_id)
                if engine.version >= 0:
                    live.add(engine.seat.pool)
                    weights = (engine.version, engine.publication_id)
                    (borrowed if engine.lender else own).append(weights)
        # borrowed engines may lag behind, and are not waited for while there are others
        fleet.oldest = min(own or borrowed, default=None)
        fleet.live_pools = frozenset(live - {""})
        fleet.departing, fleet.prefill = tuple(departing), tuple(prefill)
        fleet.hosts = frozenset(engine.seat.host for engine in state.engines.values())
        fleet.publication_ids, fleet.expected_publication_ids = frozenset(ids), frozenset(expected)
        return fleet

    def _add(self, engine: Engine, turns: _Turns) -> None:
        """Add an engine that takes turns."""
        load = self.loads[engine.id] = _load(turns)
        if engine.seat.pool:
            self.loads_by_pool.setdefault(engine.seat.pool, {})[engine.id] = load
        self._turns[engine.id] = turns
        self.slots += load.slots
        self.active += load.active
        self.free += max(0, load.slots - load.active)
        self.busy += load.active > 0

    def occupy(self, engine: Engine, trajectory_id: TrajectoryId, turn: Turn) -> None:
        """Put a trajectory's turn on an engine that takes turns."""
        engine.active[trajectory_id] = turn.number
        turns = self._turns[engine.id]
        insort(turns.ranks, turn.rank)
        turns.tokens += turn.context_tokens
        self._recount(turns)

    def vacate(self, engine: Engine, trajectory_id: TrajectoryId, turn: Turn) -> None:
        """Take a trajectory's turn from the engine."""
        del engine.active[trajectory_id]
        turns = self._turns.get(engine.id)
        if turns is not None:
            del turns.ranks[bisect_left(turns.ranks, turn.rank)]
            turns.tokens -= turn.context_tokens
            self._recount(turns)

    def rerank(self, engine: Engine, before: float, after: float) -> None:
        """Record that a turn on this engine has another rank."""
        turns = self._turns.get(engine.id)
        if turns is not None:
            del turns.ranks[bisect_left(turns.ranks, before)]
            insort(turns.ranks, after)
            self._recount(turns)

    def _recount(self, turns: _Turns) -> None:
        engine = turns.engine
        before = self.loads[engine.id]
        after = self.loads[engine.id] = _load(turns)
        if engine.seat.pool:
            self.loads_by_pool[engine.seat.pool][engine.id] = after
        self.active += after.active - before.active
        self.slots += after.slots - before.slots
        self.free += max(0, after.slots - after.active) - max(0, before.slots - before.active)
        self.busy += (after.active > 0) - (before.active > 0)


def _turns_of(state: State, engine: Engine) -> _Turns:
    given = [state.trajectories[trajectory_id].open_turn for trajectory_id in engine.active]
    return _Turns(
        engine=engine,
        ranks=sorted(turn.rank for turn in given),
        tokens=sum(turn.context_tokens for turn in given),
    )


def _load(turns: _Turns) -> EngineLoad:
    engine, ranks, lowest = turns.engine, turns.ranks, -math.inf
    slots = (
        engine.abilities.max_slots if engine.open else min(len(ranks), engine.abilities.max_slots)
    )
    if not engine.open:
        lowest = math.inf
    elif len(ranks) >= engine.abilities.max_slots > 0:
        lowest = ranks[-engine.abilities.max_slots] if engine.abilities.preempts else math.inf
    return EngineLoad(
        id=engine.id,
        active=len(engine.active),
        slots=slots,
        tokens=turns.tokens,
        lowest=lowest,
        borrowed=engine.abilities.lent,
    )
