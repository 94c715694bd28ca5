"""The ranks of open turns, and what changes them while an engine has the turn.

Invariant: an engine is sent every rank that changes there (`core/policy/priority`;
Heddle §4.2).
"""

from rollweave.core import attempts, dispatching
from rollweave.core.mechanisms.lengths import estimates
from rollweave.core.mechanisms.lengths.state import work_of
from rollweave.core.policy.priority import RANKS, TurnView, is_overdue, overdue_rank
from rollweave.core.run import Run, TurnMove
from rollweave.core.state import MOVING, Engine, OnEngine, Queued, Trajectory, Turn
from rollweave.core.turn_queues import QueuedTurn
from rollweave.schema.commands import RerankTurn
from rollweave.schema.events import PredictionReady


def rank_of(run: Run, trajectory: Trajectory, turn: Turn) -> float:
    """The rank of a turn by the run's priority; higher runs first."""
    return RANKS[run.scheduling.priority](
        TurnView(
            launched_at=trajectory.launched_at,
            arrival=turn.arrival,
            output_tokens=trajectory.output_tokens,
            level=work_of(run, trajectory).length_bucket or 0,
        )
    )


def set_rank(run: Run, trajectory: Trajectory, turn: Turn) -> None:
    """Set the rank of a turn that joins a queue, or moves within a queue."""
    turn.rank = rank_of(run, trajectory, turn)


def on_prediction(run: Run, event: PredictionReady) -> None:
    """Act on the trajectory's new estimate wherever its turn is."""
    trajectory = attempts.find(run, event.trajectory_id, event.attempt)
    if trajectory is None or not estimates.learn_prediction(run, trajectory, event):
        return
    # the trajectory's order in the KV of this engine may have changed
    run.dirty_queues.append(work_of(run, trajectory).assigned_engine)
    turn = trajectory.turn
    run.follow(TurnMove.REVISED, trajectory, turn)
    if turn is not None and isinstance(turn.place, Queued):
        dispatching.requeue(run, QueuedTurn(trajectory, turn, turn.place))
    elif turn is not None and isinstance(turn.place, OnEngine):
        rerank(run, trajectory)


def promote_overdue(run: Run) -> None:
    """Let victims of preemption that were overtaken too often on their engine run
    before all others.
    """
    for load in [load for load in run.fleet.loads.values() if load.active > load.slots]:
        engine = run.state.engines[load.id]
        for trajectory_id in engine.active:
            trajectory = run.state.trajectories[trajectory_id]
            turn = trajectory.open_turn
            if (
                isinstance(turn.place, OnEngine)
                and turn.rank < load.lowest
                and is_overdue(engine.turns_given - turn.place.given, slots=load.slots)
            ):
                run.state.counters.scheduling.overdue += 1
                _rerank(run, engine, trajectory, turn, overdue_rank(turn.arrival))


def rerank(run: Run, trajectory: Trajectory) -> None:
    """Update the rank of a turn that an engine has after the trajectory's estimate has
    changed.
    """
    turn = trajectory.open_turn
    if isinstance(turn.place, OnEngine) and turn.rank < overdue_rank(turn.arrival):
        rank = rank_of(run, trajectory, turn)
        if rank != turn.rank:
            _rerank(run, run.state.engines[turn.place.engine], trajectory, turn, rank)


def _rerank(run: Run, engine: Engine, trajectory: Trajectory, turn: Turn, rank: float) -> None:
    before, turn.rank = turn.rank, rank
    run.fleet.rerank(engine, before, rank)
    if turn.prefill == MOVING:
        return  # no engine has it now
    run.emit(
        RerankTurn(
            trajectory_id=trajectory.id,
            attempt=trajectory.attempt,
            turn=turn.number,
            engine_id=engine.id if turn.prefill is None else turn.prefill,
            dispatch=turn.dispatch,
            rank=rank,
        )
    )


def check_ranks(run: Run) -> None:
    """Promote overtaken turns, and turns that have outrun their estimates."""
    promote_overdue(run)
    for trajectory in estimates.revise_outrun(run):
        rerank(run, trajectory)
