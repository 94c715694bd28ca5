"""Relays, which carry published weights from host to host (`relays/fetching`)."""

from rollweave.core.mechanisms.relays import fetching
from rollweave.core.mechanisms.relays.check import check
from rollweave.core.mechanisms.relays.fetching import RelayCarrier
from rollweave.core.mechanisms.relays.state import NAME, Relays
from rollweave.core.mechanisms.relays.waits import waits
from rollweave.core.run import HostMove, Mechanism, TrainerMove
from rollweave.schema import events as e
from rollweave.schema.config.root import RunConfig


def used(config: RunConfig) -> bool:
    """True if hosts have relays."""
    return config.weights.relays > 0 or config.cluster is not None


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
