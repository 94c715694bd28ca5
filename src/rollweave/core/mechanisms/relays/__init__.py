"""Relays, which carry published weights from host to host (`relays/fetching`)."""

from collections.abc import Iterator, Mapping

from rollweave.core.mechanisms.relays import fetching
from rollweave.core.mechanisms.relays.check import check
from rollweave.core.mechanisms.relays.state import (
    NAME,
    Relay,
    RelayCarrier,
    Relays,
    RelayStatus,
    takes_versions,
)
from rollweave.core.policy.waiting import Wait
from rollweave.core.reading.waits import on_host, version_name
from rollweave.core.run import HostMove, Mechanism, Run, TrainerMove
from rollweave.core.state import State
from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig

MEGABYTE = 1_000_000


def used(config: RunConfig) -> bool:
    """True if hosts have relays."""
    return config.weights.relays > 0 or config.cluster is not None


def waits(run: Run, received: Mapping[str, tuple[int, int]], start_s: float) -> Iterator[Wait]:
    """Yield the present waits."""
    state, part = run.state, run.part(Relays)
    with_engines = {engine.seat.host for engine in state.engines.values()}
    for relay in part.relays.values():
        needs = takes_versions(part, relay, with_engines)
        progress = received.get(relay.id, (0, 0))
        yield from _relay(state, relay, progress, needs=needs, start_s=start_s)


def _relay(
    state: State, relay: Relay, received: tuple[int, int], *, needs: bool, start_s: float
) -> Iterator[Wait]:
    name, since, what = f"relay {relay.id}{on_host(state, relay.host)}", relay.since, ""
    missing, (done, whole), limit_s = state.publication.id, received, 0.0
    if relay.status is RelayStatus.STARTING:
        what, limit_s = "starting", start_s
    elif relay.fetch is not None:
        fetched, source = version_name(state, relay.fetch.publication_id), relay.fetch.source
        what = f"fetching {fetched} from {source or 'the trainer'}"
        if whole:
            what += f", {done / MEGABYTE:,.0f} of {whole / MEGABYTE:,.0f} MB"
    if what:
        yield Wait(component=name, what=what, since=since, limit_s=limit_s)
    elif needs and missing in state.publication.retained and missing not in relay.versions:
        yield Wait(component=name, what=f"no source has {version_name(state, missing)}")
    if relay.suspected_since is not None:
        yield Wait(
            component=f"a sign of life of {name}", what="silent", since=relay.suspected_since
        )


MECHANISM = Mechanism(
    name=NAME,
    used=used,
    state=Relays,
    carrier=RelayCarrier(),
    handlers={
        e.RunStarted: fetching.on_started,
        e.WorldLost: fetching.on_started,
        e.RelayJoined: fetching.on_joined,
        e.RelayLost: fetching.on_lost,
        e.RelaySuspected: fetching.on_suspected,
        e.RelayRecovered: fetching.on_recovered,
        e.WeightsFetched: fetching.on_fetched,
        e.FetchStalled: fetching.on_stalled,
        e.FetchFailed: fetching.on_fetch_failed,
    },
    steps={"update weights": fetching.advance, "attempt deadlines": fetching.check_timeouts},
    follows={
        HostMove.JOINED: fetching.host_joined,
        HostMove.GIVEN_UP: fetching.host_given_up,
        TrainerMove.PUBLISHED: fetching.published,
    },
    waits=waits,
    check=check,
)
