"""The life of a trajectory: queued → INIT → RUN → EVAL (its reward) → scored; or
cancelled, retried, ended. Each of the three stages has a pool of places (ProRL §3.3.1,
`core/policy/places`), and a queue of attempts that wait for one.

Invariant: an attempt holds a place of its stage from the command that starts the stage
until the world reports that it is over. A cancelled attempt keeps its place while it
closes, so what the world holds never exceeds the places.
"""

from rollweave.core import attempts, continuation
from rollweave.core.attempts import find, move, release_turn
from rollweave.core.policy.modes import staleness
from rollweave.core.policy.places import is_backlogged, room_in_eval, room_in_init, room_in_run
from rollweave.core.policy.retry import DETERMINISTIC, MAX_WORLDS_LOST, is_broken
from rollweave.core.run import Run
from rollweave.core.state import ALIVE, Failure, Stage, Trajectory
from rollweave.schema.base import TrajectoryId
from rollweave.schema.commands import CancelTrajectory, Evict, StartEval, StartInit, StartRun
from rollweave.schema.events import (
    AttemptDelayed,
    EnvReady,
    RewardFailed,
    RewardReady,
    TrajectoryEnded,
)
from rollweave.schema.text import failure_kind
from rollweave.schema.work import TRAINABLE, Purpose, StopReason

ROLLED_OUT = (Stage.INIT, Stage.RUN_QUEUED, Stage.RUN, Stage.CLOSING)
"""Stages that the end of the environment ends."""

# Events.


def on_env_ready(run: Run, event: EnvReady) -> None:
    trajectory = find(run, event.trajectory_id, event.attempt)
    if trajectory is not None and trajectory.stage is Stage.INIT:
        trajectory.prompt_tokens = trajectory.context_tokens = event.prompt_tokens
        move(run, trajectory, Stage.RUN_QUEUED)
        _learn_passed(run, trajectory, Stage.INIT)
        start_runs(run)


def on_delayed(run: Run, event: AttemptDelayed) -> None:
    trajectory = find(run, event.trajectory_id, event.attempt)
    if trajectory is not None and trajectory.stage in (Stage.INIT, Stage.RUN, Stage.EVAL):
        trajectory.since = run.now


def on_ended(run: Run, event: TrajectoryEnded) -> None:
    trajectory = find(run, event.trajectory_id, event.attempt)
    if trajectory is None or trajectory.stage not in ROLLED_OUT:
        return
    release_turn(run, trajectory)
    trajectory.tokens = event.tokens
    if trajectory.closing is not None:
        end_attempt(run, trajectory, trajectory.closing)
    elif event.stop_reason in TRAINABLE:
        trajectory.stop = event.stop_reason
        # the environment gets no turn that was cut
        if event.turns > 1 or event.stop_reason is not StopReason.MAX_TOKENS:
            _learn_passed(run, trajectory, Stage.RUN)
        _count_inherent(run, trajectory)
        move(run, trajectory, Stage.EVAL_QUEUED)
    else:
        attempts.note_failure(run, event.stop_reason, event.error)
        _learn_failure(run, trajectory, event.stop_reason)
        if event.stop_reason is StopReason.WORKER_LOST:
            continuation.keep_if_recorded(run, trajectory)
        end_attempt(run, trajectory, event.stop_reason, failure=event.error)


def on_reward_ready(run: Run, event: RewardReady) -> None:
    trajectory = find(run, event.trajectory_id, event.attempt)
    if trajectory is None or trajectory.stage not in (Stage.EVAL, Stage.CLOSING):
        known = run.state.trajectories.get(event.trajectory_id)
        # or the store would keep it forever
        if known is None or known.stage is Stage.ENDED:
            run.emit(Evict(trajectory_ids=(event.trajectory_id,), reason="late"))
        return
    if trajectory.closing is not None:
        run.emit(Evict(trajectory_ids=(trajectory.id,), reason=trajectory.closing))
        end_attempt(run, trajectory, trajectory.closing)
        return
    trajectory.reward, trajectory.success = event.reward, event.success
    _learn_passed(run, trajectory, Stage.EVAL)
    if event.success is not None:
        run.state.evaluations.defines_success[run.state.groups[trajectory.group_id].name] = None
    assert trajectory.stop is not None, "a trajectory is scored after it was rolled out"
    attempts.score(run, trajectory, trajectory.stop)


def on_reward_failed(run: Run, event: RewardFailed) -> None:
    trajectory = find(run, event.trajectory_id, event.attempt)
    if trajectory is not None and trajectory.stage in (Stage.EVAL, Stage.CLOSING):
        attempts.note_failure(run, event.stop_reason, event.error)
        _learn_failure(run, trajectory, event.stop_reason)
        end_attempt(run, trajectory, trajectory.closing or event.stop_reason, failure=event.error)


