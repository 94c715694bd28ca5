"""Engines: joining, leaving, and restarting after a failure.

An engine that joins, for the first time or again, is stale until it has loaded weights
(`core/weight_updates`).
"""

from collections.abc import Mapping

from rollweave.core import (
    bindings,
    dispatching,
    membership,
    turns,
)
from rollweave.core.policy.retry import Failover, failover
from rollweave.core.run import EngineFailure, EngineMove, HostMove, Run
from rollweave.core.state import Engine, EngineStatus, Failures, Phase, Seat, State, Unplaced
from rollweave.core.turns import RESTS
from rollweave.schema.base import EngineId
from rollweave.schema.commands import (
    RemoveEngine,
    RestartEngine,
    StartEngine,
)
from rollweave.schema.events import (
    EngineJoined,
    EngineLost,
    EngineRegistered,
    EngineSlot,
    EngineWithdrawn,
)

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
    """Record the engines that a new world starts. Engines that were leaving a former
    world have gone with it.
    """
    state, configured = run.state, {slot.id for slot in membership.first_engines(run.config)}
    for engine in state.engines.values():
        if engine.leaving and all(slot.id != engine.id for slot in slots):
            _count_departure(state, engine)
    for engine_id in state.engines:
        run.forget_engine(engine_id)
    state.engines = {
        slot.id: _engine(run, slot, joined=slot.id not in configured) for slot in slots
    }
    state.membership.withdrawn = [
        name for name in state.membership.withdrawn if name not in state.engines
    ]
    state.membership.next_number = max(
        [state.membership.next_number, *(membership.number_of(slot.id) + 1 for slot in slots)]
    )
    _membership_changed(run)


def _engine(run: Run, slot: EngineSlot, *, joined: bool, moved: bool = False) -> Engine:
    # a client of a service registers engines that do everything
    whole = run.state.serving and joined
    return Engine(
        id=slot.id,
        seat=Seat(
            degree=slot.degree,
            group=slot.group,
            host=slot.host,
            devices=slot.devices,
            pool=slot.pool,
            phase="both" if whole else run.config.engines[slot.group].phase,
        ),
        lender=slot.lender,
        joined=joined,
        failures=Failures(moved=moved),
        since=run.now,
    )


def _membership_changed(run: Run) -> None:
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
    """Restart the engine in place, or give up the engine or its host after repeated
    failure (RollArt §8, Laminar §3.3), unless one of its turns may be to blame. The
    engines of the host start elsewhere.

    The run ends if no engine is left. With `lost`, its process is gone.
    """
    error = f"engine {reason}" if lost else f"engine restarted: {reason}"
    failure = EngineFailure(error=error, lost=lost)
    run.follow(EngineMove.FAILED, engine, failure)
    turns.fail_all(run, engine, error, abort=not lost)
    if run.state.phase is Phase.FINISHED:
        return
    if engine.departing or engine.lender:  # another lender may take its place
        remove(run, engine, reason)
        _end_if_last(run, engine, reason)
        return
    match _after_failure(run, engine, failure):
        case Failover.EVICT_MACHINE:
            engine.failures.moved = True
            evict(
                run,
                engine.seat.host,
                f"engine {engine.id} failed {engine.failures.restarts} times; last: {reason}",
            )
            return
        case Failover.REMOVE_ENGINE:
            run.warn(
                engine.id,
                f"removed after {engine.failures.restarts - 1} restarts: {reason}",
                count="engine_removed",
            )
            remove(run, engine, reason)
            _end_if_last(run, engine, reason)
            return
        case Failover.RESTART:
            pass
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


def _after_failure(run: Run, engine: Engine, failure: EngineFailure) -> Failover:
    """Count the failure of the engine unless it is excused, and return what follows."""
    if failure.excused:
        return Failover.RESTART
    engine.failures.restarts += 1
    return failover(
        restarts=engine.failures.restarts - 1,
        limit=run.config.watchdog.restarts,
        elsewhere=_serving_elsewhere(run, engine.seat.host),
        moved=engine.failures.moved,
    )


def evict(run: Run, host: int, reason: str, *, returns: bool = False) -> None:
    """Give up a host, with its relay and all its engines, which are started
    elsewhere.

    Relays that fetch weights from it find another source. A host `returns` if it may
    join again, as a lost one may.
    """
    state = run.state
    run.warn(f"host {host}", f"given up: {reason}", count="host_evicted")
    state.hosts.up.pop(host, None)
    run.follow(HostMove.GIVEN_UP, host, reason)
    for engine in [engine for engine in state.engines.values() if engine.seat.host == host]:
        displace(run, engine, f"host {host} was given up: {reason}", returns=returns)


def displace(run: Run, engine: Engine, reason: str, *, returns: bool = False) -> None:
    """Remove an engine that has lost its place; unless it was departing, it
    starts elsewhere. It waits for a host that `returns`, if there is no place.
    """
    if not (engine.departing or engine.lender):
        run.state.hosts.unplaced.append(
            Unplaced(
                degree=engine.seat.degree,
                group=engine.seat.group,
                joined=engine.joined,
                moved=engine.failures.moved,
                returns=returns,
            )
        )
    turns.fail_all(run, engine, reason, abort=True)
    remove(run, engine, reason)
    _end_if_last(run, engine, reason)


def _has_place(run: Run, engine: Unplaced) -> bool:
    slot = EngineSlot(id=EngineId(""), degree=engine.degree, group=engine.group)
    return bindings.bind_engine(run.config, run.state, slot) is not None


