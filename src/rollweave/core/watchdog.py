"""The watchdog: every wait has an owner and a limit. A wait that takes too long is
named, acted on and counted.

The world enforces the limits of single environment calls itself; these limits are the
backstop behind it, so they are wider.
"""

import itertools

from rollweave.core import (
    engines,
    evaluation,
    groups,
    training,
    trajectories,
    turns,
    weight_updates,
)
from rollweave.core.policy.retry import TIMEOUTS_BEFORE_RESTART
from rollweave.core.run import Run, Step
from rollweave.core.state import (
    Engine,
    EngineStatus,
    GroupStatus,
    Phase,
    Stage,
    TrainerStatus,
    Trajectory,
)
from rollweave.schema.base import TrajectoryId
from rollweave.schema.events import TimerFired
from rollweave.schema.work import Purpose, StopReason

GRACE_S = 10.0
"""Seconds beyond a limit that the world enforces itself; also the maximum seconds for a
cancelled attempt to close.
"""

DRAW_S = 120.0
"""Maximum seconds for a task source to draw one task."""


def on_timer(run: Run, _event: TimerFired) -> None:
    """Check the deadlines."""
    check_deadlines(run)


def check_deadlines(run: Run) -> None:
    """Check every deadline, and set the timer again."""
    if run.state.phase is Phase.FINISHED:
        return
    if run.state.turns.timer_at <= run.now:
        run.state.turns.timer_at = 0.0  # all that is due is done now
    for check in run.deadlines:
        check(run)


def _check_engines(run: Run) -> None:
    for engine in list(run.state.engines.values()):
        if engine.id in run.state.engines:  # else it was removed with its host
            _check_engine(run, engine)


def _check_fleet(run: Run) -> None:
    """End a training run whose engines wait too long for a host that may return."""
    state, limit = run.state, run.config.watchdog.train_s
    since, run.state.hosts.engineless_since = state.hosts.engineless_since, None
    if state.serving or any(engine.samples for engine in state.engines.values()):
        return
    state.hosts.engineless_since = run.now if since is None else since
    if since is not None and run.now - since > limit:
        state.error = state.error or (
            f"no engine is left that samples, and no host with a place for one has joined within "
            f"{limit:g} s"
        )


def _check_engine(run: Run, engine: Engine) -> None:
    limits = run.config.watchdog
    waited = run.now - engine.since
    match engine.status:
        case EngineStatus.STARTING if waited > limits.start_s and not training.makes_model(run):
            engines.restart(run, engine, f"not ready within {limits.start_s:g} s")
        case EngineStatus.SUSPENDING | EngineStatus.LOADING if waited > limits.weights_s:
            engines.restart(run, engine, f"stuck {engine.status} for {waited:.0f} s")
        case EngineStatus.SERVING:
            if engine.staging.id >= 0 and run.now - engine.staging.since > limits.weights_s:
                weight_updates.give_up_staging(run, engine, f"not within {limits.weights_s:g} s")
            _check_turns(run, engine)
        case _:
            pass


def _check_turns(run: Run, engine: Engine) -> None:
    limit = run.config.watchdog.turn_s
    for trajectory_id in list(engine.active):
        trajectory = run.state.trajectories[trajectory_id]
        if run.now - trajectory.open_turn.since <= limit:
            continue  # a fleet has many turns, and few of them are old
        waits = trajectory.open_turn.prefill is not None and engine.samples  # for its prompt
        if waits or not turns.is_late(run, engine, trajectory.open_turn):
            continue
        engine.failures.consecutive_timeouts += 1
        engine.failures.unanswered[trajectory_id] = trajectory.open_turn.number
        turns.time_out(run, engine, trajectory)
        if engine.failures.consecutive_timeouts >= TIMEOUTS_BEFORE_RESTART:
            engines.restart(
                run,
                engine,
                f"{engine.failures.consecutive_timeouts} turns in a row without an answer",
            )
            return


