"""The queue of turns, and their dispatch: a queued turn is given to an engine that
would run it at once, the highest rank first.

Turns that were on an engine when it was lost are not queued, but run before all others,
each alone on an engine (`core/policy/suspicion`).

Invariants: an engine is given more turns than it has slots only by a turn that preempts
(Heddle Alg. 1): it runs the highest ranks of its turns. An engine that runs a suspect
has no other turn.
"""

from collections.abc import Mapping

from rollweave.core import assignment, attempts, costs, elastic, phases, turn_priority
from rollweave.core.policy.affinity import serving_pool
from rollweave.core.policy.priority import is_overdue, overdue_rank
from rollweave.core.policy.routing import EngineLoad, choose
from rollweave.core.policy.suspicion import engine_for_suspect, may_isolate
from rollweave.core.run import Run
from rollweave.core.state import Engine, OnEngine, Queued, Suspected, Trajectory, Turn
from rollweave.core.turn_queues import QueuedTurn, QueueKey
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.commands import StartTurn


def enqueue(run: Run, trajectory: Trajectory, turn: Turn) -> None:
    """Queue the open turn for its trajectory's assigned engine, or for any; or among
    the suspects, if it is one.
    """
    state = run.state
    if turn.suspicion is not None:
        turn.place = Suspected()
        state.turns.suspects[trajectory.id] = None
        return
    state.turns.arrivals += 1
    turn.arrival = state.turns.arrivals
    turn.rank = turn_priority.rank_of(run, trajectory, turn)
    queue = assignment.queue_of(run, trajectory, turn.avoid)
    pools = run.pools_of(trajectory)
    turn.place = Queued(
        engine=queue,
        pool=pools[0] if pools and not run.scheduling.assigns else "",
        given=_turns_given(run, queue),
        # Where KV is kept for trajectories in the order of their launch, their turns
        # must come in that order too.
        tiebreak=trajectory.launched_at if run.scheduling.by_rank else float(turn.arrival),
    )
    state.turns.queue[trajectory.id] = turn.arrival
    run.turn_queues.add(QueuedTurn(trajectory, turn, turn.place))
    run.dirty_queues.append(queue)


def release(run: Run, released: list[Trajectory]) -> None:
    """Queue the turns that have waited for transfers of KV, or begin them on the
    engines that have them.
    """
    for trajectory in released:
        turn = trajectory.open_turn
        if turn.prompt is None:
            enqueue(run, trajectory, turn)
        else:
            begin_sampling(run, trajectory, turn)


def requeue(run: Run, queued: QueuedTurn) -> QueuedTurn:
    """Requeue a turn whose trajectory's estimate or engine has changed, and return it
    with its new place.

    It keeps its place among equals.
    """
    trajectory, turn, place = queued
    queue = assignment.queue_of(run, trajectory, turn.avoid)
    if queue != place.engine:
        place = Queued(engine=queue, given=_turns_given(run, queue), tiebreak=place.tiebreak)
        turn.place = place
    if turn.rank < overdue_rank(turn.arrival):
        turn.rank = turn_priority.rank_of(run, trajectory, turn)
    moved = QueuedTurn(trajectory, turn, place)
    run.turn_queues.add(moved)
    run.dirty_queues.append(queue)
    return moved


def requeue_from(run: Run, engine: Engine) -> None:
    """Requeue the turns that wait for this engine, which takes none for a while or ever
    again.
    """
    for trajectory_id in list(run.state.turns.queue):
        trajectory = run.state.trajectories[trajectory_id]
        turn = trajectory.open_turn
        if isinstance(turn.place, Queued) and turn.place.engine == engine.id:
            requeue(run, QueuedTurn(trajectory, turn, turn.place))


def _turns_given(run: Run, engine_id: EngineId | None) -> int:
    """The number of turns that this engine, or any, was given so far."""
    return run.state.turns.given if engine_id is None else run.state.engines[engine_id].turns_given


