"""A colocated run: the trainer and the engines take turns on the same devices.

Engines start without memory for weights and KV, and get it with `LoadWeights`. When the
batch of a step is complete, the engines are suspended and give their memory back. The
step begins once all engines have done so, and no engine loads before the step's weights
are published and the trainer has given back its own memory. If the trainer is lost in
between, suspended engines wait for it: it trains the batch again.
"""

from collections.abc import Iterator

from rollweave.core import engines, training, turns
from rollweave.core.pacing import SharedPacing
from rollweave.core.run import EngineMove, Mechanism, Run
from rollweave.core.state import Engine, EngineStatus, TrainerStatus
from rollweave.schema.base import GroupId
from rollweave.schema.commands import SuspendEngine
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import EngineJoined


def used(config: RunConfig) -> bool:
    """True if the trainer and the engines have the same devices."""
    return config.trainer.colocated


class ColocatedPacing(SharedPacing):
    """Engines load weights while the trainer does not have the devices."""

    def updates(self, run: Run) -> Iterator[tuple[Engine, int | None]]:
        """Let serving engines give their memory back, and yield stale ones."""
        trainer = run.state.trainer.status
        if claims_devices(run):
            # a trainer that came back while they serve publishes first, then they load
            if trainer is not TrainerStatus.PUBLISHING:
                for engine in run.state.engines.values():
                    if engine.status is EngineStatus.SERVING:
                        _release(run, engine)
            return
        for engine, target in super().updates(run):
            if engine.status is EngineStatus.SERVING:
                _release(run, engine)
            elif not (engine.released and trainer is TrainerStatus.STARTING):
                yield engine, target

    def choose_batch(self, run: Run, wanted: int) -> list[GroupId]:
        """Return no groups while engines hold memory, or an evaluation needs them."""
        free = run.state.evaluations.current is None and not _engines_hold_memory(run)
        return super().choose_batch(run, wanted) if free else []


def _engines_hold_memory(run: Run) -> bool:
    """True if an engine has, or may have, memory for weights and KV. An engine starts
    without memory.
    """
    holding = (EngineStatus.SERVING, EngineStatus.SUSPENDING, EngineStatus.LOADING)
    return any(engine.status in holding for engine in run.state.engines.values())


def claims_devices(run: Run) -> bool:
    """True if the trainer has the devices, or waits for the engines to give them back.

    It has them from the beginning of a step until the step's weights are published, and
    for a warm-up. A trainer that is restored from a checkpoint starts without them.
    """
    state, trainer = run.state, run.state.trainer
    match trainer.status:
        case TrainerStatus.STARTING:
            return state.checkpoints.newest is None
        case TrainerStatus.MEASURING | TrainerStatus.TRAINING | TrainerStatus.PUBLISHING:
            return True
        case TrainerStatus.SAVING:
            return False
        case TrainerStatus.IDLE:
            complete = len(state.buffer) >= run.groups_in_minibatch(trainer.parts_done)
            # the episodes of an evaluation need the devices
            return complete and state.evaluations.current is None and training.may_take(run)


def _release(run: Run, engine: Engine) -> None:
    """Suspend an engine, without turns, so that it gives its memory back.

    It still counts as having its version, so that nothing is launched before all
    engines have loaded the next one.
    """
    turns.recall_all(run, engine)
    engine.released = True
    engines.enter(run, engine, EngineStatus.SUSPENDING)
    run.emit(SuspendEngine(engine_id=engine.id, release=True))


def _joined(run: Run, engine: Engine, _event: EngineJoined) -> None:
    """The engine has no room for two copies of the weights."""
    engine.abilities.stages = engine.abilities.stages and not run.colocated


def check(run: Run) -> None:
    """Assert that engines and trainer do not have the same devices at the same time."""
    trains = run.state.trainer.status in (TrainerStatus.MEASURING, TrainerStatus.TRAINING)
    for engine in run.state.engines.values() if run.colocated else ():
        if engine.released:
            assert not engine.active, engine
            assert engine.publication_id == -1 or engine.status is EngineStatus.SUSPENDING, engine
        if trains:
            assert engine.status in (EngineStatus.STARTING, EngineStatus.STALE), engine
        assert (engine.staging.id, engine.staging.staged_id) == (-1, -1), engine


MECHANISM = Mechanism(
    name="colocated",
    used=used,
    pacing=ColocatedPacing(),
    follows={EngineMove.JOINED: _joined},
    check=check,
)
