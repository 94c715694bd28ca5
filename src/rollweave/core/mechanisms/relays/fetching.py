"""Relays: one for each host, which pass the published weights along a chain (Laminar
§4).

The master, first in the chain, fetches them from the trainer, and every other relay
from the relay before it. All fetch at the same time: a source passes on what it has
received so far. Invariants: a fetching relay has a source that holds the same weights,
or that stands before it and is fetching the same weights, so that no relays wait for
each other; a relay that joins becomes the last of its site; relays of a site do not
fetch a version from another site if a relay before them brings it to theirs; a relay on
a host without engines fetches nothing, unless it is the master; older weights that
something waits for come to the host of an engine that can load them. A failed fetch is
retried immediately from another source, or after the next watchdog check if there is
none. The loss of the trainer is never blamed on a relay.

A relay that is silent for a moment is suspected, long before it counts as lost: relays
that fetch from it continue from a relay that is not suspected, if there is one (the
first such relay may fetch from the trainer), and no relay begins to fetch from it. It
keeps its process, its place and its fetch, and when it recovers nothing is moved back.
A relay that receives nothing from a responsive source tries another source, too, but
leaves each source only once for the same weights, so that a slow link is not left again
and again.
"""

from bisect import insort
from collections.abc import Mapping
from typing import NamedTuple

from rollweave.core import weights
from rollweave.core.mechanisms import membership
from rollweave.core.mechanisms.relays.state import (
    Fetch,
    Relay,
    Relays,
    RelayStatus,
    leave_chain,
    only_it_reaches_the_trainer,
    relay_id,
    site_of,
    sources_of,
    takes_versions,
)
from rollweave.core.policy.relay import join_at, sends_changes
from rollweave.core.run import Run
from rollweave.core.state import Phase
from rollweave.schema.commands import FetchWeights, RemoveRelay, RestartRelay
from rollweave.schema.events import (
    FetchFailed,
    FetchStalled,
    RelayJoined,
    RelayLost,
    RelayRecovered,
    RelaySuspected,
    RunStarted,
    WeightsFetched,
    WorldLost,
)

LEGAL: Mapping[RelayStatus, frozenset[RelayStatus]] = {
    RelayStatus.STARTING: frozenset({RelayStatus.READY}),
    RelayStatus.READY: frozenset({RelayStatus.FETCHING}),
    RelayStatus.FETCHING: frozenset({RelayStatus.READY}),
}
"""Legal transitions of a relay. A restart replaces its record by a new record in
STARTING.
"""


class Older(NamedTuple):
    """Older weights that the relay is to fetch, because they are waited for."""

    relay: Relay
    publication_id: int


def on_joined(run: Run, event: RelayJoined) -> None:
    part = run.part(Relays)
    relay = _find(run, event.relay_id, event.epoch)
    if relay is not None and relay.status is RelayStatus.STARTING:
        _enter(run, relay, RelayStatus.READY)
        order, ranks = part.order, run.state.hosts.ranks
        place = join_at(
            [site_of(run, part.relays[other].host) for other in order],
            site_of(run, relay.host),
            first=site_of(run, ranks[0].host) if ranks else "",
            master=only_it_reaches_the_trainer(run, relay),
        )
        order.insert(place, relay.id)


def on_fetched(run: Run, event: WeightsFetched) -> None:
    relay = _find(run, event.relay_id, event.epoch)
    if relay is None or relay.status is RelayStatus.STARTING:
        return
    expected = relay.fetching == event.publication_id
    if event.publication_id not in relay.versions and (
        expected or event.publication_id in run.state.publication.retained
    ):
        insort(relay.versions, event.publication_id)
    if not expected:
        return
    counted = run.state.counters.weights
    counted.fetch_s += run.now - relay.fetch_began
    counted.fetched_bytes += event.nbytes
    if len(relay.versions) > 1:
        relay.restarts = (
            0  # it has survived from one version to the next: earlier failures are forgiven
        )
    relay.refused_sources, relay.stalled_sources, relay.force_full = [], [], False
    relay.starved_since = relay.failed_source = None
    _stop(run, relay)
    _measure_broadcast(run)
    for other in run.part(Relays).relays.values():
        if other.fetch is not None and other.fetch.source == relay.id:
            other.since = run.now  # a timeout is now its own fault


