"""Turns: requested, answered or failed, and retried elsewhere when their engine fails.

Invariants: a queued turn is in `state.turns.queue` or, if it is a suspect, in
`state.turns.suspects`, one on an engine in that engine's `active`, and one that is held
in none of these, until the mechanism that holds it releases it; `dispatch` fences late
answers. An engine may have a turn's prompt computed by another one, `Turn.prefill`,
which then has the turn in its `active`, too. `core/dispatching` queues turns and gives
them to engines.
"""

import math

from rollweave.core import attempts, dispatching, trajectories
from rollweave.core.policy.retry import rest_s
from rollweave.core.run import Run, TurnMove
from rollweave.core.state import (
    Engine,
    EngineStatus,
    Held,
    OnEngine,
    Requested,
    Stage,
    Trajectory,
    Turn,
)
from rollweave.schema.commands import SetTimer
from rollweave.schema.events import (
    PrefillDone,
    TurnDone,
    TurnFailed,
    TurnProgress,
    TurnRequested,
    TurnReturned,
    TurnsProgressed,
    TurnWithdrawn,
)
from rollweave.schema.work import StopReason

MIN_PERIOD_S = 1.0
"""Minimum seconds between two checks of the deadlines."""

CHECKS_PER_LIMIT = 60
"""Checks within the shortest limit: a late answer is noticed at most a sixtieth of the
limit late.
"""


def set_timer(run: Run) -> None:
    """Set the timer for the next check, for the first engine that has rested, or for a
    mechanism's deadline, whichever is first.
    """
    rests = [until for engine in run.state.engines.values() for until in engine.barred.values()]
    at = min([run.now + _period_s(run), *rests])
    if run.state.turns.timer_at:
        at = min(at, run.state.turns.timer_at)
    _set_timer(run, max(run.now, at))


def wake_by(run: Run, at: float) -> None:
    """Let the timer fire no later than `at`, when a mechanism's deadline ends. The
    mechanism asks again for a later deadline whenever the timer fires.
    """
    if not 0 < run.state.turns.timer_at <= at:
        _set_timer(run, at)


def _set_timer(run: Run, at: float) -> None:
    run.state.turns.timer_at = at
    run.emit(SetTimer(at=at))


def _period_s(run: Run) -> float:
    limits = run.config.watchdog
    waits = [
        limits.start_s,
        limits.turn_s,
        limits.weights_s,
        limits.train_s,
        *(task.step_s for task in run.tasks.values()),
    ]
    return min(max(MIN_PERIOD_S, min(waits) / CHECKS_PER_LIMIT), run.pacing.check_s)


RESTS = "rests"
"""Why an engine that has given turns back gets no new ones for a while."""


def on_requested(run: Run, event: TurnRequested) -> None:
    trajectory = attempts.find(run, event.trajectory_id, event.attempt)
    if trajectory is None or trajectory.stage is not Stage.RUN or trajectory.turn is not None:
        return
    if event.turn != trajectory.turns_requested:
        return  # a duplicate
    trajectory.prompt_tokens = trajectory.prompt_tokens or event.context_tokens
    trajectory.context_tokens = event.context_tokens
    trajectory.turns_requested += 1
    turn = Turn(
        number=event.turn,
        context_tokens=event.context_tokens,
        streamed=event.streamed,
        since=run.now,
    )
    trajectory.turn = turn
    run.follow(TurnMove.REQUESTED, trajectory, turn)
    if isinstance(turn.place, Requested):
        dispatching.enqueue(run, trajectory, turn)


def on_done(run: Run, event: TurnDone) -> None:
    answered = find(run, event)
    if answered is None:
        return
    trajectory, turn, engine = answered
    if len(engine.active) > engine.abilities.max_slots:
        engine.oversubscribed_at = run.now
    attempts.vacate(run, engine, trajectory, turn)
    if turn.suspicion is not None:
        run.follow(TurnMove.ACQUITTED, trajectory, turn)
    run.dirty_queues += [None, engine.id]
    engine.failures.consecutive_timeouts = engine.failures.returns = engine.failures.excused = 0
    engine.failures.unanswered = {}
    if run.state.serving:
        # loaded weights reset these in training
        engine.failures.restarts, engine.failures.doubted = 0, {}
    trajectory.turn, trajectory.engine = None, engine.id
    if not event.replayed:
        _count(run, trajectory, turn, event)
    trajectory.output_tokens += event.output_tokens
    trajectory.context_tokens += event.output_tokens
    trajectory.since = run.now
    run.follow(TurnMove.DONE, trajectory, turn, engine, event)


def _count(run: Run, trajectory: Trajectory, turn: Turn, event: TurnDone) -> None:
    counters = run.state.counters
    counters.turns += 1
    if event.cut:
        name = run.state.groups[trajectory.group_id].name
        counters.cut_turns[name] = counters.cut_turns.get(name, 0) + 1
    counters.output_tokens += event.output_tokens
    counters.cached_tokens += event.cached_tokens
    counters.context_tokens += turn.context_tokens
    counters.scheduling.queue_s += event.queue_s


def on_failed(run: Run, event: TurnFailed) -> None:
    answered = find(run, event)
    if answered is None:
        return
    trajectory, turn, engine = answered
    if turn.prefill is None:
        fail(run, trajectory, engine, event.error)
    elif turn.prefill:
        run.follow(TurnMove.REFUSED, trajectory, turn, event.error)


def _give_up_prompts(run: Run, engine: Engine, error: str) -> None:
    """Let other engines compute the prompts that this one has for them."""
    if engine.samples:
        return
    for trajectory_id in list(engine.active):
        _give_up_prompt(run, run.state.trajectories[trajectory_id], error)


