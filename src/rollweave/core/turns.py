"""Turns: ranked, queued, given to an engine that would run them at once, and retried
elsewhere when the engine fails.

Invariants: an open turn is in `turn_queue`, or in exactly one engine's `active`, or
held while its trajectory's KV moves; `dispatch` fences late answers. An engine is given
more turns than it has slots only by a turn that preempts (Heddle Alg. 1): it runs the
highest ranks of those that it has.
"""

from rollweave.core import assignment, attempts, lengths, migration, trajectories, turn_priority
from rollweave.core.policy.priority import is_overdue, overdue_rank
from rollweave.core.policy.routing import choose
from rollweave.core.run import Run
from rollweave.core.state import Engine, EngineStatus, Stage, Trajectory, Turn
from rollweave.core.turn_queues import QueueKey
from rollweave.schema.base import EngineId, TrajectoryId
from rollweave.schema.commands import AbortTurn, StartTurn
from rollweave.schema.events import (
    MigrationDone,
    PredictionReady,
    TurnDone,
    TurnFailed,
    TurnProgress,
    TurnRequested,
    TurnsProgressed,
    TurnWithdrawn,
)
from rollweave.schema.work import StopReason


def on_requested(run: Run, event: TurnRequested) -> None:
    trajectory = attempts.find(run, event.trajectory_id, event.attempt)
    if trajectory is None or trajectory.stage is not Stage.RUN or trajectory.turn is not None:
        return
    if event.turn != trajectory.turns_requested:
        return  # a duplicate
    lengths.learn_request(run, trajectory, event.context_tokens)
    trajectory.turns_requested += 1
    trajectory.turn = Turn(number=event.turn, context_tokens=event.context_tokens, since=run.now)
    if not migration.holds_turn(run, trajectory):
        enqueue(run, trajectory)


def on_done(run: Run, event: TurnDone) -> None:
    trajectory, turn = _open_turn(run, event)
    if trajectory is None or turn is None:
        return
    assert turn.engine is not None, "an open turn with a matching try is on an engine"
    engine = run.state.engines[turn.engine]
    if len(engine.active) > engine.max_slots:
        engine.oversubscribed_at = run.now
    run.fleet.vacate(engine, trajectory.id, turn)
    run.dirty_queues += [None, engine.id]
    engine.consecutive_timeouts = 0
    if run.state.serving:
        engine.restarts = 0  # it loads no weights, which resets this in training
    trajectory.turn, trajectory.engine, trajectory.since = None, engine.id, run.now
    counters = run.state.counters
    counters.turns += 1
    if event.cut:
        name = run.state.groups[trajectory.group_id].name
        counters.cut_turns[name] = counters.cut_turns.get(name, 0) + 1
    counters.output_tokens += event.output_tokens
    counters.cached_tokens += event.cached_tokens
    counters.context_tokens += turn.context_tokens
    counters.scheduling.queue_s += event.queue_s
    lengths.learn_turn(run, trajectory, event.output_tokens, run.now - turn.since - event.queue_s)
    if trajectory.predicted_at_turn >= 0:
        # while the environment works the trajectory may move
        enqueue_all(run, migration.consider(run, trajectory))


def on_failed(run: Run, event: TurnFailed) -> None:
    trajectory, _turn = _open_turn(run, event)
    if trajectory is not None:
        fail(run, trajectory, event.error)


def on_withdrawn(run: Run, event: TurnWithdrawn) -> None:
    trajectory = attempts.find(run, event.trajectory_id, event.attempt)
    if (
        trajectory is not None
        and trajectory.turn is not None
        and trajectory.turn.number == event.turn
    ):
        attempts.release_turn(run, trajectory)
        trajectory.since = run.now


def on_progressed(run: Run, event: TurnsProgressed) -> None:
    for progress in event.turns:
        _, turn = _open_turn(run, progress)
        if turn is not None:
            turn.output_tokens = progress.output_tokens


def on_prediction(run: Run, event: PredictionReady) -> None:
    """Act on the trajectory's new estimate wherever its turn is."""
    trajectory = attempts.find(run, event.trajectory_id, event.attempt)
    if trajectory is None or not lengths.learn_prediction(run, trajectory, event):
        return
    run.dirty_queues.append(
        trajectory.assigned_engine
    )  # its order in the KV of that engine may have changed
    if trajectory.id in run.state.turn_queue:
        if trajectory.turns_requested <= 1 and run.pacing.interchangeable:
            trajectory.assigned_engine = None  # no engine has KV of it yet
            run.reindex(trajectory)
        requeue(run, trajectory)
    elif trajectory.turn is None:
        enqueue_all(run, migration.consider(run, trajectory))
    else:
        turn_priority.rerank(run, trajectory)


