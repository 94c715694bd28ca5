"""Invariants of relays."""

from rollweave.core.mechanisms.relays.state import Relays, RelayStatus, relay_id
from rollweave.core.run import Run
from rollweave.core.weights import MAX_VERSIONS


def check(run: Run) -> None:
    """Assert that relays wait only for weights that will come."""
    part, state = run.part(Relays), run.state
    up = {relay.id for relay in part.relays.values() if relay.status is not RelayStatus.STARTING}
    assert sorted(part.order) == sorted(up), f"{part.order} are in the chain, {up} are up"
    for place, relay in enumerate(part.relays[name] for name in part.order):
        assert (relay.status is RelayStatus.FETCHING) == (relay.fetch is not None), relay
        assert relay.versions == sorted(set(relay.versions)), relay
        assert relay.fetching not in relay.versions, relay
        assert len(relay.versions) <= MAX_VERSIONS + 1, relay
        fetch = relay.fetch
        if fetch is None:
            continue
        source = part.relays[fetch.source] if fetch.source is not None else None
        if source is not None and fetch.publication_id not in source.versions:
            assert source.fetching == fetch.publication_id, (
                f"{relay.id} fetches {fetch.publication_id} from {source.id}, which lacks it"
            )
            assert part.order.index(source.id) < place, (
                f"{relay.id} fetches from {source.id}, which stands behind it"
            )
        assert fetch.base is None or fetch.base in relay.versions, relay
    for engine in state.engines.values():
        assert not part.relayed or relay_id(engine.seat.host) in part.relays, engine
    assert {*part.relays} <= {relay_id(host) for host in state.hosts.up}