def on_fetch_failed(run: Run, event: FetchFailed) -> None:
    """Handle a failed fetch: a change that does not fit is followed by the whole
    version; else another source may do better.
    """
    relay = _find(run, event.relay_id, event.epoch)
    fetch = relay.fetch if relay is not None else None
    if (
        relay is None
        or fetch is None
        or (fetch.publication_id, relay.fetches) != (event.publication_id, event.fetch_number)
    ):
        return
    run.warn(
        relay.id,
        f"weights {event.publication_id} not fetched ({event.reason}): {event.error}",
        count="fetch_refused",
    )
    source = run.part(Relays).relays.get(fetch.source or "")
    if event.reason in ("base", "broken") and fetch.base is not None:
        relay.force_full = True
    else:
        relay.refused_sources.append(fetch.source)
    if (
        event.reason == "source"
        and source is not None
        and event.publication_id in source.versions
        and not source.suspected
    ):
        relay.failed_source = source.id
    if (
        event.reason != "source" or relay.failed_source is not None
    ) and relay.starved_since is None:
        relay.starved_since = run.now
    _stop(run, relay)


def on_stalled(run: Run, event: FetchStalled) -> None:
    relay = _find(run, event.relay_id, event.epoch)
    fetch = relay.fetch if relay is not None else None
    if (
        relay is None
        or fetch is None
        or (fetch.publication_id, fetch.source) != (event.publication_id, event.source)
        or event.source in relay.stalled_sources
    ):
        return
    tried = {*relay.refused_sources, *relay.stalled_sources, event.source}
    ways = [
        source for source in sources_of(run, relay, fetch.publication_id) if source not in tried
    ]
    if ways:
        run.warn(
            relay.id,
            f"weights {fetch.publication_id} stall on their way from {event.source}",
            count="fetch_stalled",
        )
        relay.stalled_sources.append(event.source)
        _fetch(run, relay, fetch.publication_id, ways[0])


def on_lost(run: Run, event: RelayLost) -> None:
    relay = _find(run, event.relay_id, event.epoch)
    if relay is not None:
        restart(run, relay, f"lost: {event.error}")


def on_suspected(run: Run, event: RelaySuspected) -> None:
    relay = _find(run, event.relay_id, event.epoch)
    if relay is not None and relay.status is not RelayStatus.STARTING and not relay.suspected:
        relay.suspected_since = run.now
        run.warn(relay.id, "suspected: silent for a moment", count="relay_suspected")


def on_recovered(run: Run, event: RelayRecovered) -> None:
    relay = _find(run, event.relay_id, event.epoch)
    if relay is not None:
        relay.suspected_since = None


def restart(run: Run, relay: Relay, reason: str) -> None:
    """Remove the relay from the chain and restart it as its last member, or give up its
    host after repeated failure.
    """
    state = run.state
    if state.phase is Phase.FINISHED:
        return
    if relay.restarts >= run.config.watchdog.restarts:
        text = f"relay {relay.id} failed {relay.restarts + 1} times; last: {reason}"
        membership.evict(run, relay.host, text)
        return
    run.warn(relay.id, f"restarted: {reason}", count="relay_restarted")
    leave_chain(run, relay)
    fresh = Relay(
        id=relay.id,
        host=relay.host,
        epoch=relay.epoch + 1,
        restarts=relay.restarts + 1,
        fetches=relay.fetches,
        since=run.now,
    )
    run.part(Relays).relays[relay.id] = fresh
    run.emit(RestartRelay(relay_id=fresh.id, host=fresh.host, epoch=fresh.epoch, reason=reason))


def advance(run: Run) -> None:
    """Make every relay fetch the weights that it lacks, and find another source for a
    relay that has lost its source.
    """
    part = run.part(Relays)
    for relay in [relay for relay in part.relays.values() if relay.restart_reason]:
        restart(run, relay, relay.restart_reason)
    _lead_beside_the_trainer(run)
    older = _older_weights(run)
    for relay in [part.relays[name] for name in part.order]:
        if relay.fetch is not None:
            served = _has_source(run, relay.fetch)
            if served and (relay.suspected or not _source_is_suspected(run, relay.fetch)):
                continue  # a suspected relay cannot act: its fetch continues, or is lost with it
            if _fetch_from_best(run, relay, relay.fetch.publication_id) or served:
                continue
            _stop(run, relay)
        wanted = _missing_version(run, relay, older)
        if wanted is not None and not _comes_to_its_site(run, relay, wanted, older):
            _fetch_from_best(run, relay, wanted)


def _fetch_from_best(run: Run, relay: Relay, wanted: int) -> bool:
    """Fetch these weights from the best source that has not refused; return False if
    there is no such source.
    """
    ways = [
        source for source in sources_of(run, relay, wanted) if source not in relay.refused_sources
    ]
    if ways:
        _fetch(run, relay, wanted, ways[0])
    return bool(ways)


