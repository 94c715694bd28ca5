"""Weight updates of engines, without losing what is in flight.

An update is suspend, load, resume (RollArt §6.2): the turns in flight stay on the
engine, and their KV is recomputed there. While an evaluation runs, engines keep the
version that is being evaluated. In mode decoupled each engine updates independently,
and `core/version_affinity` decides when and to which version.
"""

from rollweave.core import assignment, engines, trajectories, version_affinity, weights
from rollweave.core.run import Run
from rollweave.core.state import Engine, EngineStatus
from rollweave.schema.commands import LoadWeights, ResumeEngine, SuspendEngine
from rollweave.schema.events import EngineSuspended, WeightsLoaded, WeightsLoadFailed
from rollweave.schema.work import StopReason

MAX_LOAD_FAILURES = 2
"""Maximum number of failed loads of the same weights on one engine before it is
restarted.
"""


def on_suspended(run: Run, event: EngineSuspended) -> None:
    engine = engines.find(run, event.engine_id, event.epoch)
    if engine is None or engine.status is not EngineStatus.SUSPENDING:
        return
    _load(run, engine, run.pacing.wanted_weights(run, engine))


def on_loaded(run: Run, event: WeightsLoaded) -> None:
    engine = engines.find(run, event.engine_id, event.epoch)
    if (
        engine is None
        or engine.status is not EngineStatus.LOADING
        or engine.loading_id != event.weights_id
    ):
        return
    step = engine.loading_step
    if step is not None and run.state.publication.checkpointed.get(event.weights_id) != step:
        _unreadable(run, engine, step, "damaged, or written again in the meantime")
        return
    if engine.version >= 0:
        engine.restarts = (
            0  # it has survived from one update to the next: earlier failures are forgiven
        )
    else:
        assignment.engines_changed(run)
    engine.version, engine.weights_id = event.version, event.weights_id
    engine.load_failures = 0
    engine.peak_kv = None
    engines.enter(run, engine, EngineStatus.SERVING)
    run.emit(ResumeEngine(engine_id=engine.id))
    _reassign(run)


def on_load_failed(run: Run, event: WeightsLoadFailed) -> None:
    engine = engines.find(run, event.engine_id, event.epoch)
    if (
        engine is None
        or engine.status is not EngineStatus.LOADING
        or engine.loading_id != event.weights_id
    ):
        return
    if engine.loading_step is not None:
        _unreadable(run, engine, engine.loading_step, event.error)
        return
    engine.load_failures += 1
    run.warn(engine.id, f"weights {event.weights_id} refused: {event.error}", count="load_failed")
    if engine.load_failures >= MAX_LOAD_FAILURES:
        relay = weights.relay_of(run, engine)
        # either of the two may be at fault
        if relay is not None and event.weights_id in relay.versions:
            relay.restart_reason = f"{engine.id} cannot load from it"
        engines.restart(run, engine, f"weights refused {MAX_LOAD_FAILURES} times: {event.error}")
    elif run.pacing.reloads_newest:
        _load(run, engine, weights.newest(run, engine))
    else:
        if event.weights_id != run.state.publication.weights_id:
            weights.forget(run, event.weights_id)  # older versions are not sent again
        _make_stale(run, engine)
        _reassign(run)


def _reassign(run: Run) -> None:
    """Reassign unassigned trajectories, and restart those whose version can no longer be
    loaded anywhere.
    """
    for trajectory in version_affinity.reassign(run):
        trajectories.cancel(run, trajectory, StopReason.ENGINE_FAILURE)


def _unreadable(run: Run, engine: Engine, step: int, error: str) -> None:
    """Handle a checkpoint from which the engine cannot load its weights: no engine
    tries it again. It is no fault of the engine.
    """
    run.warn(
        engine.id,
        f"weights {engine.loading_id} not loaded from checkpoint {step}: {error}",
        count="load_failed",
    )
    weights.keep_checkpoints(run, but={*run.state.publication.checkpointed.values()} - {step})
    _make_stale(run, engine)
    _reassign(run)


def update(run: Run) -> None:
    """Make engines load the weights that the mode's pacing wants of them."""
    for engine, target in run.pacing.updates(run):
        if engine.status is EngineStatus.STALE:
            _load(run, engine, target)
        else:
            engines.enter(run, engine, EngineStatus.SUSPENDING)
            run.emit(SuspendEngine(engine_id=engine.id))


def _load(run: Run, engine: Engine, weights_id: int | None) -> None:
    if run.pacing.holds_back(run, weights_id):
        evaluation = run.state.evaluations.current
        assert evaluation is not None, "an evaluation holds it back"
        (_resume if engine.version == evaluation.version else _make_stale)(run, engine)
    elif (
        weights_id is not None
        and weights_id != engine.weights_id
        and weights.is_loadable(run, engine, weights_id)
    ):
        step = (
            None
            if weights.is_in_memory(run, engine, weights_id)
            else run.state.publication.checkpointed[weights_id]
        )
        engine.loading_id, engine.loading_step = weights_id, step
        version_affinity.begin_load(run, engine)
        engines.enter(run, engine, EngineStatus.LOADING)
        version = run.state.publication.retained[weights_id] if step is None else step
        run.emit(
            LoadWeights(
                engine_id=engine.id, version=version, weights_id=weights_id, from_checkpoint=step
            )
        )
    elif run.state.chain.relayed and engine.version >= 0:  # its relay was lost in the meantime
        _resume(run, engine)
    else:
        _make_stale(run, engine)


def _resume(run: Run, engine: Engine) -> None:
    """Let the engine serve on with its weights."""
    engine.loading_id = -1
    engines.enter(run, engine, EngineStatus.SERVING)
    run.emit(ResumeEngine(engine_id=engine.id))


def _make_stale(run: Run, engine: Engine) -> None:
    """Mark an engine that can load nothing now as stale.

    With independent updates it no longer counts as having weights.
    """
    engine.loading_id = -1
    if not run.pacing.stale_keeps_version:
        engine.version = engine.weights_id = -1
    engines.enter(run, engine, EngineStatus.STALE)
