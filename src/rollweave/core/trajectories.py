"""One trajectory's life: queued → INIT → RUN → EVAL → scored, through three bounded
pools; or cancelled, retried, ended.

Invariant: an attempt holds a pool slot from the command that starts its stage until the
world has said that the stage is over. A cancelled attempt keeps its slot while it
closes, so what the world holds is never more than the pools allow.
"""

from rollweave.core import groups, lengths, migration, pace
from rollweave.core.policy.retry import try_again
from rollweave.core.policy.staleness import staleness
from rollweave.core.run import Run
from rollweave.core.state import ALIVE, Stage, Trajectory
from rollweave.schema.base import TrajectoryId
from rollweave.schema.commands import (
    AbortTurn,
    CancelTrajectory,
    Evict,
    StartEval,
    StartInit,
    StartRun,
)
from rollweave.schema.events import EnvReady, RewardFailed, RewardReady, TrajectoryEnded
from rollweave.schema.work import TRAINABLE, Purpose, StopReason


def find(run: Run, trajectory_id: TrajectoryId, attempt: int) -> Trajectory | None:
    """The trajectory, unless it is gone or already in another attempt: then the event
    is late and is ignored.
    """
    trajectory = run.state.trajectories.get(trajectory_id)
    return trajectory if trajectory is not None and trajectory.attempt == attempt else None


def move(run: Run, trajectory: Trajectory, stage: Stage) -> None:
    """Change stage and every index that depends on it."""
    state = run.state
    index_of = {
        Stage.QUEUED: state.init_queue,
        Stage.INIT: state.in_init,
        Stage.RUN: state.in_run,
        Stage.EVAL_QUEUED: state.eval_queue,
        Stage.EVAL: state.in_eval,
        Stage.CLOSING: state.closing,
    }
    before, after = index_of.get(trajectory.stage), index_of.get(stage)
    if before is not None:
        before.pop(trajectory.id, None)
    if after is not None:
        after[trajectory.id] = None
    trajectory.stage = stage
    trajectory.since = run.now
    run.order_changed(trajectory)


# What the world reports.


def on_env_ready(run: Run, event: EnvReady) -> None:
    trajectory = find(run, event.trajectory_id, event.attempt)
    if trajectory is not None and trajectory.stage is Stage.INIT:
        move(run, trajectory, Stage.RUN)
        run.emit(StartRun(trajectory_id=trajectory.id, attempt=trajectory.attempt))
        lengths.on_ready(run, trajectory, event.prompt_tokens)


def on_ended(run: Run, event: TrajectoryEnded) -> None:
    trajectory = find(run, event.trajectory_id, event.attempt)
    if trajectory is None or trajectory.stage not in (Stage.INIT, Stage.RUN, Stage.CLOSING):
        return
    release_turn(run, trajectory)
    trajectory.turns, trajectory.tokens = event.turns, event.tokens
    if trajectory.closing is not None:
        close(run, trajectory, trajectory.closing)
    elif event.stop_reason in TRAINABLE:
        trajectory.stop = event.stop_reason
        _count_inherent(run, trajectory)
        migration.forget(run, trajectory)
        lengths.over(run, trajectory, finished=True)
        move(run, trajectory, Stage.EVAL_QUEUED)
    else:
        run.state.last_failure = f"{event.stop_reason}: {event.error}"
        close(run, trajectory, event.stop_reason, failure=event.error)


def on_reward_ready(run: Run, event: RewardReady) -> None:
    trajectory = find(run, event.trajectory_id, event.attempt)
    if trajectory is None or trajectory.stage not in (Stage.EVAL, Stage.CLOSING):
        known = run.state.trajectories.get(event.trajectory_id)
        # or the store keeps what nobody will ask for
        if known is None or known.stage is Stage.ENDED:
            run.emit(Evict(trajectory_ids=(event.trajectory_id,), reason="late"))
        return
    if trajectory.closing is not None:
        run.emit(Evict(trajectory_ids=(trajectory.id,), reason=trajectory.closing))
        close(run, trajectory, trajectory.closing)
        return
    trajectory.reward, trajectory.success = event.reward, event.success
    if event.success is not None:
        run.state.defines_success[run.state.groups[trajectory.group_id].name] = None
    assert trajectory.stop is not None, "a trajectory is scored after it was rolled out"
    _count_stop(run, trajectory, trajectory.stop)
    move(run, trajectory, Stage.SCORED)
    groups.member_scored(run, trajectory)


def on_reward_failed(run: Run, event: RewardFailed) -> None:
    trajectory = find(run, event.trajectory_id, event.attempt)
    if trajectory is not None and trajectory.stage in (Stage.EVAL, Stage.CLOSING):
        run.state.last_failure = f"{event.stop_reason}: {event.error}"
        close(run, trajectory, trajectory.closing or event.stop_reason, failure=event.error)


# What the core does to a trajectory.


def cancel(run: Run, trajectory: Trajectory, reason: StopReason) -> None:
    """Stop the current attempt wherever it is.

    What the world holds is closed first; the rest ends at once.
    """
    if trajectory.stage in (Stage.CLOSING, Stage.ENDED):
        # A doomed trajectory that is already closing for a retryable reason must not
        # come back.
        if trajectory.closing is not None:
            trajectory.closing = reason
        return
    if trajectory.stage in ALIVE:
        release_turn(run, trajectory)
        trajectory.closing = reason
        move(run, trajectory, Stage.CLOSING)
        run.emit(
            CancelTrajectory(trajectory_id=trajectory.id, attempt=trajectory.attempt, reason=reason)
        )
    else:
        close(run, trajectory, reason)