def _serving_elsewhere(run: Run, host: int) -> int:
    """Return the number of engines on other hosts that have weights; 0 without
    relays.
    """
    if not run.carrier.relayed(run):
        return 0
    others = [engine for engine in run.state.engines.values() if engine.seat.host != host]
    return sum(engine.version >= 0 and not engine.departing for engine in others)


def _end_if_last(run: Run, engine: Engine, reason: str) -> None:
    """End the run if the removed engine was the last one, unless another is planned,
    has a place, or waits for a host that may return.
    """
    state = run.state
    if state.serving or any(
        engine.samples and not engine.lender for engine in state.engines.values()
    ):
        return
    planned = state.membership.pending_degrees or any(
        one.returns or _has_place(run, one)
        for one in state.hosts.unplaced
        if run.config.engines[one.group].phase != "prefill"
    )
    if not (planned and state.hosts.up):
        state.error = state.error or f"no engine is left; the last one ({engine.id}): {reason}"


# Engines that join and leave.


def on_registered(run: Run, event: EngineRegistered) -> None:
    """Start one more engine, in any phase.

    It is stale until it has loaded the newest weights available to it.
    """
    state, slot = run.state, event.engine
    if state.serving:
        refused = slot.id in state.engines or state.phase is not Phase.SERVING
    else:
        refused = bool(
            membership.why_not_join(run.config, state, slot)
        )  # or the event is a duplicate
    if refused:
        return
    state.counters.engines_joined += 1
    add(run, slot, joined=True)


def add(run: Run, slot: EngineSlot, *, joined: bool = False) -> None:
    """Start this engine where there is a place, or once there is one."""
    place(run, slot, Unplaced(degree=slot.degree, group=slot.group, joined=joined))


def place(run: Run, slot: EngineSlot, engine: Unplaced) -> None:
    """Start an engine that had no place; it waits again if there is still none."""
    state, joined, moved = run.state, engine.joined, engine.moved
    placed = bindings.bind_engine(run.config, state, slot)
    if placed is None:
        state.hosts.unplaced.append(engine)
        return
    slot = placed
    _start(run, slot, _engine(run, slot, joined=joined, moved=moved))


def borrow(run: Run, slot: EngineSlot) -> bool:
    """Start an engine on a lender; False if none of the run's hosts can have it."""
    placed = bindings.bind_engine(run.config, run.state, slot)
    if placed is None:
        return False
    _start(run, placed, _engine(run, placed, joined=False))
    return True


def _start(run: Run, slot: EngineSlot, engine: Engine) -> None:
    state = run.state
    state.engines[slot.id] = engine
    if not state.serving:  # a service's engines are not numbered
        state.membership.next_number = membership.number_of(slot.id) + 1
    run.fleet_changed()
    run.emit(
        StartEngine(
            engine_id=slot.id,
            degree=slot.degree,
            group=slot.group,
            host=slot.host,
            devices=slot.devices,
            lender=slot.lender,
        )
    )


def on_withdrawn(run: Run, event: EngineWithdrawn) -> None:
    """Mark the engine as leaving: `remove_drained` removes it when it may.

    In training the last engine stays.
    """
    engine = run.state.engines.get(event.engine_id)
    if engine is None or (
        not run.state.serving
        and not engine.lender
        and membership.why_not_leave(run.config, run.state, engine)
    ):
        return
    engine.leaving = True
    run.fleet_changed()
    if not event.drain:
        drain(run, engine)
        turns.recall_all(run, engine)


def remove_drained(run: Run) -> None:
    """Drain engines that leave, in mode decoupled once their trajectories are over.
    Remove those that have drained.

    If all others were lost in the meantime, a training run keeps the engine that was to
    leave.
    """
    state = run.state
    for engine in [state.engines[engine_id] for engine_id in run.fleet.departing]:
        if engine.leaving and not state.serving and not membership.remaining_engines(state, engine):
            run.warn(
                engine.id, "stays: it was to leave, and is the last engine", count="engine_stays"
            )
            engine.leaving = engine.draining = False
            _membership_changed(run)
        if engine.leaving and not engine.draining and run.pacing.may_drain(run, engine):
            drain(run, engine)
        if engine.draining and not engine.active:
            remove(
                run,
                engine,
                "it was withdrawn" if engine.leaving else "another engine takes its place",
            )


def drain(run: Run, engine: Engine) -> None:
    """Give the engine no more turns; `remove_drained` removes it when its last one is
    done.
    """
    engine.draining = True
    _membership_changed(run)
    dispatching.requeue_from(run, engine)


def remove(run: Run, engine: Engine, reason: str) -> None:
    """Remove an engine without turns for good."""
    state = run.state
    del state.engines[engine.id]
    run.follow(EngineMove.REMOVED, engine)
    run.forget_engine(engine.id)
    if engine.leaving:
        _count_departure(state, engine)
    _membership_changed(run)
    run.pacing.unassign_engine(run, engine)
    dispatching.requeue_from(run, engine)
    run.emit(RemoveEngine(engine_id=engine.id, reason=reason))


def _count_departure(state: State, engine: Engine) -> None:
    """Count a withdrawn engine that has gone, and keep it out of later worlds."""
    state.counters.engines_left += 1
    if not (engine.joined or engine.lender):
        state.membership.withdrawn.append(engine.id)


def enter(run: Run, engine: Engine, status: EngineStatus) -> None:
    """Change the status. Callers change the engine's version and weights before."""
    assert status in LEGAL[engine.status], f"{engine.id}: {engine.status} → {status}"
    engine.status, engine.since = status, run.now
    run.fleet_changed()
