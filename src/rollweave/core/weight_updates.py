"""Weight updates of engines, without losing what is in flight.

An update is stage, suspend, load, resume (RollArt §6.2): the engine receives and
verifies the new weights while it serves, and is suspended for the swap only. The turns
in flight stay on it, and their KV is recomputed there. Weights are staged as soon as
they can be, before the mode lets engines take them. An engine without room for a second
copy, or whose staging failed, is suspended for the whole load; so is one without work,
since there is nothing to hide the load behind. While an evaluation runs, engines keep
the version that is being evaluated. In mode decoupled each engine updates
independently, and `mechanisms/versions/binding` decides when and to which version.
"""

from rollweave.core import engines, trajectories, weights
from rollweave.core.run import EngineMove, Run
from rollweave.core.state import Engine, EngineStatus
from rollweave.schema.commands import LoadWeights, ResumeEngine, StageWeights, SuspendEngine
from rollweave.schema.events import (
    EngineSuspended,
    StagingFailed,
    WeightsLoaded,
    WeightsLoadFailed,
    WeightsStaged,
)
from rollweave.schema.work import StopReason

MAX_LOAD_FAILURES = 2
"""Maximum number of failed loads of the same weights on one engine before it is
restarted.
"""


def on_suspended(run: Run, event: EngineSuspended) -> None:
    engine = engines.find(run, event.engine_id, event.epoch)
    if engine is None or engine.status is not EngineStatus.SUSPENDING:
        return
    if engine.released:
        engine.publication_id = -1  # gone with the memory
        _make_stale(run, engine)
        return
    wanted = run.pacing.wanted_weights(run, engine)
    _load(run, engine, engine.staging.staged_id if _swaps_staged(run, engine, wanted) else wanted)


def on_staged(run: Run, event: WeightsStaged) -> None:
    engine = engines.find(run, event.engine_id, event.epoch)
    if engine is None or engine.staging.id != event.publication_id:
        return
    run.state.counters.weights.transfer_s += run.now - engine.staging.since
    engine.staging.id = -1
    engine.staging.staged_id = (
        event.publication_id if event.publication_id > engine.publication_id else -1
    )


def on_staging_failed(run: Run, event: StagingFailed) -> None:
    engine = engines.find(run, event.engine_id, event.epoch)
    if engine is not None and engine.staging.id == event.publication_id:
        give_up_staging(run, engine, event.error)


def give_up_staging(run: Run, engine: Engine, error: str) -> None:
    """Let the engine load these weights while it is suspended, once the mode
    permits.
    """
    run.warn(
        engine.id,
        f"weights {engine.staging.id} not received while it serves: {error}",
        count="staging_failed",
    )
    engine.staging.id, engine.staging.unstaged_id = -1, engine.staging.id


def on_loaded(run: Run, event: WeightsLoaded) -> None:
    engine = _loading(run, event)
    if engine is None:
        return
    step = engine.loading.step
    if step is not None and run.state.publication.checkpointed.get(event.publication_id) != step:
        _unreadable(run, engine, step, "damaged, or written again in the meantime")
        return
    if engine.version >= 0:
        # it has survived from one update to the next: earlier failures are forgiven
        engine.failures.restarts, engine.failures.doubted, engine.failures.moved = 0, {}, False
        counted = run.state.counters.weights
        staged = engine.staging.staged_id == event.publication_id
        counted.updates += 1
        counted.staged += staged
        _count_stop(run, engine, transfers=not staged)
    else:
        run.follow(EngineMove.FLEET_CHANGED)
    engine.released = False
    engine.version, engine.publication_id = event.version, event.publication_id
    engine.failures.load_failures = 0
    if engine.staging.staged_id <= event.publication_id:
        engine.staging.staged_id = -1
    engines.enter(run, engine, EngineStatus.SERVING)
    run.emit(ResumeEngine(engine_id=engine.id))
    _reassign(run)


def on_load_failed(run: Run, event: WeightsLoadFailed) -> None:
    engine = _loading(run, event)
    if engine is None:
        return
    if engine.version >= 0:
        _count_stop(run, engine, transfers=engine.staging.staged_id != event.publication_id)
    if engine.loading.step is not None:
        _unreadable(run, engine, engine.loading.step, event.error)
        return
    engine.failures.load_failures += 1
    run.warn(
        engine.id, f"weights {event.publication_id} refused: {event.error}", count="load_failed"
    )
    if engine.failures.load_failures >= MAX_LOAD_FAILURES:
        run.carrier.accuse(run, engine, event.publication_id)
        engines.restart(run, engine, f"weights refused {MAX_LOAD_FAILURES} times: {event.error}")
    elif run.pacing.interchangeable:  # all its trajectories can continue with the newest
        _load(run, engine, weights.newest(run, engine))
    else:
        if event.publication_id != run.state.publication.id:
            weights.forget(run, event.publication_id)  # older versions are not sent again
        _make_stale(run, engine)
        _reassign(run)


def _loading(run: Run, event: WeightsLoaded | WeightsLoadFailed) -> Engine | None:
    """Return the engine that loads these weights; None if it no longer does."""
    engine = engines.find(run, event.engine_id, event.epoch)
    if (
        engine is None
        or engine.status is not EngineStatus.LOADING
        or engine.loading.id != event.publication_id
    ):
        return None
    return engine