def on_migration_done(run: Run, event: MigrationDone) -> None:
    """Queue the turns that have waited for the transfer."""
    enqueue_all(run, migration.complete(run, event))


def give_up_late_migrations(run: Run) -> None:
    """Give up transfers that have taken too long, and queue the turns that have waited
    for them.
    """
    enqueue_all(run, migration.give_up_late(run))


def _open_turn(
    run: Run, event: TurnDone | TurnFailed | TurnProgress
) -> tuple[Trajectory | None, Turn | None]:
    """The turn that the event answers, or (None, None) if the answer is late."""
    trajectory = attempts.find(run, event.trajectory_id, event.attempt)
    turn = trajectory.turn if trajectory is not None else None
    if (
        turn is None
        or turn.engine is None
        or (turn.number, turn.dispatch) != (event.turn, event.dispatch)
    ):
        return None, None
    return trajectory, turn


def fail(run: Run, trajectory: Trajectory, error: str) -> None:
    """Handle a turn that its engine did not answer: queue it again, preferably for
    another engine, or give up the attempt.
    """
    turn = trajectory.turn
    assert turn is not None, "only an open turn can fail"
    assert turn.engine is not None, "only an assigned turn can fail"
    engine = run.state.engines.get(turn.engine)
    if engine is not None:
        run.fleet.vacate(engine, trajectory.id, turn)
    run.warn(
        turn.engine, f"turn {turn.number} of {trajectory.id} failed: {error}", count="turn_failed"
    )
    turn.avoid.append(turn.engine)
    turn.engine, turn.since, turn.output_tokens = None, run.now, 0
    turn.dispatch += 1
    turn.failures += 1
    if turn.failures > run.config.rollout.retries:
        trajectories.cancel(run, trajectory, StopReason.ENGINE_FAILURE)
    else:
        enqueue(run, trajectory)


def fail_all(run: Run, engine: Engine, error: str, *, abort: bool) -> None:
    """Fail every turn on this engine.

    With `abort` the world discards their answers.
    """
    for trajectory_id in list(engine.active):
        trajectory = run.state.trajectories[trajectory_id]
        if abort:
            _abort(run, engine, trajectory)
        fail(run, trajectory, error)


def time_out(run: Run, engine: Engine, trajectory: Trajectory) -> None:
    """Fail a turn that is late."""
    _abort(run, engine, trajectory)
    fail(run, trajectory, f"no answer within {run.config.watchdog.turn_s:g} s")


def recall(run: Run, trajectory: Trajectory) -> None:
    """Take the open turn from its engine, to run elsewhere; that is no failure."""
    turn = trajectory.turn
    assert turn is not None, "a turn that is recalled is open"
    run.state.turn_queue.pop(trajectory.id, None)
    engine = run.state.engines.get(turn.engine) if turn.engine is not None else None
    if engine is not None:
        _abort(run, engine, trajectory)
        run.fleet.vacate(engine, trajectory.id, turn)
        turn.engine, turn.since = None, run.now
        turn.dispatch += 1


def recall_all(run: Run, engine: Engine) -> None:
    """Take every turn from this engine, to run elsewhere."""
    for trajectory_id in list(engine.active):
        trajectory = run.state.trajectories[trajectory_id]
        recall(run, trajectory)
        enqueue(run, trajectory)


def _abort(run: Run, engine: Engine, trajectory: Trajectory) -> None:
    assert trajectory.turn is not None, "an active turn is open"
    run.emit(
        AbortTurn(
            trajectory_id=trajectory.id,
            attempt=trajectory.attempt,
            turn=trajectory.turn.number,
            engine_id=engine.id,
            dispatch=trajectory.turn.dispatch,
        )
    )


# The queue.


def enqueue(run: Run, trajectory: Trajectory) -> None:
    """Queue the open turn for its trajectory's assigned engine, or for any."""
    state, turn = run.state, trajectory.turn
    assert turn is not None, "an open turn is queued"
    state.arrivals += 1
    turn.arrival = state.arrivals
    turn.rank = turn_priority.rank_of(run, trajectory, turn)
    # Where KV is kept for trajectories in the order of their launch, their turns must
    # come in that order too.
    turn.tiebreak = trajectory.launched_at if run.scheduling.by_rank else float(turn.arrival)
    turn.queue = assignment.queue_of(run, trajectory, turn.avoid)
    turn.given_at_enqueue = _turns_given(run, turn.queue)
    state.turn_queue[trajectory.id] = turn.arrival
    run.turn_queues.add(trajectory)
    run.dirty_queues.append(turn.queue)


def enqueue_all(run: Run, released: list[Trajectory]) -> None:
    """Queue the turns that have waited for transfers of KV."""
    for trajectory in released:
        enqueue(run, trajectory)


