"""Attempts that continue after the loss of their worker or of the controller: which of
them, and from which tokens (docs/decisions/0007).

The environment of such an attempt is gone and starts again; only the sampled tokens may
be kept (Laminar §3.2, §3.3 keep them when an engine is lost). The staleness of a
continued attempt is counted from its first launch, so a continuation is nothing but a
long pause. One rule holds for attempts of every purpose. Invariant: a trajectory has
`kept` only between the loss of an attempt and the launch of its next one.
"""

from collections.abc import Collection

from msgspec.structs import replace

from rollweave.core.policy.modes import Mode, acceptable, parted
from rollweave.core.run import Run
from rollweave.core.state import Kept, State, Trajectory
from rollweave.schema.base import TrajectoryId
from rollweave.schema.commands import Continuation, Evict
from rollweave.schema.work import Purpose


def surviving_version(checkpoint: int | None, *, warms_up: bool) -> int:
    """Return the newest version that a restored trainer has or had; -1 if no version is
    certain. Later versions belong to a lost lineage: their numbers will mean other
    weights. Without a checkpoint the trainer begins again, with the same weights unless
    it warms up.
    """
    if checkpoint is not None:
        return checkpoint
    return -1 if warms_up else 0


def may_continue(
    initiated: int, *, launch: int, next_version: int, mode: Mode, purpose: Purpose
) -> bool:
    """True if an attempt that began under version `initiated` may continue under
    `launch`, in time for a step that starts from `next_version`.

    An episode of an evaluation has one version, and so has a trajectory of mode
    decoupled. In mode sync the window has the same effect: an attempt continues only if
    no step was lost or trained since it began. A service bounds no staleness: it
    returns the version of each token.
    """
    if purpose is Purpose.SERVE:
        return True
    if purpose is Purpose.EVAL:
        return initiated == launch
    if mode.independent_updates and initiated != launch:
        return False
    return initiated <= launch and acceptable(initiated, next_version, mode.window)


def continuable(state: State) -> list[tuple[TrajectoryId, int, str]]:
    """The attempts under way, and earlier ones of queued trajectories, each with the
    life of the controller that launched it: a world that replaces a lost one may
    continue those whose turns are recorded.

    Numbers of attempts do not suffice: after a power loss, the journal may lack an
    attempt of which turns are recorded, and another one gets its number.
    """
    attempts = []
    for trajectory in state.trajectories.values():
        if trajectory.launched:
            attempts.append((trajectory.id, trajectory.attempt, trajectory.past.life))
        elif trajectory.past.kept is not None:
            attempts.append((trajectory.id, trajectory.past.kept.attempt, trajectory.past.life))
    return attempts


def keep(run: Run, trajectory: Trajectory) -> None:
    """Keep the attempt, which was lost and is recorded, for the next one."""
    past, version, initiated = trajectory.past, trajectory.past.restored_to, trajectory.initiated
    past.kept = None
    if initiated >= 0 and (version is None or initiated <= version):
        past.kept = Kept(attempt=trajectory.attempt, initiated=initiated, version=version)


def keep_if_recorded(
    run: Run, trajectory: Trajectory, recorded: Collection[TrajectoryId] | None = None
) -> None:
    """Keep the attempt, whose worker was lost, if turns of it are recorded: its
    trajectory is among `recorded`, or, where the world has not reported that, its
    engines have reported tokens, or it continues another attempt. Call before its open
    turn is released.
    """
    if recorded is not None:
        has_tokens = trajectory.id in recorded
    else:
        turn = trajectory.turn
        reported = trajectory.output_tokens + (turn.output_tokens if turn is not None else 0)
        has_tokens = reported > 0 or trajectory.past.continues
    if trajectory.closing is None and has_tokens:
        keep(run, trajectory)


def forget(run: Run, trajectory: Trajectory) -> None:
    """Forget the kept attempt of a trajectory, because no attempt follows. A service's
    trajectory is evicted once it is acknowledged.
    """
    if trajectory.past.kept is not None:
        trajectory.past.kept = None
        if run.state.groups[trajectory.group_id].purpose is not Purpose.SERVE:
            run.emit(Evict(trajectory_ids=(trajectory.id,), reason="not_continued"))


def controller_lost(run: Run, recorded: set[TrajectoryId]) -> None:
    """Drop kept attempts after the loss of the controller: those with weights that the
    restored trainer will not have, and those whose records are no longer on disk.
    """
    if not run.state.serving:
        warms_up = run.config.warmup.steps > 0
        restored(run, surviving_version(run.state.checkpoints.newest, warms_up=warms_up))
    for trajectory in run.state.trajectories.values():
        if trajectory.past.kept is not None and trajectory.id not in recorded:
            trajectory.past.kept = None


def restored(run: Run, step: int) -> None:
    """The trainer is back at `step`: later versions are lost, and their numbers will
    mean other weights.
    """
    run.state.publication.restores[run.state.publication.next_id] = step
    for trajectory in run.state.trajectories.values():
        past, before = trajectory.past, trajectory.past.restored_to
        past.restored_to = step if before is None else min(before, step)
        if (kept := past.kept) is not None and (kept.version is None or kept.version > step):
            past.kept = replace(kept, version=step) if kept.initiated <= step else None


def take(
    run: Run, trajectory: Trajectory, launch: int, publication_id: int
) -> tuple[int, Continuation | None]:
    """Return `launch`, the version of these weights, and None; or, if the attempt
    continues one that is kept, the version at which that one was launched, and the
    continuation. The attempt's staleness is counted from the version.
    """
    past = trajectory.past
    kept, past.kept, past.continues = past.kept, None, False
    past.restored_to = parted(run.state.publication.restores, launch, publication_id)
    if kept is None or not may_continue(
        kept.initiated,
        launch=launch if past.restored_to is None else -1,  # none continues with discarded weights
        next_version=run.next_version(),
        mode=run.mode,
        purpose=run.state.groups[trajectory.group_id].purpose,
    ):
        return launch, None
    past.continues = True
    run.state.counters.continued += 1
    return kept.initiated, Continuation(attempt=kept.attempt, version=kept.version)
