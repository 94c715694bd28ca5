"""Estimates of the trajectories' lengths. A prediction is requested with the first
turn, at the end of every turn, beside the tool, and again when the environment has
answered. Only a first turn may wait for it, and briefly (`placement/first_dispatch`).

Every trajectory has an estimate at any time: the last prediction less the tokens
sampled since, or the mean of its task domain before the first prediction. A predictor
that is slow, fails or is gone affects only the quality of the estimates (Heddle §4.1).

The ranks of open turns follow from the estimates. Invariant: an engine is sent every
rank that changes there (`core/policy/scheduling`; Heddle §4.2).
"""

import math

from rollweave.core import attempts, dispatching
from rollweave.core.mechanisms.lengths.index import Lengths, Work, domain_of, reindex, work_of
from rollweave.core.mechanisms.lengths.work import occupied
from rollweave.core.policy.scheduling import (
    RANKS,
    UNKNOWN,
    TurnView,
    is_overdue,
    level_of,
    overdue_rank,
)
from rollweave.core.run import Run, TurnMove
from rollweave.core.state import MOVING, Engine, OnEngine, Queued, Stage, Trajectory, Turn
from rollweave.core.turn_queues import QueuedTurn
from rollweave.schema.commands import Harvest, Predict, RerankTurn
from rollweave.schema.events import PredictionReady, TurnDone
from rollweave.schema.training import LengthContext
from rollweave.schema.work import Purpose

KEPT_LENGTHS = 8192
"""Maximum number of recent lengths kept for each task domain: one batch of the largest
published set-ups.
"""

MEAN_WEIGHT = 0.05
"""Weight of a new value in the running means of a task domain, which cover about the
last twenty values.
"""

MAX_ESTIMATE = 1 << 24
"""Maximum tokens of an estimate, whatever a predictor answers: beyond any model's
context, and small enough for sums of contexts over so many tokens to fit into a
snapshot's integers.
"""

FINISHED = (Stage.EVAL_QUEUED, Stage.EVAL, Stage.SCORED)


def begin_attempt(run: Run, trajectory: Trajectory) -> None:
    """Begin with a new attempt. Only its task domain is known."""
    work = run.part(Lengths).trajectories[trajectory.id] = Work()
    stats = domain_of(run, trajectory)
    if stats.lengths:
        mean = stats.length_sum / len(stats.lengths)
    else:
        mean = 1.0 if stats.predicted_length is None else stats.predicted_length
    _set_estimate(run, trajectory, work, mean)


def learn_prompt(run: Run, trajectory: Trajectory) -> None:
    """Learn the prompt's length. For a handler it is known only with its first turn."""
    work = work_of(run, trajectory)
    work.prompt_tokens = trajectory.prompt_tokens
    if work.prompt_tokens:
        stats = domain_of(run, trajectory)
        stats.prompt_tokens = _mean(stats.prompt_tokens, work.prompt_tokens)
    reindex(run, trajectory)


def learn_request(run: Run, trajectory: Trajectory, turn: Turn) -> None:
    """Learn from a requested turn, and request a prediction: the environment's answer
    is the most informative moment before a turn.
    """
    stats, work = domain_of(run, trajectory), work_of(run, trajectory)
    if turn.number:
        step_s = run.now - trajectory.since
        work.tool_s += step_s
        stats.tool_s = _mean(stats.tool_s, step_s)
    if not work.prompt_tokens:
        learn_prompt(run, trajectory)
    work.kv_demand = turn.context_tokens + round(stats.turn_tokens or 0.0)
    reindex(run, trajectory)
    _request_prediction(run, trajectory, work, turn.number, answered=True)


def learn_turn(
    run: Run, trajectory: Trajectory, turn: Turn, _engine: Engine, event: TurnDone
) -> None:
    """Learn from a turn that is over. Its times are ignored if they were already
    learned before the controller was lost.
    """
    stats, work = domain_of(run, trajectory), work_of(run, trajectory)
    if not event.replayed:
        stats.turn_s = _mean(stats.turn_s, run.now - turn.since - event.queue_s)
        stats.turn_tokens = _mean(stats.turn_tokens, event.output_tokens)
    work.last_output_tokens = event.output_tokens
    _set_estimate(run, trajectory, work, work.estimate - event.output_tokens)
    run.state.counters.scheduling.predictions_late += (
        work.prediction_requested_for > work.predicted_at_turn
    )
    _request_prediction(run, trajectory, work, turn.number + 1, answered=False)


def learn_prediction(run: Run, trajectory: Trajectory, event: PredictionReady) -> bool:
    """Take the estimate; False if it is late or not a number. The second one for a turn
    corrects the first one.
    """
    work = work_of(run, trajectory)
    if trajectory.stage is not Stage.RUN or event.turn != work.prediction_requested_for:
        return False
    if not math.isfinite(event.remaining_tokens):
        return False
    work.predicted_at_turn = event.turn
    _set_estimate(run, trajectory, work, event.remaining_tokens)
    stats = domain_of(run, trajectory)
    length = trajectory.output_tokens + work.estimate
    stats.predicted_length = _mean(stats.predicted_length, length)
    return True


