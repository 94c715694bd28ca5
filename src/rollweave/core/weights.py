"""The versions of the weights that may still be loaded, and which of them an engine can
load now.

The trainer keeps these versions in memory and releases all others; what carries them to
the engines, if it is not that memory, is a mechanism's (`core/run.Carrier`). In mode
decoupled any engine can also read a version from a checkpoint that holds it (Laminar
§3.3), since all hosts see the run's directory. Functions name versions by their
publication ids, which only grow.

Invariants: `state.publication.retained` has the newest published version, and of
earlier ones those that are `needed`; `state.publication.checkpointed` has no version
that a checkpoint may no longer hold.
"""

from collections.abc import Container

from rollweave.core.run import Run
from rollweave.core.state import Engine

MAX_VERSIONS = 8
"""Maximum number of versions kept in memory at once, the newest ones: that many models
fit into a host's memory.

Older versions are in checkpoints alone.
"""


def needed(run: Run) -> tuple[int, ...]:
    """Return the publication ids of the versions that an engine or relay has, receives
    or is loading, that a trajectory began with, or that are to be evaluated; and that
    of the newest one.

    Of the retained ones, ascending, the newest MAX_VERSIONS.
    """
    state = run.state
    ids = {state.publication.id}
    for engine in state.engines.values():
        ids |= {
            engine.publication_id,
            engine.loading.id,
            engine.staging.id,
            engine.staging.staged_id,
        }
    ids |= run.carrier.needed(run)
    ids |= run.pacing.bound_weights(run)
    loadable = {*state.publication.retained, state.publication.id} - {-1}
    return tuple(sorted(ids & loadable))[-MAX_VERSIONS:]


def take_id(run: Run) -> int:
    """The id of weights that are published now."""
    publication = run.state.publication
    publication.next_id += 1
    return publication.next_id - 1


def publish(run: Run, version: int, publication_id: int) -> None:
    """Record a new version that may be loaded; of the earlier ones the needed versions
    stay.
    """
    state = run.state
    publication = state.publication
    publication.version, publication.id, publication.at = version, publication_id, run.now
    keep = needed(run)
    publication.retained = {kept: publication.retained.get(kept, version) for kept in keep}


def forget(run: Run, publication_id: int) -> None:
    """Forget a version that can no longer be loaded from memory."""
    run.state.publication.retained.pop(publication_id, None)


def trainer_lost(run: Run) -> None:
    """Forget the versions that only the trainer held.

    Engines keep the weights that they have loaded, relays the versions that they have
    fetched.
    """
    state, held = run.state, run.carrier.held(run)
    state.publication.retained = {
        kept: version for kept, version in state.publication.retained.items() if kept in held
    }


def mark_checkpointed(run: Run, step: int, publication_id: int) -> None:
    """Record that the checkpoint of this step holds these weights.

    A `publication_id` of -1 means that they were not published.
    """
    if run.pacing.loads_checkpoints and publication_id >= 0:
        run.state.publication.checkpointed[publication_id] = step


def keep_checkpoints(run: Run, *, but: Container[int]) -> None:
    """Forget versions in checkpoints of steps other than `but`: these are gone,
    damaged, or about to hold other weights.
    """
    run.state.publication.checkpointed = {
        saved: step for saved, step in run.state.publication.checkpointed.items() if step in but
    }


def is_obtainable(run: Run, publication_id: int) -> bool:
    """True if the trainer, a relay or a checkpoint holds these weights."""
    publication = run.state.publication
    return publication_id in publication.retained or publication_id in publication.checkpointed


def is_loadable(run: Run, engine: Engine, publication_id: int) -> bool:
    """True if the engine can load these weights now."""
    return (
        is_in_memory(run, engine, publication_id)
        or publication_id in run.state.publication.checkpointed
    )


def is_in_memory(run: Run, engine: Engine, publication_id: int) -> bool:
    """True if the engine can load these weights without a checkpoint."""
    if publication_id not in run.state.publication.retained:
        return False
    reach = run.carrier.reach(run, engine)
    return reach is None or publication_id in reach


def newest(run: Run, engine: Engine) -> int | None:
    """The newest weights that the engine can load now, or None. Without relays these
    are the published ones. In a colocated run an engine loads no others either, since
    it would have to give its memory back before it loads newer ones.

    If the published ones are not in memory, as while the trainer is down, the newest
    ones of a checkpoint, unless the engine's own are newer.
    """
    published, retained = run.state.publication.id, run.state.publication.retained
    held = run.carrier.reach(run, engine)
    if held is not None:
        if run.colocated:
            held = [held_id for held_id in held if held_id == published]
        in_memory = next((held_id for held_id in reversed(held) if held_id in retained), -1)
    else:
        in_memory = published if published in retained else -1
    saved = max(run.state.publication.checkpointed, default=-1) if published not in retained else -1
    newest = max(in_memory, saved if saved >= engine.publication_id else -1)
    return newest if newest >= 0 else None