def _comes_to_its_site(run: Run, relay: Relay, wanted: int, older: Older | None) -> bool:
    """True if a relay before `relay` is fetching older weights and will bring `wanted`
    to the site next, and no relay of the site has `wanted` yet: a second fetch would
    cross the link between sites, too.
    """
    part = run.part(Relays)
    own = site_of(run, relay.host)
    order = part.order
    sources = sources_of(run, relay, wanted)
    if not sources or sources[0] is None or site_of(run, part.relays[sources[0]].host) == own:
        return False
    before = (part.relays[other] for other in order[: order.index(relay.id)])
    return any(
        other.fetch is not None
        and not other.suspected
        and site_of(run, other.host) == own
        and _missing_version(run, other, older) == wanted
        for other in before
    )


def _missing_version(run: Run, relay: Relay, older: Older | None) -> int | None:
    """The weights that the relay should fetch: the published ones, if it needs any and
    lacks them, or else the older ones that it is to bring.
    """
    published = run.state.publication.id
    if (
        published in run.state.publication.retained
        and published not in relay.versions
        and takes_versions(run.part(Relays), relay, run.fleet.hosts)
    ):
        return published
    return older.publication_id if older is not None and older.relay is relay else None


def _older_weights(run: Run) -> Older | None:
    """Older weights that are waited for, and the relay that is to fetch them: the head
    of the chain if no relay has them; or else, if no engine can load them from where
    they are, the first relay that has an engine on its host.
    """
    part = run.part(Relays)
    awaited = run.pacing.awaited_weights(run)
    if awaited is None or awaited not in run.state.publication.retained:
        return None  # only a checkpoint has them, or nothing waits for them
    relays = [part.relays[name] for name in part.order if not part.relays[name].suspected]
    if any(awaited in relay.versions for relay in part.relays.values()):
        engines = [one for one in run.state.engines.values() if one.samples and not one.departing]
        if any(weights.is_loadable(run, engine, awaited) for engine in engines):
            return None
        hosts = {engine.seat.host for engine in engines}
        relays = [relay for relay in relays if relay.host in hosts]
    return Older(relays[0], awaited) if relays else None


def check_timeouts(run: Run) -> None:
    """Restart relays that are late. Among relays that wait for each other, only the
    first counts as late. Clear refusals, so that these sources are tried again.
    """
    part = run.part(Relays)
    limits = run.config.watchdog
    fetching = {relay.id: relay.fetching for relay in part.relays.values()}
    waiting = {
        relay.id
        for relay in part.relays.values()
        if relay.fetch is not None
        and fetching.get(relay.fetch.source or "") == relay.fetch.publication_id
    }
    for relay in list(part.relays.values()):
        waited = run.now - relay.since
        if relay.status is RelayStatus.STARTING and waited > limits.start_s:
            restart(run, relay, f"not ready within {limits.start_s:g} s")
        elif (
            relay.status is RelayStatus.FETCHING
            and relay.id not in waiting
            and waited > limits.weights_s
        ):
            restart(
                run, relay, f"weights {relay.fetching} not fetched within {limits.weights_s:g} s"
            )
        elif (
            relay.suspected_since is not None and run.now - relay.suspected_since > limits.weights_s
        ):
            restart(run, relay, f"silent for {limits.weights_s:g} s")
        elif relay.starved_since is not None and run.now - relay.starved_since > limits.weights_s:
            if relay.failed_source in part.relays:  # either of the two may be at fault
                part.relays[relay.failed_source].restart_reason = f"{relay.id} gets nothing from it"
            restart(run, relay, f"refused weights for {limits.weights_s:g} s")
        else:
            relay.refused_sources = []


def _has_source(run: Run, fetch: Fetch) -> bool:
    if fetch.source is None:
        return True
    source = run.part(Relays).relays.get(fetch.source)
    return source is not None and (
        fetch.publication_id in source.versions or fetch.publication_id == source.fetching
    )


def _source_is_suspected(run: Run, fetch: Fetch) -> bool:
    return fetch.source is not None and run.part(Relays).relays[fetch.source].suspected


