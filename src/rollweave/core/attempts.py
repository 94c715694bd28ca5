"""An attempt at a trajectory: finding it, its legal stages, its open turn, its end.

Everything else in the core stands above this module. It touches the state and the
indices, and it emits commands; it decides nothing. The attempt's stages:

    QUEUED → INIT → RUN_QUEUED → RUN → EVAL_QUEUED → EVAL → SCORED → ENDED (if dropped)
      ↑      any of these → CLOSING (while the world stops it) → OVER
      └────────────── OVER, if the trajectory is tried again; else → ENDED

`OVER` lasts from the end of an attempt until `core/lifecycle` has settled its
consequences, within the same event.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rollweave.core.policy.places import Taken
from rollweave.core.run import AttemptOver, Run, TurnMove
from rollweave.core.state import (
    Engine,
    Held,
    OnEngine,
    Queued,
    Requested,
    Stage,
    State,
    Suspected,
    Trajectory,
    Turn,
)
from rollweave.schema.base import TrajectoryId
from rollweave.schema.commands import AbortTurn
from rollweave.schema.work import StopReason

LEGAL: Mapping[Stage, frozenset[Stage]] = {
    Stage.QUEUED: frozenset({Stage.INIT, Stage.OVER}),
    Stage.INIT: frozenset({Stage.RUN_QUEUED, Stage.EVAL_QUEUED, Stage.CLOSING, Stage.OVER}),
    Stage.RUN_QUEUED: frozenset({Stage.RUN, Stage.EVAL_QUEUED, Stage.CLOSING, Stage.OVER}),
    Stage.RUN: frozenset({Stage.EVAL_QUEUED, Stage.CLOSING, Stage.OVER}),
    Stage.EVAL_QUEUED: frozenset({Stage.EVAL, Stage.OVER}),
    Stage.EVAL: frozenset({Stage.SCORED, Stage.CLOSING, Stage.OVER}),
    Stage.CLOSING: frozenset({Stage.OVER}),
    Stage.OVER: frozenset({Stage.QUEUED, Stage.ENDED}),
    # A scored member of a dropped group ends. A service tries a trajectory again whose
    # stored tokens were lost before they were delivered.
    Stage.SCORED: frozenset({Stage.ENDED, Stage.OVER}),
    Stage.ENDED: frozenset({Stage.OVER}),
}
"""Legal transitions between the stages of an attempt."""


def index_of(state: State, stage: Stage) -> dict[TrajectoryId, Any] | None:
    """The index of the trajectories in this stage; None if the stage has no index."""
    match stage:
        case Stage.QUEUED:
            return state.pools.queued
        case Stage.INIT:
            return state.pools.init
        case Stage.RUN_QUEUED:
            return state.pools.run_queued
        case Stage.RUN:
            return state.pools.run
        case Stage.EVAL_QUEUED:
            return state.pools.eval_queued
        case Stage.EVAL:
            return state.pools.eval
        case Stage.CLOSING:
            return state.pools.closing
        case Stage.OVER | Stage.SCORED | Stage.ENDED:
            return None


def taken(run: Run) -> Taken:
    """The places that attempts hold. A cancelled attempt holds its place until the
    world has stopped it.
    """
    pools = run.state.pools
    closing = Counter(pools.closing.values())
    return Taken(
        init=len(pools.init) + closing[Stage.INIT],
        ready=len(pools.run_queued) + closing[Stage.RUN_QUEUED],
        run=len(pools.run) + closing[Stage.RUN],
        rolled_out=len(pools.eval_queued),
        eval=len(pools.eval) + closing[Stage.EVAL],
    )


def find(run: Run, trajectory_id: TrajectoryId, attempt: int) -> Trajectory | None:
    """The trajectory, or None if it is gone or already in another attempt: then the
    event is late and is ignored.
    """
    trajectory = run.state.trajectories.get(trajectory_id)
    return trajectory if trajectory is not None and trajectory.attempt == attempt else None


def add(run: Run, trajectory: Trajectory) -> None:
    """Add a trajectory, whose first attempt is queued."""
    run.state.trajectories[trajectory.id] = trajectory
    run.state.pools.queued[trajectory.id] = None
    run.follow(Stage.QUEUED, trajectory)


def move(run: Run, trajectory: Trajectory, stage: Stage) -> None:
    """Change the stage and every index that depends on it."""
    assert stage in LEGAL[trajectory.stage], f"{trajectory.id}: {trajectory.stage} → {stage}"
    before, after = index_of(run.state, trajectory.stage), index_of(run.state, stage)
    if before is not None:
        before.pop(trajectory.id, None)
    if after is not None:
        after[trajectory.id] = trajectory.stage if stage is Stage.CLOSING else None
    trajectory.stage = stage
    trajectory.since = run.now
    run.follow(stage, trajectory)


def release_turn(run: Run, trajectory: Trajectory) -> None:
    """Take the open turn, if any, from its place and close it."""
    if trajectory.turn is not None:
        take_back(run, trajectory, trajectory.turn)
        trajectory.turn = None


def vacate(run: Run, engine: Engine, trajectory: Trajectory, turn: Turn) -> None:
    """Take a turn from its engine, and its prompt from the one that computes it."""
    run.follow(TurnMove.LEFT, trajectory, turn, engine)
    turn.prefill = None
    run.fleet.vacate(engine, trajectory.id, turn)
    if engine.failures.isolates == trajectory.id:
        open_again(run, engine)


def open_again(run: Run, engine: Engine) -> None:
    """Let an engine that was kept for a suspect get turns again."""
    engine.failures.isolates = None
    run.fleet_changed()
    run.dirty_queues += [None, engine.id]


def take_back(run: Run, trajectory: Trajectory, turn: Turn) -> None:
    """Take the open turn from the queue, or from its engine, whose answer is discarded.
    The caller gives the turn another place, or closes it.
    """
    match turn.place:
        case Queued():
            del run.state.turns.queue[trajectory.id]
            run.turn_queues.leave(trajectory.id)
        case Suspected():
            del run.state.turns.suspects[trajectory.id]
            for engine in run.state.engines.values():
                if engine.failures.isolates == trajectory.id:
                    open_again(run, engine)
        case OnEngine(engine=engine_id):
            if turn.prefill is None:
                abort(run, trajectory, turn)
            vacate(run, run.state.engines[engine_id], trajectory, turn)
        case Held() | Requested():
            pass


def abort(run: Run, trajectory: Trajectory, turn: Turn) -> None:
    """Make the world discard the answer to the open turn, or to its prompt, by the
    engine that owes it.
    """
    assert isinstance(turn.place, OnEngine), f"no engine owes the turn of {trajectory.id}"
    run.emit(
        AbortTurn(
            trajectory_id=trajectory.id,
            attempt=trajectory.attempt,
            turn=turn.number,
            engine_id=turn.place.engine if turn.prefill is None else turn.prefill,
            dispatch=turn.dispatch,
        )
    )


def count_stop(run: Run, trajectory: Trajectory, reason: StopReason) -> None:
    """Count the end of the attempt, once, if it was launched."""
    if trajectory.launched:
        reasons = run.state.counters.stop_reasons
        reasons[reason] = reasons.get(reason, 0) + 1


def note_failure(run: Run, reason: StopReason, failure: str) -> None:
    """Record the last failure, with the world's description if there is one."""
    run.state.last_failure = f"{reason}: {failure}" if failure else str(reason)


def score(run: Run, trajectory: Trajectory, stop: StopReason) -> None:
    """The attempt is scored: record it, and post the fact."""
    count_stop(run, trajectory, stop)
    move(run, trajectory, Stage.SCORED)
    run.over.append(AttemptOver(trajectory_id=trajectory.id, reason=stop, scored=True))


def end(run: Run, trajectory: Trajectory, reason: StopReason, *, repeated: bool) -> None:
    """The attempt is over without a score, and the world holds nothing for it: record
    it, and post the fact. `repeated` marks a failure equal to that of the attempt
    before.
    """
    trajectory.closing = None
    if not run.state.last_failure:
        note_failure(run, reason, "")
    count_stop(run, trajectory, reason)
    move(run, trajectory, Stage.OVER)
    run.over.append(AttemptOver(trajectory_id=trajectory.id, reason=reason, repeated=repeated))
