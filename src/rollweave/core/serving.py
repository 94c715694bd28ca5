"""A service: rollouts that clients submit, each delivered when it is over (ProRL §3).

It uses the pools, turns, engines and retries of training; there is no trainer, no step
and no buffer. Invariants: a submitted rollout is delivered once it is scored, has
failed for good or is cancelled, and is kept until the client acknowledges it: a
restarted world delivers it again. Engines come with their weights. An orderly end waits
for what an engine works on, never for an engine: rollouts that need one are kept for
the next world.
"""

from rollweave.core import attempts, trajectories
from rollweave.core.run import Run
from rollweave.core.state import Group, GroupStatus, Phase, Service, Stage, Trajectory
from rollweave.schema.base import TrajectoryId
from rollweave.schema.commands import Deliver, Evict, Finish, FitPredictor
from rollweave.schema.events import RolloutAcknowledged, RolloutCancelled, RolloutsSubmitted
from rollweave.schema.work import Purpose, StopReason

FIT_ROLLOUTS = 64
"""Number of rollouts between two fits of the predictor of lengths, which a training run
fits after each step: about a batch.
"""


def begin(run: Run) -> None:
    """Begin to serve, in the first world or a restarted one."""
    state = run.state
    state.phase, state.error, state.service = Phase.SERVING, "", Service()
    for trajectory in state.trajectories.values():
        if trajectory.stage in (Stage.SCORED, Stage.ENDED):
            _deliver(run, trajectory)


# Rollouts.


def on_submitted(run: Run, event: RolloutsSubmitted) -> None:
    state = run.state
    if event.group_id in state.groups or state.phase is not Phase.SERVING:
        return
    group = Group(
        id=event.group_id,
        name=event.name,
        index=0,
        purpose=Purpose.SERVE,
        since=run.now,
        status=GroupStatus.ACTIVE,
        task=event.task,
        decoding=event.decoding,
    )
    state.groups[group.id] = group
    for member in range(event.members):
        trajectory = Trajectory(
            id=TrajectoryId(f"{group.id}.{member}"), group_id=group.id, member=member, since=run.now
        )
        group.members.append(trajectory.id)
        state.counters.submitted += 1
        attempts.add(run, trajectory)
        if state.service.closed:
            trajectories.cancel(run, trajectory, StopReason.CANCELLED)


def on_cancelled(run: Run, event: RolloutCancelled) -> None:
    trajectory = run.state.trajectories.get(event.trajectory_id)
    if trajectory is not None and trajectory.stage is not Stage.SCORED:
        trajectories.cancel(run, trajectory, StopReason.CANCELLED)


def on_acknowledged(run: Run, event: RolloutAcknowledged) -> None:
    """Forget the rollout, and its group with the last of its members."""
    state = run.state
    trajectory = state.trajectories.get(event.trajectory_id)
    if trajectory is None or trajectory.stage not in (Stage.SCORED, Stage.ENDED):
        return
    group = state.groups[trajectory.group_id]
    group.members.remove(trajectory.id)
    run.forget_trajectory(trajectory.id)
    run.emit(Evict(trajectory_ids=(trajectory.id,), reason="taken"))
    if not group.members:
        del state.groups[group.id]


def wants_members(run: Run, group: Group) -> bool:
    """True while another attempt at a rollout could still be of use."""
    return run.state.phase is Phase.SERVING


def member_scored(run: Run, group: Group, trajectory: Trajectory) -> None:
    """The rollout has its reward."""
    assert trajectory.stop is not None, "a rollout is scored after it ended"
    member_ended(run, group, trajectory, trajectory.stop)


def member_ended(run: Run, group: Group, trajectory: Trajectory, reason: StopReason) -> None:
    """The rollout is over: scored, failed or cancelled for good."""
    delivered = run.state.counters.delivered
    delivered[reason] = delivered.get(reason, 0) + 1
    trajectory.stop = reason
    _deliver(run, trajectory)
    fits, rest = divmod(sum(delivered.values()), FIT_ROLLOUTS)
    if run.scheduling.predicts and not rest:
        run.emit(FitPredictor(step=fits))


def _deliver(run: Run, trajectory: Trajectory) -> None:
    assert trajectory.stop is not None, "what is over ended for a reason"
    run.emit(
        Deliver(
            trajectory_id=trajectory.id,
            attempt=trajectory.attempt,
            stop_reason=trajectory.stop,
            started=trajectory.started,
        )
    )


# The end.


def stop(run: Run, *, drain: bool) -> None:
    """Accept no more rollouts; with `drain` the present ones are finished first,
    otherwise they are cancelled.
    """
    run.state.service.closed = True
    for trajectory in [] if drain else list(run.state.trajectories.values()):
        if trajectory.stage not in (Stage.SCORED, Stage.ENDED):
            trajectories.cancel(run, trajectory, StopReason.CANCELLED)


def advance(run: Run) -> None:
    """End the service when all rollouts are delivered and acknowledged, or those left
    have no engine.
    """
    state = run.state
    if state.phase is not Phase.SERVING:
        return
    if run.fleet.loads:
        state.service.no_engine_since = None
    elif state.service.no_engine_since is None:
        state.service.no_engine_since = run.now
    if not state.service.closed or (state.trajectories and not _is_stranded(run)):
        return
    if state.trajectories:
        run.warn(
            "service",
            f"no engine serves; {len(state.trajectories)} rollouts are kept for the next start",
            count="kept",
        )
    state.phase = Phase.FINISHED
    run.emit(Finish(error=""))


def _is_stranded(run: Run) -> bool:
    """True if all that is left needs an engine, and there is none, or none has become
    ready in the time that its start may take.
    """
    state, pools = run.state, run.state.pools
    stages = (pools.queued, pools.init, pools.run_queued, pools.run)
    if sum(map(len, stages)) < len(state.trajectories):
        return False
    since = state.service.no_engine_since
    return not state.engines or (
        since is not None and run.now - since > run.config.watchdog.start_s
    )