def revise_outrun(run: Run) -> list[Trajectory]:
    """If a turn has already outrun the trajectory's whole estimate, assume that it is
    half done. Return the trajectories whose estimate has changed.

    Turns have a long tail themselves and do not report their progress, so it is
    estimated from the mean speed of the task domain. The time that a turn waits on its
    engine counts too, which helps trajectories that were wrongly taken for short and
    wait behind others.
    """
    if not run.scheduling.predicts:
        return []
    revised = []
    speeds = {
        name: (stats.turn_tokens or 0.0) / stats.turn_s
        for name, stats in run.part(Lengths).domains.items()
        if stats.turn_s
    }
    for trajectory_id in run.state.pools.run:
        trajectory = run.state.trajectories[trajectory_id]
        turn, work = trajectory.turn, work_of(run, trajectory)
        if turn is None or not isinstance(turn.place, OnEngine) or work.predicted_at_turn < 0:
            continue
        sampled = (run.now - turn.since) * speeds.get(
            run.state.groups[trajectory.group_id].name, 0.0
        )
        if sampled > work.estimate:
            _set_estimate(run, trajectory, work, 2 * sampled)
            revised.append(trajectory)
    return revised


def finish_attempt(run: Run, trajectory: Trajectory) -> None:
    """Record that the attempt samples no more, because it has ended by itself."""
    group = run.state.groups[trajectory.group_id]
    if trajectory.output_tokens and group.purpose is not Purpose.EVAL:
        stats = domain_of(run, trajectory)
        stats.lengths.append(trajectory.output_tokens)
        gone = stats.lengths.pop(0) if len(stats.lengths) > KEPT_LENGTHS else 0
        stats.length_sum += trajectory.output_tokens - gone
        growth = _context_growth(trajectory) / trajectory.output_tokens
        stats.context_growth = _mean(stats.context_growth, growth)
    _harvest(run, trajectory, trajectory.output_tokens)


def cut_attempt(run: Run, trajectory: Trajectory) -> None:
    """Record that the attempt samples no more, because it was cut off."""
    _harvest(run, trajectory, None)


def _harvest(run: Run, trajectory: Trajectory, output_tokens: int | None) -> None:
    work = work_of(run, trajectory)
    if work.prediction_requested_for >= 0:
        run.emit(
            Harvest(
                trajectory_id=trajectory.id, attempt=trajectory.attempt, output_tokens=output_tokens
            )
        )
        work.prediction_requested_for = work.predicted_at_turn = -1
    reindex(run, trajectory)


def _context_growth(trajectory: Trajectory) -> int:
    """Tokens added to the trajectory's context; 0 if an agent program has begun a
    shorter context since.
    """
    return max(0, trajectory.context_tokens - trajectory.prompt_tokens)


def _mean(mean: float | None, value: float) -> float:
    """The running mean after a new value."""
    return float(value) if mean is None else mean + MEAN_WEIGHT * (value - mean)


def recent_lengths(run: Run) -> list[int]:
    """Sampled tokens of the newest finished trajectories of all task domains."""
    return [length for stats in run.part(Lengths).domains.values() for length in stats.lengths]


def _set_estimate(run: Run, trajectory: Trajectory, work: Work, tokens: float) -> None:
    """Set the estimate in whole tokens, so that sums over trajectories do not depend on
    their order.
    """
    if not (run.scheduling.predicts or run.scheduling.assigns):
        return  # estimates are not used
    work.estimate = round(max(1.0, min(tokens, MAX_ESTIMATE)))
    known = domain_of(run, trajectory).context_growth
    growth = 1.0 if known is None else known
    work.kv_token_steps = round(
        occupied(work.estimate, context=trajectory.context_tokens, growth=growth)
    )
    if work.predicted_at_turn < 0:
        work.length_bucket = UNKNOWN
    else:
        former = work.length_bucket if work.length_bucket != UNKNOWN else None
        work.length_bucket = level_of(trajectory.output_tokens + work.estimate, former)
    reindex(run, trajectory)


def _request_prediction(
    run: Run, trajectory: Trajectory, work: Work, turn: int, *, answered: bool
) -> None:
    """Request a prediction for the attempt's next turn, before the environment has
    answered or thereafter.

    Evaluations sample otherwise, and are not learned from.
    """
    group = run.state.groups[trajectory.group_id]
    if not run.scheduling.predicts or group.purpose is Purpose.EVAL:
        return
    siblings = [run.state.trajectories[member] for member in group.members]
    lengths = [sibling.output_tokens for sibling in siblings if sibling.stage in FINISHED]
    work.prediction_requested_for = turn
    run.state.counters.scheduling.predictions += 1
    run.emit(
        Predict(
            trajectory_id=trajectory.id,
            attempt=trajectory.attempt,
            turn=turn,
            context=LengthContext(
                domain=group.name,
                prompt_tokens=trajectory.prompt_tokens,
                turn=turn,
                answered=answered,
                output_tokens=trajectory.output_tokens,
                last_output_tokens=work.last_output_tokens,
                observation_tokens=max(0, _context_growth(trajectory) - trajectory.output_tokens),
                tool_s=work.tool_s,
                siblings=len(lengths),
                sibling_mean=sum(lengths) / len(lengths) if lengths else 0.0,
                sibling_longest=max(lengths, default=0),
            ),
        )
    )


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
    if trajectory is None or not learn_prediction(run, trajectory, event):
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
    for trajectory in revise_outrun(run):
        rerank(run, trajectory)