def _lead_beside_the_trainer(run: Run) -> None:
    """Make the only relay that reaches the trainer the first of the chain, once the
    trainer has moved to its host.

    A fetch from a relay that is fetching, and that is now behind it, is stopped.
    """
    part = run.part(Relays)
    order = part.order
    for relay in [part.relays[name] for name in order]:
        if only_it_reaches_the_trainer(run, relay):
            if relay.id == order[0]:
                return
            order.remove(relay.id)
            order.insert(0, relay.id)
            if relay.fetch is not None and relay.fetch.source is not None:
                source = part.relays.get(relay.fetch.source)
                if source is None or relay.fetch.publication_id not in source.versions:
                    _stop(run, relay)
            return


def _fetch(run: Run, relay: Relay, wanted: int, source: str | None) -> None:
    """Fetch these weights. If both ends hold common versions, only the change from the
    newest common version is sent. The master, which reads the trainer's memory, makes
    the changes from the newest version that another relay holds, too.
    """
    part = run.part(Relays)
    base = None
    if (
        "deltas" not in run.config.ablation.without
        and not relay.force_full
        and _prefers_changes(run)
    ):
        relays = part.relays
        ends = [relays[source]] if source is not None else relays.values()
        held = {held for end in ends if end is not relay for held in end.versions}
        base = max({*relay.versions} & held - {wanted}, default=None)
    if relay.fetch is None:
        _enter(run, relay, RelayStatus.FETCHING)
        relay.fetch_began = run.now
    relay.fetch, relay.since = Fetch(publication_id=wanted, source=source, base=base), run.now
    relay.fetches += 1
    if source is not None and wanted == run.state.publication.id:
        form = "whole" if base is None else "changes"
        sent = part.broadcast
        sent[form] = sent.get(form, 0) + 1
    # kept until there is a newer version, as the base of changes here and downstream
    newest = relay.versions[-1:]
    keep = tuple(sorted({*weights.needed(run), *newest} - {wanted}))
    relay.versions = [held for held in relay.versions if held in keep or held == base]
    run.emit(
        FetchWeights(
            relay_id=relay.id,
            publication_id=wanted,
            fetch_number=relay.fetches,
            base_id=base,
            source=source,
            keep=keep,
        )
    )


def _prefers_changes(run: Run) -> bool:
    seconds = run.part(Relays).broadcast_s
    return sends_changes(
        seconds.get("whole"), seconds.get("changes"), number=run.state.publication.id
    )


def _measure_broadcast(run: Run) -> None:
    """Once all relays that need the published weights have them, record the time that
    this took, if the weights were sent to all relays in one form.
    """
    part, published = run.part(Relays), run.state.publication
    takers = (
        relay
        for relay in (part.relays[name] for name in part.order)
        if takes_versions(part, relay, run.fleet.hosts)
    )
    if len(part.broadcast) == 1 and all(published.id in relay.versions for relay in takers):
        (form,) = part.broadcast
        part.broadcast_s[form] = run.now - published.at
        part.broadcast = {}


def _stop(run: Run, relay: Relay) -> None:
    relay.fetch = None
    _enter(run, relay, RelayStatus.READY)


def _find(run: Run, relay_id: str, epoch: int) -> Relay | None:
    relay = run.part(Relays).relays.get(relay_id)
    return relay if relay is not None and relay.epoch == epoch else None


def _enter(run: Run, relay: Relay, status: RelayStatus) -> None:
    assert status in LEGAL[relay.status], f"{relay.id}: {relay.status} → {status}"
    relay.status, relay.since = status, run.now


def on_started(run: Run, event: RunStarted | WorldLost) -> None:
    """Begin with the relays of a new world."""
    part, hosts = run.part(Relays), range(event.relays)
    part.relayed, part.order = event.relays > 0, []
    part.relays = {
        relay_id(host): Relay(id=relay_id(host), host=host, since=run.now) for host in hosts
    }


def host_joined(run: Run, host: int) -> None:
    """Start a relay on a host that has joined, if every host has a relay."""
    part, name = run.part(Relays), relay_id(host)
    if part.relayed:
        part.relays[name] = Relay(id=name, host=host, since=run.now)
        run.emit(RestartRelay(relay_id=name, host=host, epoch=0, reason="its host has joined"))


def host_given_up(run: Run, host: int, reason: str) -> None:
    """Remove the relay of a host that was given up."""
    relay = run.part(Relays).relays.pop(relay_id(host), None)
    if relay is not None:
        leave_chain(run, relay)
        run.emit(RemoveRelay(relay_id=relay.id, reason=reason))


def published(run: Run) -> None:
    """Begin to broadcast newly published weights."""
    part = run.part(Relays)
    part.broadcast = {}
    for relay in part.relays.values():
        relay.refused_sources, relay.stalled_sources, relay.force_full = [], [], False
