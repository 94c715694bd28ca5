"""What every event asks of all engines together, kept as they change instead of counted anew.

Derived from the state and never written to a snapshot: a restored core makes it again. `engine.active` changes only through
`occupy` and `vacate`; whatever else changes an engine calls `Run.fleet_changed`. `core/checks` compares with a fresh count.
"""

from dataclasses import dataclass, field
from typing import Self

from rollweave.core.state import Engine, EngineStatus, State
from rollweave.policy.routing import EngineLoad
from rollweave.schema.base import EngineId, TrajectoryId


@dataclass(kw_only=True)
class Fleet:
    loads: dict[EngineId, EngineLoad] = field(default_factory=dict)  # of serving engines
    free_slots: int = 0  # of serving engines
    active: int = 0  # turns on serving engines
    busy: int = 0  # serving engines that have turns
    starting: int = 0
    updating: int = 0  # stale, suspending or loading
    version: int | None = None  # the oldest that an engine has; None if no engine has any
    weights_ids: frozenset[int] = frozenset()  # of engines that could take others now: stale and serving ones

    @classmethod
    def of(cls, state: State) -> Self:
        engines = list(state.engines.values())
        serving = [engine for engine in engines if engine.status is EngineStatus.SERVING]
        ready = [engine for engine in engines if engine.status in (EngineStatus.STALE, EngineStatus.SERVING)]
        starting = sum(engine.status is EngineStatus.STARTING for engine in engines)
        return cls(
            loads={engine.id: _load(engine) for engine in serving},
            free_slots=sum(engine.max_slots - len(engine.active) for engine in serving),
            active=sum(len(engine.active) for engine in serving),
            busy=sum(bool(engine.active) for engine in serving),
            starting=starting,
            updating=len(engines) - len(serving) - starting,
            version=min((engine.version for engine in engines if engine.version >= 0), default=None),
            weights_ids=frozenset(engine.weights_id for engine in ready),
        )

    def occupy(self, engine: Engine, trajectory_id: TrajectoryId, turn: int) -> None:
        """Give a serving engine a turn."""
        engine.active[trajectory_id] = turn
        self._recount(engine)

    def vacate(self, engine: Engine, trajectory_id: TrajectoryId) -> bool:
        """Take a trajectory's turn from the engine. False if it had none."""
        if engine.active.pop(trajectory_id, None) is None:
            return False
        self._recount(engine)
        return True

    def _recount(self, engine: Engine) -> None:
        before = self.loads.get(engine.id)
        if before is None:
            return  # not serving: its slots count for nothing
        after = self.loads[engine.id] = _load(engine)
        self.free_slots += before.active - after.active
        self.active += after.active - before.active
        self.busy += (after.active > 0) - (before.active > 0)


def _load(engine: Engine) -> EngineLoad:
    return EngineLoad(id=engine.id, active=len(engine.active), slots=engine.max_slots)