def dispatch(run: Run, waited_for: list[EngineId | None] | None = None) -> None:
    """Give queued turns to engines that would run them at once: those that wait for one
    of these engines, or all if none are named.
    """
    state = run.state
    if not (state.turns.queue or state.turns.suspects) or (
        "free_stepping" in run.config.ablation.without and _any_environment_steps(run)
    ):
        return
    if state.turns.suspects:
        _start_suspects(run)
    if not state.turns.queue:
        return
    if run.turn_queues.is_overgrown(state):
        run.rebuild_turn_queues()
    if not run.scheduling.assigns:  # every turn waits for any engine
        while (run.fleet.free or run.scheduling.preempts) and _start_next(run, None):
            pass
        return
    _assign_waiting(run)
    for engine_id in (None, *state.engines) if waited_for is None else waited_for:
        while _start_next(run, engine_id):
            pass
    if run.scheduling.steals:
        _steal_work(run, waited_for)


def _start_suspects(run: Run) -> None:
    """Give suspects to engines that are empty, and keep engines empty for others."""
    state = run.state
    for trajectory_id in list(state.turns.suspects):
        trajectory = state.trajectories[trajectory_id]
        turn = trajectory.open_turn
        engine = _engine_for_suspect(run, trajectory, turn)
        if engine is None or engine.active:
            continue
        del state.turns.suspects[trajectory_id]
        if run.scheduling.assigns and trajectory.assigned_engine != engine.id:
            _reassign(run, trajectory, engine.id)
        _give(run, trajectory, turn, engine)


def _engine_for_suspect(run: Run, trajectory: Trajectory, turn: Turn) -> Engine | None:
    """Return the engine that gets no turns but this one, now or once it is empty."""
    engines, loads = run.state.engines, _loads_for(run, trajectory, turn)
    isolating = {engine.id: engine for engine in engines.values() if engine.isolates is not None}
    own = next((one for one in isolating.values() if one.isolates == trajectory.id), None)
    if own is not None and any(load.id == own.id for load in loads):
        return own
    if own is not None:  # it takes no turns for a while, or has other weights
        attempts.open_again(run, own)
        del isolating[own.id]
    if not may_isolate(isolating=len(isolating), engines=len(run.fleet.loads)):
        return None
    chosen = engine_for_suspect(loads, avoid=turn.avoid, isolating=isolating)
    if chosen is None:
        return None
    engine = engines[chosen]
    engine.isolates = trajectory.id
    run.fleet_changed()
    requeue_from(run, engine)
    return engine


def _loads_for(run: Run, trajectory: Trajectory, turn: Turn) -> list[EngineLoad]:
    """Return the loads of the engines that can run the trajectory's turns now."""
    if run.pacing.interchangeable:
        return list(_loads_of(run, assignment.pool_for(run, trajectory)).values())
    assigned = assignment.queue_of(run, trajectory, turn.avoid)
    load = None if assigned is None else run.fleet.loads.get(assigned)
    return [] if load is None else [load]


def _steal_work(run: Run, waited_for: list[EngineId | None] | None) -> None:
    """Let engines with a free slot, of those that the event touched, take turns that
    wait for other engines.
    """
    if not run.fleet.free:
        return
    for engine_id in run.fleet.loads if waited_for is None else dict.fromkeys(waited_for):
        while engine_id is not None and _has_slot(run, engine_id) and _steal_turn(run, engine_id):
            pass


def _has_slot(run: Run, engine_id: EngineId) -> bool:
    load = run.fleet.loads.get(engine_id)
    return load is not None and load.active < load.slots


def _steal_turn(run: Run, engine_id: EngineId) -> bool:
    """Give this engine the first turn that waits for another one.

    Return False if it cannot run that turn.
    """
    queues = [
        (other, "", resident)
        for other in run.turn_queues.engines
        if other != engine_id
        for resident in (True, False)
    ]
    own = run.state.engines[engine_id].pool
    ready = [
        queued
        for queue in queues
        if (queued := _next_in(run, queue)) is not None
        and engine_id not in queued.turn.avoid
        and assignment.pool_for(run, queued.trajectory) in (None, own)
    ]
    if not ready:
        return False
    first = min(ready, key=_dispatch_key)
    if not assignment.fits_in_kv(run, first.trajectory, run.state.engines[engine_id]):
        return False
    if run.scheduling.by_finish and not elastic.gains(
        run, first.trajectory, run.state.engines[engine_id]
    ):
        return False
    _reassign(run, first.trajectory, engine_id)
    _start_turn(run, first, engine_id)
    return True


