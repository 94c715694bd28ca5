"""The relays and their chain."""

import enum
from collections.abc import Container

import msgspec

from rollweave.core.policy.relay import repair
from rollweave.core.run import Run
from rollweave.core.state import Engine, State

NAME = "relays"
"""Key of the part in `State.mechanisms`."""


class RelayStatus(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    FETCHING = "fetching"


class Fetch(msgspec.Struct, frozen=True, kw_only=True):
    """A fetch of weights by a relay."""

    publication_id: int
    source: str | None  # id of a relay; None: the trainer
    base: int | None  # weights to which the fetched change applies; None: the whole version


class Relay(msgspec.Struct):
    """The relay of a host.

    It fetches one version at a time. Sources are ids of relays; None is the trainer.
    """

    id: str
    host: int
    status: RelayStatus = RelayStatus.STARTING
    epoch: int = 0
    since: float = 0.0
    versions: list[int] = []  # publication ids, ascending
    fetch: Fetch | None = None  # the one under way
    fetch_began: float = 0.0  # from the first of its sources
    fetches: int = 0  # number of fetches so far, of any weights
    # sources that failed since its last success or the watchdog's last check
    refused_sources: list[str | None] = []
    # sources from which these weights stalled; each is left at most once
    stalled_sources: list[str] = []
    force_full: bool = False  # a change did not fit: fetch the whole version next
    starved_since: float | None = (
        None  # since when it has been refused weights that another relay has
    )
    failed_source: str | None = None  # the last source that should have had them and failed
    # if set, the relay is restarted now: others cannot use what it should hold
    restart_reason: str = ""
    restarts: int = 0
    suspected_since: float | None = None  # suspected, and silent since about then

    @property
    def suspected(self) -> bool:
        return self.suspected_since is not None

    @property
    def fetching(self) -> int | None:
        """The id of the weights that it fetches."""
        return self.fetch.publication_id if self.fetch is not None else None


class Relays(msgspec.Struct):
    """The part of the state: the relays, and their chain, which broadcasts weights."""

    relays: dict[str, Relay] = {}
    relayed: bool = False  # there is a relay on every host
    order: list[str] = []  # relays that are up, the master first
    # fetches of the published weights from another relay, by form: whole, changes
    broadcast: dict[str, int] = {}
    # seconds from a publication until all relays had it, by form
    broadcast_s: dict[str, float] = {}


def part_of(state: State) -> Relays | None:
    """Return the part of the state; None if there can be no relays."""
    part = state.mechanisms.get(NAME)
    return part if isinstance(part, Relays) else None


def is_relayed(state: State) -> bool:
    """True if there is a relay on every host."""
    part = part_of(state)
    return part is not None and part.relayed


def relay_id(host: int) -> str:
    """Return the id of a host's relay."""
    return f"r{host}"


def relay_of(run: Run, engine: Engine) -> Relay | None:
    """Return the relay on the engine's host; None without relays."""
    part = run.part(Relays)
    return part.relays.get(relay_id(engine.seat.host)) if part.relayed else None


def takes_versions(part: Relays, relay: Relay, with_engines: Container[int]) -> bool:
    """True if a relay must have the published versions: there are engines on its host,
    or it is the first relay that is not suspected, from which the others get them.
    `with_engines` are the hosts that have engines.

    All other relays fetch nothing; they serve what the trainer's ranks publish on their
    hosts.
    """
    return relay.host in with_engines or is_chain_head(part, relay)


def is_chain_head(part: Relays, relay: Relay) -> bool:
    """True if only suspected relays stand before it in the chain: it is the master, or
    acts as the master.
    """
    for other in part.order:
        if other == relay.id:
            return True
        if not part.relays[other].suspected:
            return False
    return False


def leave_chain(run: Run, relay: Relay) -> None:
    """Take a lost relay out of the chain."""
    part = run.part(Relays)
    if relay.id in part.order:
        part.order = list(repair(part.order, relay.id).order)
