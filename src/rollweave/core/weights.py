"""Versions of the weights that somebody may still load, and which of them an engine can
load now.

Whoever holds the bytes keeps these, and lets go of all others. With relays an engine
loads from its own machine's relay alone (Laminar §4), so it can have what that one
holds. In mode decoupled any engine can also read a version from a checkpoint that holds
it (§3.3): all machines see the run's directory. Weights ids only grow. Invariants:
`state.kept` has the newest published version, and of earlier ones those that are
`needed`; `state.saved` has no version that a checkpoint may not hold any more.
"""

from collections.abc import Container

from rollweave.core import membership
from rollweave.core.run import Run
from rollweave.core.state import Engine, Relay

MAX_VERSIONS = 8
"""Versions that are kept at once, the newest: so many models fit into a host's memory.

Older ones are in checkpoints alone.
"""


def needed(run: Run) -> tuple[int, ...]:
    """Versions that an engine or relay has or takes, that a trajectory began with, or
    that are to be evaluated; and the newest.

    Of those that are kept, ascending, the newest MOST.
    """
    state = run.state
    found = {state.published_id}
    for engine in state.engines.values():
        found |= {engine.weights_id, engine.loading_id}
    for relay in state.relays.values():
        found |= {
            relay.fetching,
            relay.base if relay.base is not None else -1,
            *relay.versions[-1:],
        }
    if run.independent_updates:
        found |= {
            state.trajectories[member].weights_id for member in (*state.in_init, *state.in_run)
        }
        if state.evaluation is not None:
            found.add(state.evaluation.weights_id)
    return tuple(sorted(found & {*state.retained_versions, state.published_id} - {-1}))[
        -MAX_VERSIONS:
    ]


def publish(run: Run, version: int, weights_id: int) -> None:
    """A new version may be loaded; of the earlier ones the needed may."""
    state = run.state
    state.published_version, state.published_id, state.published_at = version, weights_id, run.now
    state.broadcast = {}
    for relay in state.relays.values():
        relay.refused_sources, relay.stalled_sources, relay.force_full = [], [], False
    keep = needed(run)
    state.retained_versions = {kept: state.retained_versions.get(kept, version) for kept in keep}


def trainer_lost(run: Run) -> None:
    """The trainer is gone, and what it held.

    Engines keep what they have loaded, relays what they have taken.
    """
    state = run.state
    held = {held for relay in state.relays.values() for held in (*relay.versions, relay.fetching)}
    state.retained_versions = {
        kept: version for kept, version in state.retained_versions.items() if kept in held
    }


def mark_checkpointed(run: Run, step: int, weights_id: int) -> None:
    """Note that the checkpoint of this step holds these weights; -1: none that were
    published.
    """
    if run.independent_updates and weights_id >= 0:
        run.state.checkpointed_versions[weights_id] = step


def keep_checkpoints(run: Run, *, but: Container[int]) -> None:
    """Checkpoints of other steps than these are gone, damaged, or about to hold other
    weights.
    """
    run.state.checkpointed_versions = {
        saved: step for saved, step in run.state.checkpointed_versions.items() if step in but
    }


def machine_of(run: Run, engine: Engine) -> int | None:
    """The machine that the engine is on; None without relays."""
    return membership.machine_of(run.state, engine.id)


def relay_of(run: Run, engine: Engine) -> Relay | None:
    """The relay beside the engine."""
    machine = machine_of(run, engine)
    return run.state.relays.get(f"r{machine}") if machine is not None else None


def is_obtainable(run: Run, weights_id: int) -> bool:
    """Somebody other than an engine has these, or a checkpoint."""
    return (
        weights_id in run.state.retained_versions or weights_id in run.state.checkpointed_versions
    )


def is_loadable(run: Run, engine: Engine, weights_id: int) -> bool:
    """The engine can load these now."""
    return is_in_memory(run, engine, weights_id) or weights_id in run.state.checkpointed_versions


def is_in_memory(run: Run, engine: Engine, weights_id: int) -> bool:
    """It needs no checkpoint for it."""
    relay = relay_of(run, engine)
    return weights_id in run.state.retained_versions and (
        not run.state.machines or (relay is not None and weights_id in relay.versions)
    )


def newest(run: Run, engine: Engine) -> int | None:
    """The newest that it can load now; None where there are none. Without relays: the
    published ones, or none.

    Where nobody holds the published ones, as while the trainer is down: those of a
    checkpoint, unless its own are newer.
    """
    state = run.state
    if state.machines:
        relay = relay_of(run, engine)
        found = (
            next((held for held in reversed(relay.versions) if held in state.retained_versions), -1)
            if relay is not None
            else -1
        )
    else:
        found = state.published_id if state.published_id in state.retained_versions else -1
    saved = (
        max(state.checkpointed_versions, default=-1)
        if state.published_id not in state.retained_versions
        else -1
    )
    newest = max(found, saved if saved >= engine.weights_id else -1)
    return newest if newest >= 0 else None