def close(run: Run, trajectory: Trajectory, reason: StopReason, *, failure: str = "") -> None:
    """Retry or end the trajectory: its attempt is over for `reason`, and the world
    holds nothing for it.

    `failure` is the world's description of the failure, if there is one; it names the
    stage.
    """
    repeated = bool(failure) and failure == trajectory.failure
    trajectory.failure = failure
    trajectory.closing = None
    trajectory.turn = None
    migration.forget(run, trajectory)
    lengths.over(run, trajectory, finished=False)
    _count_stop(run, trajectory, reason)
    group = run.state.groups[trajectory.group_id]
    retries = run.config.rollout.retries
    again = try_again(
        reason,
        attempt=trajectory.attempt,
        retries=retries,
        worlds=trajectory.worlds,
        repeated=repeated,
    )
    if groups.wants_members(run, group) and again:
        retried = run.state.counters.retried
        retried[reason] = retried.get(reason, 0) + 1
        trajectory.attempt += 1
        trajectory.asked = 0
        trajectory.stop = None
        trajectory.engine = trajectory.home = None
        trajectory.weights_id = -1
        lengths.begin(run, trajectory)
        move(run, trajectory, Stage.QUEUED)
        return
    move(run, trajectory, Stage.ENDED)
    groups.member_ended(run, trajectory, reason)


def release_turn(run: Run, trajectory: Trajectory) -> None:
    """Take the open turn, if any, from the queue or from its engine."""
    turn = trajectory.turn
    run.state.turn_queue.pop(trajectory.id, None)
    engine = (
        run.state.engines.get(turn.engine) if turn is not None and turn.engine is not None else None
    )
    if turn is not None and engine is not None and run.fleet.vacate(engine, trajectory.id, turn):
        run.emit(
            AbortTurn(
                trajectory_id=trajectory.id,
                attempt=trajectory.attempt,
                turn=turn.number,
                engine_id=engine.id,
                dispatch=turn.dispatch,
            )
        )
    trajectory.turn = None


def _count_stop(run: Run, trajectory: Trajectory, reason: StopReason) -> None:
    """Count the end of the attempt, once, if it was launched."""
    if trajectory.launched:
        trajectory.launched = False
        reasons = run.state.counters.stop_reasons
        reasons[reason] = reasons.get(reason, 0) + 1


# What is started next.


def start_inits(run: Run) -> None:
    """Fill the INIT pool, as far as the number of living environments allows.

    Evaluations go first.
    """
    state, rollout = run.state, run.config.rollout
    while (
        run.serving_version() is not None
        and state.init_queue
        and len(state.in_init) < rollout.init_slots
        and len(state.in_init) + len(state.in_run) + len(state.closing) < rollout.max_running
    ):
        first = _first_to_start(run)
        if first is None:
            return
        trajectory = state.trajectories[first]
        group = state.groups[trajectory.group_id]
        assert group.task is not None, "members are made when the task is known"
        version = _launch_version(run, trajectory, group.purpose)
        if version is None:
            return
        trajectory.initiated, trajectory.launched_at = version, run.now
        state.counters.attempts += 1
        trajectory.launched = True
        if trajectory.started:
            state.counters.relaunched += 1
        else:
            trajectory.started = True
            if group.purpose is Purpose.TRAIN:
                state.counters.started += 1
            elif group.purpose is Purpose.EVAL:
                state.counters.eval_started += 1
        move(run, trajectory, Stage.INIT)
        run.emit(
            StartInit(
                trajectory_id=trajectory.id,
                attempt=trajectory.attempt,
                group_id=group.id,
                member=trajectory.member,
                task=group.task,
                purpose=group.purpose,
                initiated_version=version,
                decoding=group.decoding,
            )
        )


def _launch_version(run: Run, trajectory: Trajectory, purpose: Purpose) -> int | None:
    """The version that it begins with, where an engine begins it now."""
    if not run.alone:
        return run.serving_version()
    engine = pace.engine_for(run, purpose)
    if engine is None:
        return None
    pace.begin(run, trajectory, engine)
    return engine.version


def _count_inherent(run: Run, trajectory: Trajectory) -> None:
    if run.state.groups[trajectory.group_id].purpose is Purpose.TRAIN:
        age = staleness(trajectory.initiated, run.state.published_version)
        counted = run.state.counters.inherent
        counted[age] = counted.get(age, 0) + 1


def _first_to_start(run: Run) -> TrajectoryId | None:
    """The next one in the queue: an evaluation's, or, if what is launched now could
    still be trained on, any.
    """
    state = run.state
    evaluating = state.evaluation is not None and state.evaluation.begun
    if evaluating and run.alone and pace.engine_for(run, Purpose.EVAL) is None:
        evaluating = False  # nobody can take its episodes now; others need not wait for that
    for trajectory_id in state.init_queue if evaluating else ():
        if state.groups[state.trajectories[trajectory_id].group_id].purpose is Purpose.EVAL:
            return trajectory_id
    if not state.serving and not run.admits_training():
        return None
    if not run.alone:
        return next(iter(state.init_queue), None)
    queued = (state.trajectories[trajectory_id] for trajectory_id in state.init_queue)
    return next(
        (one.id for one in queued if state.groups[one.group_id].purpose is not Purpose.EVAL), None
    )


def start_evals(run: Run) -> None:
    """Fill the EVAL pool.

    The baseline `after_rollout` waits until no environment is running, and none can
    start.
    """
    state, rollout = run.state, run.config.rollout
    if rollout.reward == "after_rollout" and (
        state.in_init or state.in_run or _first_to_start(run) is not None
    ):
        return
    while state.eval_queue and len(state.in_eval) < rollout.eval_slots:
        trajectory = state.trajectories[next(iter(state.eval_queue))]
        move(run, trajectory, Stage.EVAL)
        run.emit(StartEval(trajectory_id=trajectory.id, attempt=trajectory.attempt))