def _reassign(run: Run, trajectory: Trajectory, engine_id: EngineId) -> None:
    """Assign the trajectory to this engine, which computes its context again."""
    trajectory.assigned_engine, trajectory.kv_resident = engine_id, False
    run.reindex(trajectory)


def _assign_waiting(run: Run) -> None:
    """Assign the queued turns that had no engine when they were queued."""
    if not run.pacing.interchangeable:  # each waits for an engine with its own weights
        for waiting in run.turn_queues.waiting(run.state, (None, "", False)):
            if assignment.queue_of(run, waiting.trajectory, ()) is not None:
                requeue(run, waiting)
        return
    while (first := run.turn_queues.first(run.state, (None, "", False))) is not None:
        if requeue(run, first).place.engine is None:
            return  # no engine takes turns


def _start_next(run: Run, waited_for: EngineId | None) -> bool:
    """Start the first turn that waits for this engine, or for any, and can run.

    Return False if there is none.
    """
    pools = run.queue_pools if waited_for is None else ("",)
    heads = [
        _next_in(run, (waited_for, pool, resident)) for pool in pools for resident in (True, False)
    ]
    for queued in sorted((head for head in heads if head is not None), key=_dispatch_key):
        chosen = (
            _assigned_or_free_engine(run, queued)
            if run.scheduling.assigns
            else _engine_for(run, queued)
        )
        if chosen is not None:
            _start_turn(run, queued, chosen)
            return True
    return False


def _dispatch_key(queued: QueuedTurn) -> tuple[float, float, TrajectoryId]:
    return (-queued.turn.rank, queued.place.tiebreak, queued.trajectory.id)


def _next_in(run: Run, queue: QueueKey) -> QueuedTurn | None:
    """The turn of this queue that runs next.

    One that was overtaken too often goes first.
    """
    state, waited_for = run.state, queue[0]
    oldest = run.turn_queues.oldest(state, queue)
    if oldest is None:
        return None
    turn = oldest.turn
    engine = state.engines.get(waited_for) if waited_for is not None else None
    slots = engine.max_slots if engine is not None else run.fleet.slots
    if is_overdue(
        _turns_given(run, waited_for) - oldest.place.given, slots=slots
    ) and turn.rank < overdue_rank(turn.arrival):
        turn.rank = overdue_rank(turn.arrival)
        state.counters.scheduling.overdue += 1
        run.turn_queues.add(oldest)
    return run.turn_queues.first(state, queue)


def _engine_for(run: Run, queued: QueuedTurn) -> EngineId | None:
    pool = queued.place.pool
    serving = serving_pool(run.config.pools_of(pool or None), run.fleet.live_pools)
    return choose(
        _loads_of(run, serving),
        affine=queued.trajectory.engine,
        avoid=queued.turn.avoid,
        placement=run.scheduling.placement,
        rank=queued.turn.rank,
        preempts=run.scheduling.preempts,
    )


def _loads_of(run: Run, pool: str | None) -> Mapping[EngineId, EngineLoad]:
    """Return the loads of the pool's engines, or of all engines."""
    return run.fleet.loads if pool is None else run.fleet.loads_by_pool.get(pool, {})


def _has_alternative(run: Run, queued: QueuedTurn) -> bool:
    """True if an engine that has not failed this turn could take it."""
    return any(
        engine.id not in queued.turn.avoid for engine in assignment.usable(run, queued.trajectory)
    )


