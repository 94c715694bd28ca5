"""Aggregates over all engines, maintained as they change instead of recounted at every
event.

Derived from the state and never written to a snapshot: a restored core computes them
again. `engine.active` changes only through `occupy` and `vacate`; code that changes an
engine otherwise calls `Run.fleet_changed`. `core/checks` compares with a fresh count.
"""

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Self

from rollweave.core.policy.routing import EngineLoad
from rollweave.core.state import Engine, EngineStatus, State, Turn
from rollweave.schema.base import EngineId, TrajectoryId


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
    # the oldest of any engine that samples; None if none has weights
    version: int | None = None
    # weights of the engines that could load others now: stale and serving ones
    publication_ids: frozenset[int] = frozenset()
    # weights that an engine that samples has or is loading
    expected_publication_ids: frozenset[int] = frozenset()
    # computed by core/version_affinity
    batch_sizes: dict[EngineId, int] | None = field(default=None, compare=False)
    # ranks of the turns on each engine, ascending
    _ranks: dict[EngineId, list[float]] = field(default_factory=dict)
    _tokens: dict[EngineId, int] = field(
        default_factory=dict
    )  # context tokens of the turns on each engine

    @classmethod
    def of(cls, state: State) -> Self:
        staying = [engine for engine in state.engines.values() if not engine.draining]
        ready_to_serve = [engine for engine in staying if engine.status is EngineStatus.SERVING]
        serving = [engine for engine in ready_to_serve if engine.samples]
        ready = [
            engine
            for engine in staying
            if engine.status in (EngineStatus.STALE, EngineStatus.SERVING)
        ]
        starting = sum(engine.status is EngineStatus.STARTING for engine in staying)
        released = sum(
            engine.released and engine.status is EngineStatus.STALE for engine in staying
        )
        turns = {engine.id: _turns(state, engine) for engine in serving}
        ranks = {
            engine_id: sorted(turn.rank for turn in given) for engine_id, given in turns.items()
        }
        tokens = {
            engine_id: sum(turn.context_tokens for turn in given)
            for engine_id, given in turns.items()
        }
        loads = {
            engine.id: _load(engine, ranks[engine.id], tokens[engine.id]) for engine in serving
        }
        by_pool: dict[str, dict[EngineId, EngineLoad]] = {}
        for engine in serving:
            if engine.pool:
                by_pool.setdefault(engine.pool, {})[engine.id] = loads[engine.id]
        return cls(
            loads=loads,
            loads_by_pool=by_pool,
            live_pools=frozenset(
                engine.pool
                for engine in staying
                if engine.samples and engine.pool and engine.version >= 0
            ),
            slots=sum(engine.max_slots for engine in serving),
            active=sum(len(engine.active) for engine in serving),
            free=sum(max(0, engine.max_slots - len(engine.active)) for engine in serving),
            busy=sum(bool(engine.active) for engine in serving),
            draining=len(state.engines) - len(staying),
            departing=tuple(engine.id for engine in state.engines.values() if engine.departing),
            hosts=frozenset(engine.host for engine in state.engines.values()),
            starting=starting,
            prefill=tuple(engine.id for engine in ready_to_serve if not engine.samples),
            updating=len(staying) - len(ready_to_serve) - starting - released,
            released=released,
            version=min(
                (engine.version for engine in staying if engine.samples and engine.version >= 0),
                default=None,
            ),
            publication_ids=frozenset(engine.publication_id for engine in ready),
            expected_publication_ids=frozenset(
                engine.loading_id
                if engine.status is EngineStatus.LOADING
                else engine.publication_id
                for engine in staying
                if engine.samples
            ),
            _ranks=ranks,
            _tokens=tokens,
        )

    def occupy(self, engine: Engine, trajectory_id: TrajectoryId, turn: Turn) -> None:
        """Put a trajectory's turn on an engine that takes turns."""
        engine.active[trajectory_id] = turn.number
        insort(self._ranks[engine.id], turn.rank)
        self._tokens[engine.id] += turn.context_tokens
        self._recount(engine)

    def vacate(self, engine: Engine, trajectory_id: TrajectoryId, turn: Turn) -> None:
        """Take a trajectory's turn from the engine."""
        del engine.active[trajectory_id]
        ranks = self._ranks.get(engine.id)
        if ranks is not None:
            del ranks[bisect_left(ranks, turn.rank)]
            self._tokens[engine.id] -= turn.context_tokens
            self._recount(engine)

    def rerank(self, engine: Engine, before: float, after: float) -> None:
        """Record that a turn on this engine has another rank."""
        ranks = self._ranks.get(engine.id)
        if ranks is not None:
            del ranks[bisect_left(ranks, before)]
            insort(ranks, after)
            self._recount(engine)

    def _recount(self, engine: Engine) -> None:
        before = self.loads[engine.id]
        after = self.loads[engine.id] = _load(
            engine, self._ranks[engine.id], self._tokens[engine.id]
        )
        if engine.pool:
            self.loads_by_pool[engine.pool][engine.id] = after
        self.active += after.active - before.active
        self.free += max(0, after.slots - after.active) - max(0, before.slots - before.active)
        self.busy += (after.active > 0) - (before.active > 0)


def _turns(state: State, engine: Engine) -> list[Turn]:
    return [state.trajectories[trajectory_id].open_turn for trajectory_id in engine.active]


def _load(engine: Engine, ranks: list[float], tokens: int) -> EngineLoad:
    lowest = -math.inf
    if len(ranks) >= engine.max_slots > 0:
        lowest = ranks[-engine.max_slots] if engine.preempts else math.inf
    return EngineLoad(
        id=engine.id,
        active=len(engine.active),
        slots=engine.max_slots,
        tokens=tokens,
        lowest=lowest,
    )
