"""Where a run stands: fresh, or rebuilt from its journal, which begins with a snapshot (DESIGN §12.3).

Invariants: replaying never executes a command; events are replayed under the configuration that they happened under; what
the core believes to be scored and the store does not have is named, so that the core can let it go.
"""

from dataclasses import dataclass

from rollweave.codec.config import load
from rollweave.core.core import Core
from rollweave.core.state import Stage
from rollweave.envs.rules import rules_of
from rollweave.record.journal import Replay
from rollweave.record.rundir import RunDir
from rollweave.rollout.store import TrajectoryStore
from rollweave.schema.base import TrajectoryId
from rollweave.schema.config import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.events import EngineSeat, RunStarted, WorldLost


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """The core to go on with, the run's time, and what its first event has to say.

    `events` were replayed; `differing` of them led to other commands than in the former life: the code has changed since.
    """

    core: Core
    at: float
    resumed: bool
    missing: tuple[TrajectoryId, ...] = ()
    events: int = 0
    differing: int = 0

    def first(self, engines: tuple[EngineSeat, ...], *, relays: int = 0) -> RunStarted | WorldLost:
        """The event with which this life begins."""
        if self.resumed:
            return WorldLost(engines=engines, missing=self.missing, relays=relays)
        return RunStarted(engines=engines, relays=relays)


def recover(config: RunConfig, run: RunDir, store: TrajectoryStore) -> Beginning:
    """The run's beginning. Raises `CorruptJournalError` where the journal is damaged before its end.

    The former life is replayed under its own configuration; only then does `config` take over, which may ask for more steps,
    but not for another model: `ConfigError` says what must stay.
    """
    if not run.journal.exists():
        return Beginning(core=Core(config, rules=rules_of(config)), at=0.0, resumed=False)
    former = load(run.config)
    if strays := config.strays_from(former):
        raise ConfigError("\n".join(strays))
    try:
        rules = rules_of(former)
    except ConfigError as error:
        raise ConfigError(f"what has happened was decided by the configuration that the run began with: {error}") from error
    replay = Replay(run.journal, former, rules=rules)
    core = replay.finish()
    at = core.state.idle.clock
    if at is None:  # killed before its first event
        return Beginning(core=Core(config, rules=rules_of(config)), at=0.0, resumed=False)
    core = Core.restore(core.snapshot(), config, rules=rules_of(config))
    missing = _missing(core, store)
    return Beginning(core=core, at=at, resumed=True, missing=missing, events=replay.events, differing=replay.differing)


def _missing(core: Core, store: TrajectoryStore) -> tuple[TrajectoryId, ...]:
    """Scored trajectories whose tokens are gone. What the core has not heard to be over leaves the store's index."""
    known = core.state.trajectories
    over = {name for name, trajectory in known.items() if trajectory.stage in (Stage.SCORED, Stage.ENDED)}
    store.forget([name for name in store.ids() if name not in over])
    scored = {name: trajectory for name, trajectory in known.items() if trajectory.stage is Stage.SCORED}
    return tuple(found.id for found in scored.values() if store.scored_attempt(found.id) != found.attempt)