def _assigned_or_free_engine(run: Run, queued: QueuedTurn) -> EngineId | None:
    """The assigned engine if it has a slot and KV to spare; else the least loaded
    engine that has, which is assigned then; else the assigned one by preemption.

    Computing a context again costs less than waiting for the end of another turn, or
    making another one wait.
    """
    trajectory, turn, place = queued
    if place.engine in turn.avoid and run.pacing.interchangeable and _has_alternative(run, queued):
        place = requeue(run, queued).place  # its engine failed it when there was no alternative
    assigned = run.fleet.loads.get(place.engine) if place.engine is not None else None
    fits = assigned is not None and assignment.fits_in_kv(
        run, trajectory, run.state.engines[assigned.id]
    )
    if assigned is not None and fits and assigned.active < assigned.slots:
        return assigned.id
    if run.scheduling.migration == "gain" and run.fleet.free:
        loads = _loads_of(run, assignment.pool_for(run, trajectory))
        free = [load.id for load in loads.values() if load.active < load.slots]
        idlest = assignment.least_loaded(
            run, [engine_id for engine_id in free if engine_id not in (place.engine, *turn.avoid)]
        )
        if idlest is not None and assignment.fits_in_kv(run, trajectory, idlest):
            _reassign(run, trajectory, idlest.id)
            return idlest.id
    if assigned is not None and fits and assigned.runs(turn.rank, preempts=run.scheduling.preempts):
        return assigned.id
    return None


def _start_turn(run: Run, queued: QueuedTurn, chosen: EngineId) -> None:
    trajectory, turn, _ = queued
    del run.state.turns.queue[trajectory.id]
    run.turn_queues.leave(trajectory.id)
    _give(run, trajectory, turn, run.state.engines[chosen])


def _give(run: Run, trajectory: Trajectory, turn: Turn, engine: Engine) -> None:
    """Give a turn that was taken from its queue to an engine."""
    state, chosen = run.state, engine.id
    counted = state.counters.scheduling
    counted.preemptions += len(engine.active) >= engine.max_slots
    counted.queue_s += run.now - turn.since
    state.turns.given += 1
    engine.turns_given += 1
    turn.place, turn.since = OnEngine(engine=chosen, given=engine.turns_given), run.now
    if run.scheduling.assigns and not trajectory.kv_resident:
        trajectory.kv_resident = True
        run.reindex(trajectory)
    suspect = turn.suspicion is not None
    prompt = None if suspect else phases.prompt_for(run, trajectory, turn, engine)
    attempts.occupy(run, engine, trajectory, turn)
    if prompt is None:
        _emit_start(run, trajectory, turn, chosen)
    else:
        phases.give(run, trajectory, turn, prompt)
        _emit_start(run, trajectory, turn, prompt.engine, prefill=True)


def begin_sampling(run: Run, trajectory: Trajectory, turn: Turn) -> None:
    """Begin a turn whose prompt was given to a prefill engine on its own engine, which
    computes what it lacks of the KV.
    """
    assert isinstance(turn.place, OnEngine), "a prompt is computed for the engine of its turn"
    attempts.release_prompt(run, trajectory, turn)
    run.state.counters.scheduling.split_s += run.now - turn.since
    turn.dispatch += 1
    turn.since = run.now
    turn.use_before = costs.charge(run, run.state.engines[turn.place.engine])
    _emit_start(run, trajectory, turn, turn.place.engine)


def _emit_start(
    run: Run, trajectory: Trajectory, turn: Turn, engine_id: EngineId, *, prefill: bool = False
) -> None:
    run.emit(
        StartTurn(
            trajectory_id=trajectory.id,
            attempt=trajectory.attempt,
            turn=turn.number,
            engine_id=engine_id,
            rank=turn.rank,
            dispatch=turn.dispatch,
            # A trajectory that is bound to weights was sampled under those of this
            # engine. What a program has read cannot be taken back, so that such a turn
            # may have tokens of several versions, as one whose engine is updated has.
            resume=turn.streamed
            or not run.pacing.interchangeable
            or turn.returned_with == run.state.engines[engine_id].publication_id,
            prefill=prefill,
        )
    )


def _any_environment_steps(run: Run) -> bool:
    """True while an environment is starting or stepping: batch-level interaction waits
    for the slowest (RollArt Fig. 5b).
    """
    state = run.state
    return bool(state.pools.init) or any(
        state.trajectories[member].turn is None for member in state.pools.run
    )
