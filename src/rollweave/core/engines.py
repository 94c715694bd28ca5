"""Engines: their start, and their restart or removal after a failure.

An engine that is ready, for the first time or again, is stale until it has loaded
weights (`core/weight_updates`). Engines that join and leave during a run, and their
places on hosts, are a mechanism's (`mechanisms/membership`).
"""

from collections.abc import Mapping

from rollweave.core import dispatching, turns
from rollweave.core.run import EngineFailure, EngineMove, Run
from rollweave.core.state import Engine, EngineStatus, Phase, Seat
from rollweave.core.turns import RESTS
from rollweave.schema.base import EngineId
from rollweave.schema.commands import RemoveEngine, RestartEngine
from rollweave.schema.events import EngineJoined, EngineLost, EngineSlot

LEGAL: Mapping[EngineStatus, frozenset[EngineStatus]] = {
    EngineStatus.STARTING: frozenset(
        {EngineStatus.STALE, EngineStatus.SERVING, EngineStatus.STARTING}
    ),
    EngineStatus.STALE: frozenset(
        {EngineStatus.LOADING, EngineStatus.SERVING, EngineStatus.STALE, EngineStatus.STARTING}
    ),
    EngineStatus.SERVING: frozenset({EngineStatus.SUSPENDING, EngineStatus.STARTING}),
    EngineStatus.SUSPENDING: frozenset(
        {EngineStatus.LOADING, EngineStatus.SERVING, EngineStatus.STALE, EngineStatus.STARTING}
    ),
    EngineStatus.LOADING: frozenset(
        {EngineStatus.LOADING, EngineStatus.SERVING, EngineStatus.STALE, EngineStatus.STARTING}
    ),
}
"""Legal transitions of an engine. A restart makes any engine STARTING; an engine that
can load nothing is STALE, unless its own weights still serve.
"""


def start(run: Run, slots: tuple[EngineSlot, ...]) -> None:
    """Record the engines that a new world starts, in place of a former world's."""
    state = run.state
    former, state.engines = state.engines, {slot.id: new(run, slot) for slot in slots}
    for engine_id in former:
        run.forget_engine(engine_id)
    run.follow(EngineMove.REPLACED, former)
    fleet_changed(run)


def new(run: Run, slot: EngineSlot) -> Engine:
    """Return the record of an engine that is about to start."""
    return Engine(
        id=slot.id,
        seat=Seat(
            degree=slot.degree,
            group=slot.group,
            host=slot.host,
            devices=slot.devices,
            pool=slot.pool,
            phase="both" if slot.lender else run.config.engines[slot.group].first_phase,
        ),
        lender=slot.lender,
        since=run.now,
    )


def fleet_changed(run: Run) -> None:
    """Record that other engines take turns than before."""
    run.fleet_changed()
    run.follow(EngineMove.FLEET_CHANGED)


def find(run: Run, engine_id: EngineId, epoch: int) -> Engine | None:
    engine = run.state.engines.get(engine_id)
    return engine if engine is not None and engine.epoch == epoch else None


def on_joined(run: Run, event: EngineJoined) -> None:
    engine = find(run, event.engine_id, event.epoch)
    if engine is None or engine.status is not EngineStatus.STARTING:
        return
    engine.abilities.max_slots, engine.abilities.kv_tokens = event.max_slots, event.kv_total_tokens
    engine.abilities.stages, engine.abilities.moves_kv = event.stages, event.moves_kv
    engine.abilities.preempts, engine.abilities.lent = event.preempts, event.lent
    engine.failures.returns = 0
    engine.barred.pop(RESTS, None)
    run.follow(EngineMove.JOINED, engine, event)
    if event.version < 0:
        enter(run, engine, EngineStatus.STALE)
        return
    engine.version, engine.publication_id = event.version, event.version
    run.follow(EngineMove.FLEET_CHANGED)
    enter(run, engine, EngineStatus.SERVING)


def on_lost(run: Run, event: EngineLost) -> None:
    engine = find(run, event.engine_id, event.epoch)
    if engine is not None:
        restart(run, engine, f"lost: {event.error}", lost=True)


def restart(run: Run, engine: Engine, reason: str, *, lost: bool = False) -> None:
    """Restart the engine in place, or give it up after repeated failure (RollArt §8,
    Laminar §3.3), unless one of its turns may be to blame. With `lost`, its process is
    gone.
    """
    error = f"engine {reason}" if lost else f"engine restarted: {reason}"
    failure = EngineFailure(error=error, lost=lost)
    run.follow(EngineMove.FAILED, engine, failure)
    turns.fail_all(run, engine, error, abort=not lost)
    if run.state.phase is Phase.FINISHED:
        return
    if engine.departing or engine.lender:  # another lender may take its place
        lose(run, engine, reason)
        return
    if not failure.excused:
        engine.failures.restarts += 1
        if engine.failures.restarts > run.config.watchdog.restarts:
            _give_up(run, engine, reason)
            return
    run.warn(engine.id, f"restarted: {reason}", count="engine_restarted")
    engine.epoch += 1
    engine.version = engine.publication_id = engine.loading.id = -1
    engine.staging.id = engine.staging.staged_id = engine.staging.unstaged_id = -1
    engine.released = False
    engine.failures.consecutive_timeouts = engine.failures.load_failures = 0
    engine.failures.unanswered, engine.failures.isolates = {}, None
    enter(run, engine, EngineStatus.STARTING)
    run.follow(EngineMove.FLEET_CHANGED)
    run.pacing.unassign_engine(run, engine)
    dispatching.requeue_from(run, engine)
    command = RestartEngine(
        engine_id=engine.id,
        degree=engine.seat.degree,
        group=engine.seat.group,
        host=engine.seat.host,
        devices=engine.seat.devices,
        epoch=engine.epoch,
        reason=reason,
    )
    run.emit(command)


def _give_up(run: Run, engine: Engine, reason: str) -> None:
    """Remove an engine that has failed too often, unless a mechanism has given up its
    host with it.
    """
    run.follow(EngineMove.GIVEN_UP, engine, reason)
    if engine.id in run.state.engines:
        restarts = engine.failures.restarts - 1
        text = f"removed after {restarts} restarts: {reason}"
        run.warn(engine.id, text, count="engine_removed")
        lose(run, engine, reason)


def lose(run: Run, engine: Engine, reason: str) -> None:
    """Remove an engine that was not meant to go."""
    remove(run, engine, reason)
    run.follow(EngineMove.LOST, engine, reason)


def remove(run: Run, engine: Engine, reason: str) -> None:
    """Remove an engine without turns for good."""
    state = run.state
    del state.engines[engine.id]
    run.follow(EngineMove.REMOVED, engine)
    run.forget_engine(engine.id)
    fleet_changed(run)
    run.pacing.unassign_engine(run, engine)
    dispatching.requeue_from(run, engine)
    run.emit(RemoveEngine(engine_id=engine.id, reason=reason))


def enter(run: Run, engine: Engine, status: EngineStatus) -> None:
    """Change the status. Callers change the engine's version and weights before."""
    assert status in LEGAL[engine.status], f"{engine.id}: {engine.status} → {status}"
    engine.status, engine.since = status, run.now
    run.fleet_changed()