def requeue(run: Run, trajectory: Trajectory) -> None:
    """Requeue a turn whose trajectory's estimate or engine has changed.

    It keeps its place among equals.
    """
    turn = trajectory.turn
    assert turn is not None, "an open turn is queued"
    queue = assignment.queue_of(run, trajectory, turn.avoid)
    if queue != turn.queue:
        turn.queue, turn.given_at_enqueue = queue, _turns_given(run, queue)
    if turn.rank < overdue_rank(turn.arrival):
        turn.rank = turn_priority.rank_of(run, trajectory, turn)
    run.turn_queues.add(trajectory)
    run.dirty_queues.append(turn.queue)


def requeue_from(run: Run, engine: Engine) -> None:
    """Requeue the turns that wait for this engine, which takes none for a while or ever
    again.
    """
    for trajectory_id in list(run.state.turn_queue):
        trajectory = run.state.trajectories[trajectory_id]
        if trajectory.turn is not None and trajectory.turn.queue == engine.id:
            requeue(run, trajectory)


def _turns_given(run: Run, engine_id: EngineId | None) -> int:
    """The number of turns that this engine, or any, was given so far."""
    return run.state.turns_given if engine_id is None else run.state.engines[engine_id].turns_given


def dispatch(run: Run, waited_for: list[EngineId | None] | None = None) -> None:
    """Give queued turns to engines that would run them at once: those that wait for one
    of these engines, or all if none are named.
    """
    state = run.state
    if not state.turn_queue or (
        run.config.rollout.env_stepping == "batch" and _any_environment_steps(run)
    ):
        return
    if run.turn_queues.is_overgrown(state):
        run.rebuild_turn_queues()
    if not run.scheduling.homes:  # every turn waits for any engine
        while (run.fleet.free or run.scheduling.preempts) and _start_next(run, None):
            pass
        return
    _assign_waiting(run)
    for engine_id in (None, *state.engines) if waited_for is None else waited_for:
        while _start_next(run, engine_id):
            pass
    if run.scheduling.migration == "gain":
        _steal_work(run, waited_for)


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
        (other, resident)
        for other in run.turn_queues.engines
        if other != engine_id
        for resident in (True, False)
    ]
    ready = [
        t
        for queue in queues
        if (t := _next_in(run, queue)) is not None
        and t.turn is not None
        and engine_id not in t.turn.avoid
    ]
    if not ready:
        return False
    trajectory = min(ready, key=_dispatch_key)
    assert trajectory.turn is not None, "a queued turn is open"
    if not assignment.fits_in_kv(run, trajectory, run.state.engines[engine_id]):
        return False
    _reassign(run, trajectory, trajectory.turn, engine_id)
    _start_turn(run, trajectory, trajectory.turn, engine_id)
    return True


def _reassign(run: Run, trajectory: Trajectory, turn: Turn, engine_id: EngineId) -> None:
    """Assign the trajectory to this engine, which computes its context again."""
    trajectory.assigned_engine, trajectory.kv_resident, turn.queue = engine_id, False, engine_id
    run.reindex(trajectory)


def _assign_waiting(run: Run) -> None:
    """Assign the queued turns that had no engine when they were queued."""
    if not run.pacing.interchangeable:  # each waits for an engine with its own weights
        for waiting in run.turn_queues.waiting(run.state, (None, False)):
            if assignment.queue_of(run, run.state.trajectories[waiting], ()) is not None:
                requeue(run, run.state.trajectories[waiting])
        return
    while (trajectory_id := run.turn_queues.first(run.state, (None, False))) is not None:
        trajectory = run.state.trajectories[trajectory_id]
        requeue(run, trajectory)
        assert trajectory.turn is not None, "a queued turn is open"
        if trajectory.turn.queue is None:
            return  # no engine takes turns


def _start_next(run: Run, waited_for: EngineId | None) -> bool:
    """Start the first turn that waits for this engine, or for any, and can run.

    Return False if there is none.
    """
    heads = [_next_in(run, (waited_for, resident)) for resident in (True, False)]
    ready = sorted(
        (trajectory for trajectory in heads if trajectory is not None), key=_dispatch_key
    )
    for trajectory in ready:
        turn = trajectory.turn
        assert turn is not None, "a queued turn is open"
        chosen = (
            _assigned_or_free_engine(run, trajectory, turn)
            if run.scheduling.homes
            else _engine_for(run, trajectory, turn)
        )
        if chosen is not None:
            _start_turn(run, trajectory, turn, chosen)
            return True
    return False


def _dispatch_key(trajectory: Trajectory) -> tuple[float, float, TrajectoryId]:
    assert trajectory.turn is not None, "a queued turn is open"
    return (-trajectory.turn.rank, trajectory.turn.tiebreak, trajectory.id)


