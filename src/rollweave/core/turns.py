"""Turns: requested, answered or failed, and retried elsewhere when their engine fails.

Invariants: a queued turn is in `state.turns.queue`, one on an engine in exactly that
engine's `active`, and one that is held in neither, while its trajectory's KV moves;
`dispatch` fences late answers. `core/dispatching` queues turns and gives them to
engines.
"""

from rollweave.core import (
    affinity,
    attempts,
    costs,
    dispatching,
    lengths,
    migration,
    trajectories,
    turn_priority,
)
from rollweave.core.run import Run
from rollweave.core.state import (
    Engine,
    EngineStatus,
    Held,
    OnEngine,
    Queued,
    Stage,
    Trajectory,
    Turn,
)
from rollweave.core.turn_queues import QueuedTurn
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
    turn = Turn(number=event.turn, context_tokens=event.context_tokens, since=run.now)
    trajectory.turn = turn
    if not migration.holds_turn(run, trajectory):
        dispatching.enqueue(run, trajectory, turn)


def on_done(run: Run, event: TurnDone) -> None:
    answered = _find(run, event)
    if answered is None:
        return
    trajectory, turn, engine = answered
    if len(engine.active) > engine.max_slots:
        engine.oversubscribed_at = run.now
    attempts.vacate(run, engine, trajectory, turn)
    if not event.replayed:
        time = costs.learn_turn(run, engine, turn, event)
        affinity.learn_turn(run, trajectory, engine, turn, event, time)
    run.dirty_queues += [None, engine.id]
    engine.consecutive_timeouts = 0
    if run.state.serving:
        engine.restarts = 0  # it loads no weights, which resets this in training
    trajectory.turn, trajectory.engine, trajectory.since = None, engine.id, run.now
    if not event.replayed:
        _count(run, trajectory, turn, event)
    turn_s = None if event.replayed else run.now - turn.since - event.queue_s
    lengths.learn_turn(run, trajectory, event.output_tokens, turn_s)
    if trajectory.predicted_at_turn >= 0:
        # while the environment works the trajectory may move
        dispatching.enqueue_all(run, migration.consider(run, trajectory))


def _count(run: Run, trajectory: Trajectory, turn: Turn, event: TurnDone) -> None:
    counters = run.state.counters
    counters.turns += 1
    if event.cut:
        name = run.state.groups[trajectory.group_id].name
        counters.cut_turns[name] = counters.cut_turns.get(name, 0) + 1
    counters.output_tokens += event.output_tokens
    counters.cached_tokens += event.cached_tokens
    counters.context_tokens += turn.context_tokens
    counters.scheduling.queue_s += event.queue_s


def on_failed(run: Run, event: TurnFailed) -> None:
    answered = _find(run, event)
    if answered is not None:
        trajectory, _, engine = answered
        fail(run, trajectory, engine, event.error)


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
        sampling = _find(run, progress)
        if sampling is not None:
            sampling[1].output_tokens = progress.output_tokens


def on_prediction(run: Run, event: PredictionReady) -> None:
    """Act on the trajectory's new estimate wherever its turn is."""
    trajectory = attempts.find(run, event.trajectory_id, event.attempt)
    if trajectory is None or not lengths.learn_prediction(run, trajectory, event):
        return
    run.dirty_queues.append(
        trajectory.assigned_engine
    )  # its order in the KV of that engine may have changed
    turn = trajectory.turn
    if turn is None:
        dispatching.enqueue_all(run, migration.consider(run, trajectory))
        return
    match turn.place:
        case Queued() as place:
            if trajectory.turns_requested <= 1 and run.pacing.interchangeable:
                trajectory.assigned_engine = None  # no engine has KV of it yet
                run.reindex(trajectory)
            dispatching.requeue(run, QueuedTurn(trajectory, turn, place))
        case OnEngine():
            turn_priority.rerank(run, trajectory)
        case Held():
            pass


def on_migration_done(run: Run, event: MigrationDone) -> None:
    """Queue the turns that have waited for the transfer."""
    dispatching.enqueue_all(run, migration.complete(run, event))


def give_up_late_migrations(run: Run) -> None:
    """Give up transfers that have taken too long, and queue the turns that have waited
    for them.
    """
    dispatching.enqueue_all(run, migration.give_up_late(run))


def _find(
    run: Run, event: TurnDone | TurnFailed | TurnProgress
) -> tuple[Trajectory, Turn, Engine] | None:
    """The turn that the event is about, and its engine; None if the event is late."""
    trajectory = attempts.find(run, event.trajectory_id, event.attempt)
    turn = trajectory.turn if trajectory is not None else None
    if (
        trajectory is None
        or turn is None
        or not isinstance(turn.place, OnEngine)
        or (turn.number, turn.dispatch) != (event.turn, event.dispatch)
    ):
        return None
    return trajectory, turn, run.state.engines[turn.place.engine]


def fail(run: Run, trajectory: Trajectory, engine: Engine, error: str) -> None:
    """Handle a turn that its engine did not answer: queue it again, preferably for
    another engine, or give up the attempt.
    """
    turn = trajectory.open_turn
    attempts.vacate(run, engine, trajectory, turn)
    run.warn(
        engine.id, f"turn {turn.number} of {trajectory.id} failed: {error}", count="turn_failed"
    )
    turn.avoid.append(engine.id)
    turn.since, turn.output_tokens = run.now, 0
    turn.dispatch += 1
    turn.failures += 1
    if turn.failures > run.config.rollout.retries:
        trajectory.turn = None
        trajectories.cancel(run, trajectory, StopReason.ENGINE_FAILURE)
    else:
        dispatching.enqueue(run, trajectory, turn)


def fail_all(run: Run, engine: Engine, error: str, *, abort: bool) -> None:
    """Fail every turn on this engine.

    With `abort` the world discards their answers.
    """
    for trajectory_id in list(engine.active):
        trajectory = run.state.trajectories[trajectory_id]
        if abort:
            attempts.abort(run, trajectory, trajectory.open_turn, engine.id)
        fail(run, trajectory, engine, error)


def time_out(run: Run, engine: Engine, trajectory: Trajectory) -> None:
    """Fail a turn that is late."""
    attempts.abort(run, trajectory, trajectory.open_turn, engine.id)
    fail(run, trajectory, engine, f"no answer within {run.config.watchdog.turn_s:g} s")


def recall(run: Run, trajectory: Trajectory, turn: Turn) -> None:
    """Take the open turn from its engine or queue, and hold it, so that it can run
    elsewhere; that is no failure.
    """
    attempts.take_back(run, trajectory, turn)
    if isinstance(turn.place, OnEngine):
        turn.since = run.now
        turn.dispatch += 1
    turn.place = Held()


def recall_all(run: Run, engine: Engine) -> None:
    """Take every turn from this engine, to run elsewhere."""
    for trajectory_id in list(engine.active):
        trajectory = run.state.trajectories[trajectory_id]
        turn = trajectory.open_turn
        recall(run, trajectory, turn)
        dispatching.enqueue(run, trajectory, turn)


def is_late(run: Run, engine: Engine, turn: Turn) -> bool:
    """True if the turn has no answer within the limit.

    On an oversubscribed engine a turn may wait while others are answered.
    """
    assert engine.status is EngineStatus.SERVING, "only a serving engine owes answers"
    return (
        run.now - max(turn.since, engine.since, engine.oversubscribed_at)
        > run.config.watchdog.turn_s
    )
