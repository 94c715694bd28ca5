"""Turns: queued by rank, routed to an engine, tried again elsewhere when the engine fails.

Invariant: an open turn is either in `turn_queue` or in exactly one engine's `active`; `try_number` fences late answers.
"""

import heapq

from rollweave.core import trajectories
from rollweave.core.run import Run
from rollweave.core.state import Engine, Stage, Trajectory, Turn
from rollweave.policy.priority import fcfs
from rollweave.policy.routing import choose
from rollweave.schema.base import TrajectoryId
from rollweave.schema.commands import AbortTurn, StartTurn
from rollweave.schema.events import TurnDone, TurnFailed, TurnRequested
from rollweave.schema.work import StopReason

STALE_ENTRIES = 64
"""Entries of turns that left the queue otherwise, which the heap may hold beyond as many as it has live ones."""


def on_requested(run: Run, event: TurnRequested) -> None:
    trajectory = trajectories.find(run, event.trajectory_id, event.attempt)
    if trajectory is None or trajectory.stage is not Stage.RUN or trajectory.turn is not None:
        return
    if event.turn != trajectory.asked:
        return  # a message that came twice
    trajectory.asked += 1
    trajectory.turn = Turn(number=event.turn, context_tokens=event.context_tokens, since=run.now)
    _enqueue(run, trajectory)


def on_done(run: Run, event: TurnDone) -> None:
    trajectory, turn = _open_turn(run, event)
    if trajectory is None or turn is None:
        return
    assert turn.engine is not None, "an open turn with a matching try is on an engine"
    engine = run.state.engines[turn.engine]
    run.fleet.vacate(engine, trajectory.id)
    engine.strikes = 0
    trajectory.turn, trajectory.engine, trajectory.since = None, engine.id, run.now
    counters = run.state.counters
    counters.turns += 1
    counters.output_tokens += event.output_tokens
    counters.cached_tokens += event.cached_tokens
    counters.context_tokens += turn.context_tokens


def on_failed(run: Run, event: TurnFailed) -> None:
    trajectory, _turn = _open_turn(run, event)
    if trajectory is not None:
        fail(run, trajectory, event.error)


def _open_turn(run: Run, event: TurnDone | TurnFailed) -> tuple[Trajectory | None, Turn | None]:
    """The turn that the event answers, or (None, None) if the answer is late."""
    trajectory = trajectories.find(run, event.trajectory_id, event.attempt)
    turn = trajectory.turn if trajectory is not None else None
    if turn is None or turn.engine is None or (turn.number, turn.try_number) != (event.turn, event.try_number):
        return None, None
    return trajectory, turn


def fail(run: Run, trajectory: Trajectory, error: str) -> None:
    """The engine did not answer the open turn: queue it again, preferably for another engine, or give up the attempt."""
    turn = trajectory.turn
    assert turn is not None, "only an open turn can fail"
    assert turn.engine is not None, "only an assigned turn can fail"
    engine = run.state.engines.get(turn.engine)
    if engine is not None:
        run.fleet.vacate(engine, trajectory.id)
    run.warn(turn.engine, f"turn {turn.number} of {trajectory.id} failed: {error}", count="turn_failed")
    turn.avoid.append(turn.engine)
    turn.engine, turn.since = None, run.now
    turn.try_number += 1
    if turn.try_number > run.config.rollout.retries:
        trajectories.cancel(run, trajectory, StopReason.ENGINE_FAILURE)
    else:
        _enqueue(run, trajectory)


def fail_all(run: Run, engine: Engine, error: str, *, abort: bool) -> None:
    """Every turn on this engine failed. With `abort` the world is told to forget their answers."""
    for trajectory_id in list(engine.active):
        trajectory = run.state.trajectories[trajectory_id]
        if abort:
            _abort(run, engine, trajectory)
        fail(run, trajectory, error)


def time_out(run: Run, engine: Engine, trajectory: Trajectory) -> None:
    """The watchdog's verdict on one turn."""
    _abort(run, engine, trajectory)
    fail(run, trajectory, f"no answer within {run.config.watchdog.turn_s:g} s")


def _abort(run: Run, engine: Engine, trajectory: Trajectory) -> None:
    assert trajectory.turn is not None, "an active turn is open"
    run.emit(
        AbortTurn(
            trajectory_id=trajectory.id,
            attempt=trajectory.attempt,
            turn=trajectory.turn.number,
            engine_id=engine.id,
            try_number=trajectory.turn.try_number,
        )
    )


def _enqueue(run: Run, trajectory: Trajectory) -> None:
    state = run.state
    state.arrivals += 1
    state.turn_queue[trajectory.id] = state.arrivals
    heapq.heappush(_heap(run), (-fcfs(trajectory.launched_at), state.arrivals, trajectory.id))


def _heap(run: Run) -> list[tuple[float, int, TrajectoryId]]:
    """Queued turns by (−rank, arrival). Derived; entries whose turn left the queue stay until they surface or are too many."""
    state = run.state
    if run.turn_heap is None or len(run.turn_heap) > 2 * len(state.turn_queue) + STALE_ENTRIES:
        run.turn_heap = [
            (-fcfs(state.trajectories[trajectory_id].launched_at), arrival, trajectory_id)
            for trajectory_id, arrival in state.turn_queue.items()
        ]
        heapq.heapify(run.turn_heap)
    return run.turn_heap


def dispatch(run: Run) -> None:
    """Hand queued turns to engines, highest rank first, as long as one has a free slot."""
    state = run.state
    if not state.turn_queue or (run.config.rollout.env_stepping == "batch" and _someone_steps(run)):
        return
    fleet, heap = run.fleet, _heap(run)
    while state.turn_queue and fleet.free_slots > 0:
        _, arrival, trajectory_id = heapq.heappop(heap)
        if state.turn_queue.get(trajectory_id) != arrival:
            continue  # it left the queue otherwise
        del state.turn_queue[trajectory_id]
        trajectory = state.trajectories[trajectory_id]
        turn = trajectory.turn
        assert turn is not None, "a queued turn is open"
        chosen = choose(fleet.loads, affine=trajectory.engine, avoid=turn.avoid)
        assert chosen is not None, "there is a free slot"
        turn.engine, turn.since = chosen, run.now
        fleet.occupy(state.engines[chosen], trajectory_id, turn.number)
        run.emit(
            StartTurn(
                trajectory_id=trajectory_id,
                attempt=trajectory.attempt,
                turn=turn.number,
                engine_id=chosen,
                rank=fcfs(trajectory.launched_at),
                try_number=turn.try_number,
            )
        )


def _someone_steps(run: Run) -> bool:
    """True while an environment is starting or stepping: batch-level interaction waits for the slowest (RollArt Fig. 5b)."""
    state = run.state
    return bool(state.in_init) or any(state.trajectories[member].turn is None for member in state.in_run)
