"""The ranks of open turns, and what changes them while an engine has the turn.

Invariant: an engine is sent every rank that changes there (`core/policy/priority`;
Heddle §4.2).
"""

from rollweave.core.policy.priority import RANKS, TurnView, is_overdue, overdue_rank
from rollweave.core.run import Run
from rollweave.core.state import Engine, OnEngine, Trajectory, Turn
from rollweave.schema.commands import RerankTurn


def rank_of(run: Run, trajectory: Trajectory, turn: Turn) -> float:
    """The rank of a turn by the run's priority; higher runs first."""
    return RANKS[run.scheduling.priority](
        TurnView(
            launched_at=trajectory.launched_at,
            arrival=turn.arrival,
            output_tokens=trajectory.output_tokens,
            level=trajectory.length_bucket or 0,
        )
    )


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
    prompt = turn.prompt
    if prompt is not None and prompt.moving:
        return  # no engine has it now
    run.emit(
        RerankTurn(
            trajectory_id=trajectory.id,
            attempt=trajectory.attempt,
            turn=turn.number,
            engine_id=engine.id if prompt is None else prompt.engine,
            dispatch=turn.dispatch,
            rank=rank,
        )
    )
