"""The versions of the weights that may still be loaded, and which of them an engine can
load now.

The trainer and the relays keep these versions in memory and release all others. With
relays an engine loads only from its own host's relay (Laminar §4), so it can load
what that relay holds. In mode decoupled any engine can also read a version from a
checkpoint that holds it (§3.3), since all hosts see the run's directory. Publication
ids only grow.

Invariants: `state.publication.retained` has the newest published version, and of
earlier ones those that are `needed`; `state.publication.checkpointed` has no version
that a checkpoint may no longer hold.
"""

from collections.abc import Container

from rollweave.core.policy.relay import repair
from rollweave.core.run import Run
from rollweave.core.state import Engine, Relay, State

MAX_VERSIONS = 8
"""Maximum number of versions kept in memory at once, the newest ones: that many models
fit into a host's memory.

Older versions are in checkpoints alone.
"""


def needed(run: Run) -> tuple[int, ...]:
    """Return the versions that an engine or relay has, receives or is loading, that a
    trajectory began with, or that are to be evaluated; and the newest one.

    Of the retained ones, ascending, the newest MAX_VERSIONS.
    """
    state = run.state
    ids = {state.publication.id}
    for engine in state.engines.values():
        ids |= {engine.publication_id, engine.loading_id, engine.staging_id, engine.staged_id}
    for relay in state.relays.values():
        if takes_versions(state, relay, run.fleet.hosts):
            ids |= {*relay.versions[-1:]}
        if relay.fetch is not None:
            base = relay.fetch.base
            ids |= {relay.fetch.publication_id, base if base is not None else -1}
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
    publication.version, publication.id, publication.at = (
        version,
        publication_id,
        run.now,
    )
    state.chain.broadcast = {}
    for relay in state.relays.values():
        relay.refused_sources, relay.stalled_sources, relay.force_full = [], [], False
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
    state = run.state
    held = {held for relay in state.relays.values() for held in (*relay.versions, relay.fetching)}
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


def relay_of(run: Run, engine: Engine) -> Relay | None:
    """Return the relay on the engine's host; None without relays."""
    return run.state.relays.get(relay_id(engine.host)) if run.state.chain.relayed else None


def takes_versions(state: State, relay: Relay, with_engines: Container[int]) -> bool:
    """True if a relay must have the published versions: there are engines on its host,
    or it is the first relay that is not suspected, from which the others get them.
    `with_engines` are the hosts that have engines.

    All other relays fetch nothing; they serve what the trainer's ranks publish on their
    hosts.
    """
    return relay.host in with_engines or is_chain_head(state, relay)


def is_chain_head(state: State, relay: Relay) -> bool:
    """True if only suspected relays stand before it in the chain: it is the master, or
    acts as the master.
    """
    for other in state.chain.order:
        if other == relay.id:
            return True
        if not state.relays[other].suspected:
            return False
    return False


def relay_id(host: int) -> str:
    """Return the id of a host's relay."""
    return f"r{host}"


def leave_chain(run: Run, relay: Relay) -> None:
    """Take a lost relay out of the chain."""
    chain = run.state.chain
    if relay.id in chain.order:
        chain.order = list(repair(chain.order, relay.id).order)


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
    relay = relay_of(run, engine)
    return publication_id in run.state.publication.retained and (
        not run.state.chain.relayed or (relay is not None and publication_id in relay.versions)
    )


def newest(run: Run, engine: Engine) -> int | None:
    """The newest weights that the engine can load now, or None. Without relays these
    are the published ones. In a colocated run an engine loads no others either, since
    it would have to give its memory back before it loads newer ones.

    If the published ones are not in memory, as while the trainer is down, the newest
    ones of a checkpoint, unless the engine's own are newer.
    """
    published, retained = run.state.publication.id, run.state.publication.retained
    if run.state.chain.relayed:
        relay = relay_of(run, engine)
        held = relay.versions if relay is not None else []
        if run.colocated:
            held = [version for version in held if version == published]
        in_memory = next((version for version in reversed(held) if version in retained), -1)
    else:
        in_memory = published if published in retained else -1
    saved = max(run.state.publication.checkpointed, default=-1) if published not in retained else -1
    newest = max(in_memory, saved if saved >= engine.publication_id else -1)
    return newest if newest >= 0 else None