def _next_in(run: Run, queue: QueueKey) -> Trajectory | None:
    """The turn of this queue that runs next.

    One that was overtaken too often goes first.
    """
    state, waited_for = run.state, queue[0]
    oldest = run.turn_queues.oldest(state, queue)
    if oldest is None:
        return None
    turn = state.trajectories[oldest].turn
    assert turn is not None, "a queued turn is open"
    engine = state.engines.get(waited_for) if waited_for is not None else None
    slots = engine.max_slots if engine is not None else run.fleet.slots
    if is_overdue(
        _turns_given(run, waited_for) - turn.given_at_enqueue, slots=slots
    ) and turn.rank < overdue_rank(turn.arrival):
        turn.rank = overdue_rank(turn.arrival)
        state.counters.scheduling.overdue += 1
        run.turn_queues.add(state.trajectories[oldest])
    first = run.turn_queues.first(state, queue)
    return state.trajectories[first] if first is not None else None


def _engine_for(run: Run, trajectory: Trajectory, turn: Turn) -> EngineId | None:
    return choose(
        run.fleet.loads,
        affine=trajectory.engine,
        avoid=turn.avoid,
        placement=run.scheduling.placement,
        rank=turn.rank,
        preempts=run.scheduling.preempts,
    )


def _has_alternative(run: Run, turn: Turn) -> bool:
    """True if an engine that has not failed this turn could take it."""
    return any(
        assignment.is_usable(run, engine_id)
        for engine_id in run.state.engines
        if engine_id not in turn.avoid
    )


def _assigned_or_free_engine(run: Run, trajectory: Trajectory, turn: Turn) -> EngineId | None:
    """The assigned engine if it has a slot and KV to spare; else the least loaded
    engine that has, which is assigned then; else the assigned one by preemption.

    Computing a context again costs less than waiting for the end of another turn, or
    making another one wait.
    """
    if turn.queue in turn.avoid and run.pacing.interchangeable and _has_alternative(run, turn):
        requeue(run, trajectory)  # its engine failed it when there was no alternative
    assigned = run.fleet.loads.get(turn.queue) if turn.queue is not None else None
    fits = assigned is not None and assignment.fits_in_kv(
        run, trajectory, run.state.engines[assigned.id]
    )
    if assigned is not None and fits and assigned.active < assigned.slots:
        return assigned.id
    if run.scheduling.migration == "gain" and run.fleet.free:
        free = [load.id for load in run.fleet.loads.values() if load.active < load.slots]
        idlest = assignment.least_loaded(
            run, [engine_id for engine_id in free if engine_id not in (turn.queue, *turn.avoid)]
        )
        if idlest is not None and assignment.fits_in_kv(run, trajectory, idlest):
            _reassign(run, trajectory, turn, idlest.id)
            return idlest.id
    if assigned is not None and fits and assigned.runs(turn.rank, preempts=run.scheduling.preempts):
        return assigned.id
    return None


def _start_turn(run: Run, trajectory: Trajectory, turn: Turn, chosen: EngineId) -> None:
    state, engine = run.state, run.state.engines[chosen]
    counted = state.counters.scheduling
    del state.turn_queue[trajectory.id]
    counted.preemptions += len(engine.active) >= engine.max_slots
    counted.queue_s += run.now - turn.since
    state.turns_given += 1
    engine.turns_given += 1
    turn.engine, turn.since, turn.given_at_enqueue = chosen, run.now, engine.turns_given
    if run.scheduling.homes and not trajectory.kv_resident:
        trajectory.kv_resident = True
        run.reindex(trajectory)
    run.fleet.occupy(engine, trajectory.id, turn)
    run.emit(
        StartTurn(
            trajectory_id=trajectory.id,
            attempt=trajectory.attempt,
            turn=turn.number,
            engine_id=chosen,
            rank=turn.rank,
            dispatch=turn.dispatch,
            # then it was sampled only under weights that this engine serves, too
            resume=not run.pacing.interchangeable,
        )
    )


def is_late(run: Run, engine: Engine, turn: Turn) -> bool:
    """True if the turn has no answer within the limit.

    On an oversubscribed engine a turn may wait while others are answered.
    """
    assert engine.status is EngineStatus.SERVING, "only a serving engine owes answers"
    return (
        run.now - max(turn.since, engine.since, engine.oversubscribed_at)
        > run.config.watchdog.turn_s
    )


def _any_environment_steps(run: Run) -> bool:
    """True while an environment is starting or stepping: batch-level interaction waits
    for the slowest (RollArt Fig. 5b).
    """
    state = run.state
    return bool(state.in_init) or any(
        state.trajectories[member].turn is None for member in state.in_run
    )