def _count_stop(run: Run, engine: Engine, *, transfers: bool) -> None:
    """Count the seconds of the load that is over; with `transfers` it also received the
    weights.
    """
    counted, elapsed = run.state.counters.weights, run.now - engine.since
    counted.stopped_s += elapsed
    if transfers:
        counted.transfer_s += elapsed


def _reassign(run: Run) -> None:
    """Reassign unassigned trajectories, and restart those whose version can no longer
    be loaded anywhere.
    """
    for trajectory in run.pacing.reassign(run):
        text = "no engine can load the weights with which it started"
        trajectories.cancel(run, trajectory, StopReason.ENGINE_FAILURE, failure=text)


def _unreadable(run: Run, engine: Engine, step: int, error: str) -> None:
    """Handle a checkpoint from which the engine cannot load its weights: no engine
    tries it again. It is no fault of the engine.
    """
    run.warn(
        engine.id,
        f"weights {engine.loading.id} not loaded from checkpoint {step}: {error}",
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
        elif _swaps_staged(run, engine, target) or not _stages(run, engine, target):
            engines.enter(run, engine, EngineStatus.SUSPENDING)
            run.emit(SuspendEngine(engine_id=engine.id))
    _stage(run)


def _stage(run: Run) -> None:
    """Let serving engines receive the newest weights that they can load."""
    published = run.state.publication.id
    if run.fleet.publication_ids <= {published}:
        return  # this is asked after every event
    for engine in run.state.engines.values():
        if (
            engine.abilities.stages
            and engine.status is EngineStatus.SERVING
            and engine.staging.id < 0
            and published not in (engine.publication_id, engine.staging.staged_id)
            and not engine.departing
        ):
            newest = weights.newest(run, engine)
            if (
                newest is not None
                and newest > max(engine.publication_id, engine.staging.staged_id)
                and _can_stage(run, engine, newest)
                and _has_work(run)
            ):
                engine.staging.id, engine.staging.since = newest, run.now
                version = run.state.publication.retained[newest]
                run.emit(StageWeights(engine_id=engine.id, version=version, publication_id=newest))


def _can_stage(run: Run, engine: Engine, publication_id: int) -> bool:
    return (
        engine.abilities.stages
        and publication_id != engine.staging.unstaged_id
        and "staging" not in run.config.ablation.without
        and weights.is_in_memory(run, engine, publication_id)
    )


def _has_work(run: Run) -> bool:
    """True if there are trajectories whose turns can hide a transfer."""
    pools = run.state.pools
    return bool(pools.init or pools.run_queued or pools.run)


def _stages(run: Run, engine: Engine, target: int | None) -> bool:
    """True if the engine continues to serve until it has received these weights."""
    return (
        run.pacing.interchangeable
        and target is not None
        and target != engine.staging.staged_id
        and _can_stage(run, engine, target)
        and _has_work(run)
    )


def _swaps_staged(run: Run, engine: Engine, target: int | None) -> bool:
    """True if the engine swaps in the weights that it has staged, even if newer ones
    are published: otherwise it would never update if weights are published faster than
    it receives them.
    """
    return (
        run.pacing.interchangeable
        and target is not None
        and engine.publication_id < engine.staging.staged_id <= target
        and weights.is_in_memory(run, engine, engine.staging.staged_id)
    )


def _load(run: Run, engine: Engine, publication_id: int | None) -> None:
    if run.pacing.holds_back(run, publication_id):
        evaluation = run.state.evaluations.current
        assert evaluation is not None, "an evaluation holds it back"
        serves_it = engine.version == evaluation.version and not engine.released
        (_resume if serves_it else _make_stale)(run, engine)
    elif (
        publication_id is not None
        and publication_id != engine.publication_id
        and weights.is_loadable(run, engine, publication_id)
    ):
        step = (
            None
            if weights.is_in_memory(run, engine, publication_id)
            else run.state.publication.checkpointed[publication_id]
        )
        engine.loading.id, engine.loading.step = publication_id, step
        run.pacing.begin_load(run, engine)
        engines.enter(run, engine, EngineStatus.LOADING)
        version = run.state.publication.retained[publication_id] if step is None else step
        run.emit(
            LoadWeights(
                engine_id=engine.id,
                version=version,
                publication_id=publication_id,
                from_checkpoint=step,
            )
        )
    elif run.carrier.relayed(run) and engine.version >= 0 and not engine.released:
        _resume(run, engine)  # its relay was lost in the meantime
    else:
        _make_stale(run, engine)


def _resume(run: Run, engine: Engine) -> None:
    """Let the engine serve on with its weights."""
    engine.loading.id = -1
    engines.enter(run, engine, EngineStatus.SERVING)
    run.emit(ResumeEngine(engine_id=engine.id))


def _make_stale(run: Run, engine: Engine) -> None:
    """Mark an engine that can load nothing now as stale.

    If trajectories are bound to weights, it no longer counts as having any.
    """
    engine.loading.id = -1
    if not run.pacing.interchangeable:
        engine.version = engine.publication_id = -1
    engines.enter(run, engine, EngineStatus.STALE)