_PASSED = {
    Stage.INIT: "started its environment",
    Stage.RUN: "come to its end",
    Stage.EVAL: "been scored",
}


def _learn_passed(run: Run, trajectory: Trajectory, stage: Stage) -> None:
    """Record that the code of the trajectory's task domain works in this stage."""
    stats = run.domain_of(trajectory)
    if stage not in stats.passed:
        stats.passed[stage] = None
        stats.failed = {id: one for id, one in stats.failed.items() if one.stage is not stage}


def _learn_failure(run: Run, trajectory: Trajectory, reason: StopReason) -> None:
    """End the run if the code of the trajectory's task domain has never worked in the
    stage of the attempt, and fails in the same way at one task after another.
    """
    state = run.state
    group = state.groups[trajectory.group_id]
    stats = run.domain_of(trajectory)
    known = trajectory.stage in stats.passed or trajectory.stage not in _PASSED
    if known or reason not in DETERMINISTIC or group.purpose is Purpose.SERVE:
        return
    assert group.task is not None, "its attempt was begun"
    stage, kind = trajectory.stage, failure_kind(state.last_failure)
    stats.failed[trajectory.id] = Failure(stage=stage, kind=kind, task=group.task.content)
    alike = {
        id: one.task for id, one in stats.failed.items() if one.kind == kind and one.stage is stage
    }
    pools = state.pools
    under_way = sum(
        id not in alike and state.groups[state.trajectories[id].group_id].name == group.name
        for id in (*pools.init, *pools.run_queued, *pools.run, *pools.eval_queued, *pools.eval)
    )
    tasks = len(set(alike.values()))
    if is_broken(tasks=tasks, failed=len(alike), under_way=under_way):
        state.error = state.error or (
            f"no attempt at {group.name} has {_PASSED[trajectory.stage]}, and those at {tasks} "
            f"tasks failed in the same way: {state.last_failure}"
        )


# Cancelling, ending and retrying.


def cancel(run: Run, trajectory: Trajectory, reason: StopReason, *, failure: str = "") -> None:
    """Stop the current attempt at any stage. `failure` describes a failure for which it
    is given up, for its record.

    What the world holds is closed first; an attempt for which it holds nothing ends at
    once.
    """
    if failure:
        attempts.note_failure(run, reason, failure)
    if trajectory.stage in (Stage.CLOSING, Stage.OVER, Stage.ENDED):
        # A trajectory that is already closing for a retryable reason must not come
        # back.
        if trajectory.closing is not None:
            trajectory.closing = reason
        return
    if trajectory.stage in ALIVE:
        release_turn(run, trajectory)
        trajectory.closing = reason
        move(run, trajectory, Stage.CLOSING)
        run.emit(
            CancelTrajectory(
                trajectory_id=trajectory.id,
                attempt=trajectory.attempt,
                reason=reason,
                error=failure,
            )
        )
    else:
        end_attempt(run, trajectory, reason)


def end_attempt(run: Run, trajectory: Trajectory, reason: StopReason, *, failure: str = "") -> None:
    """End the attempt for `reason`: the world holds nothing for it. `core/lifecycle`
    settles whether another one follows.

    `failure` is the world's description of the failure, if there is one; it names the
    stage.
    """
    repeated = bool(failure) and failure == trajectory.failure
    trajectory.failure = failure
    attempts.end(run, trajectory, reason, repeated=repeated)


def suspect(run: Run, trajectory: Trajectory) -> None:
    """Count a lost controller or worker against an attempt that was under way: it may
    be the cause, since its environment ran there.
    """
    trajectory.past.worlds_lost += 1
    if trajectory.past.worlds_lost == MAX_WORLDS_LOST:
        text = (
            f"is given up: {MAX_WORLDS_LOST} controllers or workers were lost while it was "
            "under way, perhaps because of its environment"
        )
        run.warn(trajectory.id, text, count="suspects")


def retry(run: Run, trajectory: Trajectory, reason: StopReason) -> None:
    """Queue another attempt after one that ended for `reason`."""
    retried = run.state.counters.retried
    retried[reason] = retried.get(reason, 0) + 1
    trajectory.attempt += 1
    trajectory.turns_requested = 0
    trajectory.stop = None
    trajectory.engine, trajectory.pool = None, ""
    trajectory.output_tokens = trajectory.context_tokens = 0
    attempts.move(run, trajectory, Stage.QUEUED)


