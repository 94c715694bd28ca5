"""Attempts that continue after the loss of the controller: which of them, and from
which tokens (docs/decisions/0007).

Invariant: a trajectory has `kept` only between the loss of the controller and the
launch of its next attempt.
"""

from rollweave.core.policy.continuation import may_continue, surviving_version
from rollweave.core.run import Run
from rollweave.core.state import ALIVE, Kept, Stage, State, Trajectory
from rollweave.schema.base import TrajectoryId
from rollweave.schema.commands import Continuation
from rollweave.schema.work import Purpose


def continuable(state: State) -> list[tuple[TrajectoryId, int, str]]:
    """The attempts under way, and earlier ones of queued trajectories, each with the
    life of the controller that launched it: a world that replaces a lost one may
    continue those whose turns are recorded.

    Numbers of attempts do not suffice: after a power loss, the journal may lack an
    attempt of which turns are recorded, and another one gets its number.
    """
    attempts = []
    for trajectory in state.trajectories.values():
        if trajectory.stage in (*ALIVE, Stage.EVAL_QUEUED):
            attempts.append((trajectory.id, trajectory.attempt, trajectory.life))
        elif trajectory.kept is not None:
            attempts.append((trajectory.id, trajectory.kept.attempt, trajectory.life))
    return attempts


def keep(run: Run, trajectory: Trajectory) -> None:
    """Keep the attempt, which was lost and is recorded, for the next one."""
    version = surviving_version(run.state.checkpoints.newest, warms_up=run.config.warmup.steps > 0)
    if trajectory.restored_to is not None:
        version = min(version, trajectory.restored_to)
    trajectory.kept = None
    group = run.state.groups[trajectory.group_id]
    if group.purpose is Purpose.TRAIN and 0 <= trajectory.initiated <= version:
        trajectory.kept = Kept(
            attempt=trajectory.attempt, initiated=trajectory.initiated, version=version
        )


def forget_unrecorded(run: Run, recorded: set[TrajectoryId]) -> None:
    """Forget what was kept at an earlier loss and is not on disk any longer."""
    for trajectory in run.state.trajectories.values():
        if trajectory.kept is not None and trajectory.id not in recorded:
            trajectory.kept = None


def restored(run: Run, step: int) -> None:
    """The trainer is back at `step`: later versions are lost, and their numbers will
    mean other weights.
    """
    for trajectory in run.state.trajectories.values():
        if trajectory.stage in (*ALIVE, Stage.EVAL_QUEUED):
            before = trajectory.restored_to
            trajectory.restored_to = step if before is None else min(before, step)
        kept = trajectory.kept
        if kept is not None and kept.version > step:
            trajectory.kept = (
                Kept(attempt=kept.attempt, initiated=kept.initiated, version=step)
                if kept.initiated <= step
                else None
            )


def take(run: Run, trajectory: Trajectory, launch: int) -> tuple[int, Continuation | None]:
    """Return the version from which the attempt's staleness is counted if it is
    launched now under version `launch`, and the attempt that it continues.
    """
    kept, trajectory.kept, trajectory.restored_to = trajectory.kept, None, None
    if kept is None or not may_continue(
        kept.initiated, launch=launch, next_version=run.next_version(), mode=run.mode
    ):
        return launch, None
    run.state.counters.continued += 1
    return kept.initiated, Continuation(attempt=kept.attempt, version=kept.version)
