"""Versions of the weights that somebody may still load. Whoever holds the bytes keeps these, and lets go of all others.

Invariant: `state.kept` has the newest published version, and of earlier ones those that are `needed`.
"""

from rollweave.core.run import Run


def needed(run: Run) -> tuple[int, ...]:
    """Versions that an engine has or loads, that a trajectory began with, or that are to be evaluated; and the newest."""
    state = run.state
    found = {state.published_id}
    for engine in state.engines.values():
        found |= {engine.weights_id, engine.loading_id}
    if run.alone:
        found |= {state.trajectories[member].weights_id for member in (*state.in_init, *state.in_run)}
        if state.evaluation is not None:
            found.add(state.evaluation.weights_id)
    return tuple(sorted(found & {*state.kept, state.published_id} - {-1}))


def published(run: Run, version: int, weights_id: int) -> None:
    """A new version may be loaded; of the earlier ones the needed may."""
    state = run.state
    state.published_version, state.published_id, state.published_at = version, weights_id, run.now
    keep = needed(run)
    state.kept = {kept: state.kept.get(kept, version) for kept in keep}


def lost(run: Run) -> None:
    """Whoever held the bytes is gone. Engines keep what they have loaded."""
    run.state.kept = {}
