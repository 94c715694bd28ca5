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
        part.held[trajectory.id] = run.now
        turns.wake_by(run, run.now + WAIT_S)


def revised(run: Run, trajectory: Trajectory) -> None:
    """Dispatch what need no longer wait, now that the predictor has answered."""
    part = run.part(Placement)
    part.silent = False
    if trajectory.id in part.held:
        _dispatch(run)


def give_up_late(run: Run) -> None:
    """Dispatch the turns that have waited for too long."""
    part = run.part(Placement)
    for trajectory, since in _waiting(run):
        if run.now - since >= WAIT_S and not _is_predicted(run, trajectory):
            part.silent = True
    _dispatch(run)
    if part.held:
        turns.wake_by(run, min(part.held.values()) + WAIT_S)


def forget_all(run: Run) -> None:
    """Forget the held turns of a world that is lost, with its predictor."""
    part = run.part(Placement)
    part.held.clear()
    part.silent = False


def _waiting(run: Run) -> list[tuple[Trajectory, float]]:
    """Return the attempts whose first turn is held, with the time since when. Entries
    of others, whose turn was withdrawn or cancelled, are removed.
    """
    part, waiting = run.part(Placement), list[tuple[Trajectory, float]]()
    for trajectory_id, since in list(part.held.items()):
        trajectory = run.state.trajectories.get(trajectory_id)
        turn = trajectory.turn if trajectory is not None else None
        if trajectory is None or turn is None or turn.number or not isinstance(turn.place, Held):
            del part.held[trajectory_id]
        else:
            waiting.append((trajectory, since))
    return waiting


def _dispatch(run: Run) -> None:
    """Queue the held turns that have waited long enough."""
    part = run.part(Placement)
    held: list[tuple[Trajectory, bool, bool]] = []  # with: is it predicted, is it late
    for trajectory, since in _waiting(run):
        late = part.silent or run.now - since >= WAIT_S
        held.append((trajectory, _is_predicted(run, trajectory), late))
    waits = not any(late for _, _, late in held) and _awaits_batch(run, held)
    for trajectory, predicted, late in held:
        # a turn that was dispatched before may have made the plan
        if late or (predicted and not (waits and assignment.is_plan_due(run, trajectory))):
            run.state.counters.scheduling.awaited_s += run.now - part.held.pop(trajectory.id)
            dispatching.enqueue(run, trajectory, trajectory.open_turn)
            assignment.count_dispatch(run, trajectory)


def _awaits_batch(run: Run, held: list[tuple[Trajectory, bool, bool]]) -> bool:
    """True if the batch, for which a plan would be made, is not known yet."""
    if not run.scheduling.plans_once:
        return False
    return bool(run.state.pools.init) or not all(predicted for _, predicted, _ in held)


def _is_predicted(run: Run, trajectory: Trajectory) -> bool:
    return work_of(run, trajectory).predicted_at_turn >= 0
