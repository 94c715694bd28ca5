"""Engines for suspects: each runs alone on an engine that has finished its other turns.

Invariant: an engine that runs a suspect has no other turn.
"""

from rollweave.core import attempts, dispatching
from rollweave.core.mechanisms.suspects.policy import engine_for_suspect, may_isolate
from rollweave.core.run import Run
from rollweave.core.state import Engine, Trajectory, Turn


def start_suspects(run: Run) -> None:
    """Give suspects to engines that are empty, and keep engines empty for others."""
    state = run.state
    for trajectory_id in list(state.turns.suspects):
        trajectory = state.trajectories[trajectory_id]
        turn = trajectory.open_turn
        engine = _engine_for_suspect(run, trajectory, turn)
        if engine is None or engine.active:
            continue
        del state.turns.suspects[trajectory_id]
        dispatching.give(run, trajectory, turn, engine)


def _engine_for_suspect(run: Run, trajectory: Trajectory, turn: Turn) -> Engine | None:
    """Return the engine that gets no turns but this one, now or once it is empty."""
    engines, loads = run.state.engines, run.chooser.candidates(run, trajectory, turn)
    isolating = {
        engine.id: engine for engine in engines.values() if engine.failures.isolates is not None
    }
    own = next((one for one in isolating.values() if one.failures.isolates == trajectory.id), None)
    if own is not None and any(load.id == own.id for load in loads):
        return own
    if own is not None:  # it takes no turns for a while, or has other weights
        attempts.open_again(run, own)
        del isolating[own.id]
    if not may_isolate(isolating=len(isolating), engines=len(run.fleet.loads)):
        return None
    chosen = engine_for_suspect(loads, avoid=turn.avoid, isolating=isolating)
    if chosen is None:
        return None
    engine = engines[chosen]
    engine.failures.isolates = trajectory.id
    run.fleet_changed()
    dispatching.requeue_from(run, engine)
    return engine