def _waiting(run: Run) -> list[TrajectoryId]:
    """Return the attempts that have waited for their environment, reward or end for
    longer than the shortest possible limit. Few of a large run have.
    """
    state = run.state
    pools = (state.pools.init, state.pools.run, state.pools.eval, state.pools.closing)
    return [
        trajectory.id
        for trajectory in map(state.trajectories.get, itertools.chain(*pools))
        if trajectory is not None
        and run.now - trajectory.since > GRACE_S
        and (trajectory.turn is None or trajectory.stage is not Stage.RUN)
    ]


def _check_trajectory(run: Run, trajectory: Trajectory) -> None:
    task = run.state.groups[trajectory.group_id].task
    assert task is not None, "a launched trajectory has a task"
    waited = run.now - trajectory.since
    limit = task.limits.step_s + GRACE_S
    match trajectory.stage:
        case Stage.INIT if waited > limit:
            _give_up(
                run, trajectory, StopReason.ENV_HANG, f"environment not ready for {waited:.0f} s"
            )
        case Stage.RUN if trajectory.turn is None and waited > limit:
            _give_up(
                run,
                trajectory,
                StopReason.ENV_HANG,
                f"environment has not answered for {waited:.0f} s",
            )
        case Stage.EVAL if waited > limit:
            _give_up(
                run, trajectory, StopReason.REWARD_HANG, f"reward has not come for {waited:.0f} s"
            )
        case Stage.CLOSING if waited > GRACE_S:
            run.warn(
                trajectory.id,
                f"did not stop within {GRACE_S:g} s; its slot is taken back",
                count="stuck_closing",
            )
            reason = trajectory.closing
            assert reason is not None, "a closing attempt knows why"
            trajectories.end_attempt(run, trajectory, reason)
        case _:
            pass


def _check_trajectories(run: Run) -> None:
    for trajectory_id in _waiting(run):
        trajectory = run.state.trajectories.get(trajectory_id)
        if trajectory is not None:
            _check_trajectory(run, trajectory)


def _give_up(run: Run, trajectory: Trajectory, reason: StopReason, message: str) -> None:
    run.warn(trajectory.id, message, count=reason)
    trajectories.cancel(run, trajectory, reason, failure=message)


def _check_draws(run: Run) -> None:
    state = run.state
    if state.serving:
        return  # its groups come with their tasks, and there may be very many
    for group in [group for group in state.groups.values() if group.status is GroupStatus.DRAWING]:
        if run.now - group.since > DRAW_S:
            run.warn(
                group.name,
                f"task {group.index} was not drawn within {DRAW_S:g} s; given up",
                count="draw_hang",
            )
            if group.purpose is Purpose.EVAL:
                evaluation.abandon_episode(run, group, "its task was not drawn")
            else:
                groups.drop(run, group, "draw_hang")


def _check_trainer(run: Run) -> None:
    trainer, limits = run.state.trainer, run.config.watchdog
    waited = run.now - trainer.since
    if run.state.serving:
        return
    if trainer.unplaced:
        if waited > limits.train_s:
            training.give_up_place(run, f"and none has joined within {limits.train_s:g} s")
    elif trainer.status is TrainerStatus.STARTING:
        if waited > limits.start_s:
            training.restart(run, f"not ready within {limits.start_s:g} s")
    elif trainer.saving is not None:
        waited = run.now - trainer.save_requested_at
        if waited > limits.train_s:
            training.restart(run, f"stuck writing checkpoint {trainer.saving} for {waited:.0f} s")
    elif trainer.status not in (TrainerStatus.IDLE, TrainerStatus.SAVING):  # it waits for engines
        # an update may have waited until the checkpoint before it was written
        waited = run.now - max(trainer.since, trainer.save_requested_at + trainer.last_save_s)
        if waited > limits.train_s:
            training.restart(run, f"stuck {trainer.status} for {waited:.0f} s")


DEADLINES: tuple[tuple[str, Step | None], ...] = (
    ("engine deadlines", _check_engines),
    ("rests", turns.end_rests),
    ("fleet deadlines", _check_fleet),
    ("attempt deadlines", _check_trajectories),
    ("draw deadlines", _check_draws),
    ("trainer deadlines", _check_trainer),
    ("moves of trajectories", None),
    ("ranks of turns", None),
    ("timer", turns.set_timer),
)
"""The deadlines that the timer checks, each with a name, in this order. Mechanisms
check theirs before some of them.
"""