def _give_up_prompt(run: Run, trajectory: Trajectory, error: str) -> None:
    turn = trajectory.open_turn
    attempts.abort(run, trajectory, turn)
    run.follow(TurnMove.REFUSED, trajectory, turn, error)


def on_returned(run: Run, event: TurnReturned) -> None:
    """Let a turn that a borrowed engine gave back continue elsewhere."""
    answered = find(run, event)
    if answered is None:
        return
    trajectory, turn, engine = answered
    attempts.vacate(run, engine, trajectory, turn)
    run.state.counters.turns_returned += 1
    turn.since = run.now
    turn.dispatch += 1
    turn.returned_with = engine.publication_id
    turn.avoid = [name for name in turn.avoid if name != engine.id] + [engine.id]
    dispatching.enqueue(run, trajectory, turn)
    _rest(run, engine)


def _rest(run: Run, engine: Engine) -> None:
    """Give the engine no other turns for a while. Those that it has stay: it gives them
    back, too, if it has to.
    """
    if RESTS in engine.barred or engine.departing:
        return
    engine.failures.returns += 1
    seconds = rest_s(engine.failures.returns)
    engine.barred[RESTS] = run.now + seconds
    run.warn(engine.id, f"gave turns back: gets no others for {seconds:g} s", count="engine_rests")
    run.fleet_changed()
    dispatching.requeue_from(run, engine)
    set_timer(run)


def end_rests(run: Run) -> None:
    """Let engines get turns again that have rested."""
    for engine in run.state.engines.values():
        if run.now >= engine.barred.get(RESTS, math.inf):
            del engine.barred[RESTS]
            run.fleet_changed()
            run.dirty_queues += [None, engine.id]


def on_withdrawn(run: Run, event: TurnWithdrawn) -> None:
    trajectory = attempts.find(run, event.trajectory_id, event.attempt)
    if (
        trajectory is not None
        and trajectory.turn is not None
        and trajectory.turn.number == event.turn
    ):
        attempts.release_turn(run, trajectory)
        trajectory.since = run.now


def on_progressed(run: Run, event: TurnsProgressed) -> None:
    for progress in event.turns:
        sampling = find(run, progress)
        if sampling is not None:
            sampling[1].output_tokens = progress.output_tokens


Answer = TurnDone | TurnFailed | TurnReturned | TurnProgress | PrefillDone
"""The events about a turn that an engine has."""


def find(run: Run, event: Answer) -> tuple[Trajectory, Turn, Engine] | None:
    """The turn that the event is about, and its engine; None if the event is late."""
    trajectory = attempts.find(run, event.trajectory_id, event.attempt)
    turn = trajectory.turn if trajectory is not None else None
    if (
        trajectory is None
        or turn is None
        or not isinstance(turn.place, OnEngine)
        or (turn.number, turn.dispatch) != (event.turn, event.dispatch)
    ):
        return None
    return trajectory, turn, run.state.engines[turn.place.engine]


def fail(run: Run, trajectory: Trajectory, engine: Engine, error: str) -> None:
    """Handle a turn that its engine did not answer: queue it again, preferably for
    another engine, or give up the attempt.
    """
    turn = trajectory.open_turn
    attempts.vacate(run, engine, trajectory, turn)
    run.warn(
        engine.id, f"turn {turn.number} of {trajectory.id} failed: {error}", count="turn_failed"
    )
    turn.avoid.append(engine.id)
    turn.since, turn.output_tokens = run.now, 0
    turn.dispatch += 1
    turn.failures += 1
    if turn.failures > run.config.rollout.retries:
        trajectory.turn = None
        trajectories.cancel(run, trajectory, StopReason.ENGINE_FAILURE, failure=error)
    else:
        dispatching.enqueue(run, trajectory, turn)


def fail_all(run: Run, engine: Engine, error: str, *, abort: bool) -> None:
    """Fail every turn on this engine.

    With `abort` the world discards their answers.
    """
    _give_up_prompts(run, engine, error)
    for trajectory_id in list(engine.active):
        trajectory = run.state.trajectories[trajectory_id]
        if abort and trajectory.open_turn.prefill is None:
            attempts.abort(run, trajectory, trajectory.open_turn)
        fail(run, trajectory, engine, error)


def time_out(run: Run, engine: Engine, trajectory: Trajectory) -> None:
    """Fail a turn that is late, or give up a late prompt."""
    turn, error = trajectory.open_turn, f"no answer within {run.config.watchdog.turn_s:g} s"
    if turn.prefill is not None:
        _give_up_prompt(run, trajectory, error)
    else:
        attempts.abort(run, trajectory, turn)
        fail(run, trajectory, engine, error)


def recall(run: Run, trajectory: Trajectory, turn: Turn) -> None:
    """Take the open turn from its engine or queue, and hold it, so that it can run
    elsewhere; that is no failure.
    """
    attempts.take_back(run, trajectory, turn)
    if isinstance(turn.place, OnEngine):
        turn.since = run.now
        turn.dispatch += 1
    turn.place = Held()


def recall_all(run: Run, engine: Engine) -> None:
    """Take every turn from this engine, to run elsewhere, and every prompt."""
    _give_up_prompts(run, engine, "the engine leaves")
    for trajectory_id in list(engine.active):
        trajectory = run.state.trajectories[trajectory_id]
        turn = trajectory.open_turn
        recall(run, trajectory, turn)
        dispatching.enqueue(run, trajectory, turn)


def is_late(run: Run, engine: Engine, turn: Turn) -> bool:
    """True if the turn has no answer within the limit.

    On an oversubscribed engine a turn may wait while others are answered.
    """
    assert engine.status is EngineStatus.SERVING, "only a serving engine owes answers"
    return (
        run.now - max(turn.since, engine.since, engine.oversubscribed_at)
        > run.config.watchdog.turn_s
    )