def finish(run: Run, trajectory: Trajectory) -> None:
    """End the trajectory: no other attempt follows."""
    continuation.forget(run, trajectory)
    attempts.move(run, trajectory, Stage.ENDED)


# Starting.


def start_inits(run: Run) -> None:
    """Start as many attempts as may enter INIT. Episodes of evaluations go first."""
    state, pools = run.state, run.state.pools
    if not pools.queued or run.fleet.oldest is None:
        return
    for _ in range(room_in_init(run.places, attempts.taken(run))):
        first = _first_to_start(run)
        if first is None:
            return
        trajectory = state.trajectories[first]
        group = state.groups[trajectory.group_id]
        assert group.task is not None, "members are made when the task is known"
        worker = run.choose_worker(run)
        if worker is None:
            return
        weights = run.pacing.launch(run, trajectory, group.purpose)
        if weights is None:
            return
        trajectory.initiated, continued = continuation.take(run, trajectory, *weights)
        trajectory.launched_at, trajectory.past.life = run.now, state.life
        state.counters.attempts += 1
        if trajectory.started:
            state.counters.relaunched += 1
        else:
            trajectory.started = True
            if group.purpose is Purpose.TRAIN:
                state.counters.started += 1
            elif group.purpose is Purpose.EVAL:
                state.counters.eval_started += 1
        trajectory.worker = worker
        move(run, trajectory, Stage.INIT)
        run.emit(
            StartInit(
                trajectory_id=trajectory.id,
                attempt=trajectory.attempt,
                group_id=group.id,
                member=trajectory.member,
                task=group.task,
                purpose=group.purpose,
                initiated_version=trajectory.initiated,
                decoding=group.decoding,
                worker=worker,
                continues=continued,
            )
        )


def start_runs(run: Run) -> None:
    """Let as many attempts whose environment is ready enter RUN as it has places for.
    Episodes of evaluations go first.
    """
    waiting = run.state.pools.run_queued
    room = room_in_run(run.places, attempts.taken(run)) if waiting else 0
    if not room:
        return
    for trajectory_id in sorted(waiting, key=lambda one: not _is_episode(run, one))[:room]:
        trajectory = run.state.trajectories[trajectory_id]
        move(run, trajectory, Stage.RUN)
        run.emit(StartRun(trajectory_id=trajectory.id, attempt=trajectory.attempt))


def may_start(run: Run) -> bool:
    """True if a trajectory in the queue could start, given a place."""
    return run.fleet.oldest is not None and _first_to_start(run) is not None


def _count_inherent(run: Run, trajectory: Trajectory) -> None:
    if run.state.groups[trajectory.group_id].purpose is Purpose.TRAIN:
        age = staleness(trajectory.origin, run.state.publication.version)
        counted = run.state.counters.inherent
        counted[age] = counted.get(age, 0) + 1


def _first_to_start(run: Run) -> TrajectoryId | None:
    """The next trajectory in the queue: an evaluation's, or another one if a later step
    could train on it. Episodes of an evaluation that has not started, or is suspended,
    wait for engines with its weights.
    """
    state = run.state
    evaluating = state.evaluations.current is not None and state.evaluations.current.started
    if evaluating and not run.pacing.takes_episodes(run):
        evaluating = False  # no engine takes its episodes now; others need not wait for that
    for trajectory_id in state.pools.queued if evaluating else ():
        if _is_episode(run, trajectory_id):
            return trajectory_id
    if not state.serving and not run.admits_training():
        return None
    return next((one for one in state.pools.queued if not _is_episode(run, one)), None)


def _is_episode(run: Run, trajectory_id: TrajectoryId) -> bool:
    """True if the trajectory is an episode of an evaluation."""
    group_id = run.state.trajectories[trajectory_id].group_id
    return run.state.groups[group_id].purpose is Purpose.EVAL


def start_evals(run: Run) -> None:
    """Start as many rewards as EVAL has places for.

    Without `reward_overlap`, they wait until no environment is running, and none can
    start.
    """
    state, pools = run.state, run.state.pools
    if not pools.eval_queued:
        return
    taken = attempts.taken(run)
    if "reward_overlap" in run.config.ablation.without and (
        pools.init
        or pools.run_queued
        or pools.run
        or (not is_backlogged(run.places, taken) and _first_to_start(run) is not None)
    ):
        return
    for trajectory_id in list(pools.eval_queued)[: room_in_eval(run.places, taken)]:
        trajectory = state.trajectories[trajectory_id]
        move(run, trajectory, Stage.EVAL)
        run.emit(StartEval(trajectory_id=trajectory.id, attempt=trajectory.attempt))
