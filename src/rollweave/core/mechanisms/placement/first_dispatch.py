"""The first turn of an attempt waits for the prediction of the attempt's length, so
that the first dispatch follows the plan (Heddle §5.2).

The wait is bounded: after `WAIT_S` the turn is dispatched without a prediction, and no
further turn waits until the predictor answers again. As printed, the plan is made once
for the batch of a step: where a plan is due (placement `presorted`), first turns also
wait until those of all attempts whose environments start have come. Later attempts of
the batch do not wait for others; they follow the plan by their rank.

Invariant: a held turn is the first turn of its attempt, and no engine has it.
"""

from rollweave.core import dispatching, turns
from rollweave.core.mechanisms.lengths.index import work_of
from rollweave.core.mechanisms.placement import assignment
from rollweave.core.mechanisms.placement.assignment import Placement
from rollweave.core.run import Run
from rollweave.core.state import Held, Trajectory, Turn
from rollweave.schema.base import TrajectoryId

WAIT_S = 1.0
"""Maximum seconds for which a first turn waits: several times the latency of the
paper's predictor (Heddle Table 1: 0.10 to 0.28 s), and little beside a trajectory.
"""


def hold(run: Run, trajectory: Trajectory, turn: Turn) -> None:
    """Hold the attempt's first turn if a prediction was requested for it."""
    part = run.part(Placement)
    if not run.scheduling.by_rank or part.silent:
        return
    if work_of(run, trajectory).prediction_requested_for == turn.number == 0:
        turn.place = Held()
        _forget(part, trajectory.id)  # so that the tables stay in the order of time
        part.held[trajectory.id] = run.now
        turns.wake_by(run, run.now + WAIT_S)


def revised(run: Run, trajectory: Trajectory) -> None:
    """Dispatch what need no longer wait, now that the predictor has answered."""
    part = run.part(Placement)
    part.silent = False
    since = part.held.pop(trajectory.id, None)
    if since is None or not _is_held(trajectory):
        return
    part.ready[trajectory.id] = since
    if not run.scheduling.plans_once or not assignment.is_plan_due(run, trajectory):
        _dispatch(run, [trajectory.id])
    elif not run.state.pools.init and _oldest(run) is None:
        _dispatch(run, list(part.ready))


def give_up_late(run: Run) -> None:
    """Dispatch the turns that have waited for too long."""
    part, trajectories = run.part(Placement), run.state.trajectories
    part.ready = {
        name: since for name, since in part.ready.items() if _is_held(trajectories.get(name))
    }
    oldest = _oldest(run)
    if oldest is not None and run.now >= oldest + WAIT_S:
        part.silent = True
        _dispatch(run, [*part.held, *part.ready])
    elif part.ready and run.now >= min(part.ready.values()) + WAIT_S:
        _dispatch(run, list(part.ready))
    if part.held or part.ready:
        turns.wake_by(run, min([*part.held.values(), *part.ready.values()]) + WAIT_S)


def forget_all(run: Run) -> None:
    """Forget the held turns of a world that is lost, with its predictor."""
    part = run.part(Placement)
    part.held.clear()
    part.ready.clear()
    part.silent = False


def _forget(part: Placement, trajectory_id: TrajectoryId) -> None:
    part.held.pop(trajectory_id, None)
    part.ready.pop(trajectory_id, None)


def _is_held(trajectory: Trajectory | None) -> bool:
    """True unless the turn that was held has been withdrawn or cancelled."""
    turn = trajectory.turn if trajectory is not None else None
    return turn is not None and not turn.number and isinstance(turn.place, Held)


def _oldest(run: Run) -> float | None:
    """Return since when the first of the turns without a prediction waits; None if
    there is none. Entries of turns that are not held any longer are removed before it.
    """
    held = run.part(Placement).held
    while held:
        trajectory_id, since = next(iter(held.items()))
        if _is_held(run.state.trajectories.get(trajectory_id)):
            return since
        del held[trajectory_id]
    return None


def _dispatch(run: Run, names: list[TrajectoryId]) -> None:
    """Queue the held turns of these trajectories."""
    part = run.part(Placement)
    for name in names:
        since = part.held.get(name, part.ready.get(name, run.now))
        _forget(part, name)
        trajectory = run.state.trajectories.get(name)
        if trajectory is not None and _is_held(trajectory):
            run.state.counters.scheduling.awaited_s += run.now - since
            dispatching.enqueue(run, trajectory, trajectory.open_turn)
            assignment.count_dispatch(run, trajectory)
