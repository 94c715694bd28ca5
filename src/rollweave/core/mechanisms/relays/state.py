"""The relays and their chain: which relay has which weights, and their sources."""

import enum
from collections.abc import Container

import msgspec

from rollweave.core.run import Carrier, Run
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
    """Take a lost relay out of the chain: its successor fetches from its predecessor,
    or from the trainer as the new master, and is ahead of all relays after it (Laminar
    §4.3).
    """
    part = run.part(Relays)
    part.order = [name for name in part.order if name != relay.id]


def site_of(run: Run, host: int) -> str:
    """Return the site of a host, by its pools."""
    slot = run.state.hosts.up.get(host)
    pools = run.config.pools
    sites = (pools[name].site for name in slot.pools if name in pools) if slot is not None else ()
    return next((site for site in sites if site), "")


def _reaches_the_trainer(run: Run, relay: Relay) -> bool:
    """True if the relay can read the memory in which the trainer publishes, on its
    first rank's machine. The memory of a lost host is gone, unless all hosts are this
    machine.
    """
    hosts = run.state.hosts
    machine = hosts.up[relay.host].machine
    first = hosts.up.get(hosts.ranks[0].host) if hosts.ranks else None
    return machine == (first.machine if first is not None else "") or not hosts.ranks


def only_it_reaches_the_trainer(run: Run, relay: Relay) -> bool:
    """True if the relay must be the first of the chain."""
    machines = {host.machine for host in run.state.hosts.up.values()}
    return len(machines) > 1 and _reaches_the_trainer(run, relay)


def sources_of(run: Run, relay: Relay, wanted: int) -> list[str | None]:
    """The sources from which the relay may fetch these weights, the best first: the
    nearest relay before it, then any relay that has the weights whole; relays of its
    site come before all others. None, the trainer, is only for the head of the chain. A
    suspected relay is no source. After a change that did not fit, sources that have the
    whole version come first.
    """
    part = run.part(Relays)
    order = part.order
    at = order.index(relay.id)
    before = [part.relays[name] for name in reversed(order[:at])]
    behind = [part.relays[name] for name in order[at + 1 :]]
    near = [
        other.id
        for other in before
        if not other.suspected and (wanted in other.versions or other.fetching == wanted)
    ]
    whole = [
        other.id for other in (*before, *behind) if not other.suspected and wanted in other.versions
    ]
    heads = is_chain_head(part, relay) and _reaches_the_trainer(run, relay)
    first: list[str | None] = [None] if heads else []
    ways = [*whole, *near] if relay.force_full else [*near, *whole]
    own = site_of(run, relay.host)
    return [*first, *sorted(ways, key=lambda name: site_of(run, part.relays[name].host) != own)]


class RelayCarrier(Carrier):
    """Each engine loads weights that the relay of its host holds (Laminar §4)."""

    def relayed(self, run: Run) -> bool:
        return run.part(Relays).relayed

    def reach(self, run: Run, engine: Engine) -> list[int] | None:
        if not run.part(Relays).relayed:
            return None
        relay = relay_of(run, engine)
        return [] if relay is None else relay.versions

    def needed(self, run: Run) -> set[int]:
        ids, part = set[int](), run.part(Relays)
        for relay in part.relays.values():
            if takes_versions(part, relay, run.fleet.hosts):
                ids |= {*relay.versions[-1:]}
            if relay.fetch is not None:
                base = relay.fetch.base
                ids |= {relay.fetch.publication_id, base if base is not None else -1}
        return ids

    def held(self, run: Run) -> set[int]:
        relays = run.part(Relays).relays.values()
        fetching = {relay.fetching for relay in relays if relay.fetching is not None}
        return fetching | {held for relay in relays for held in relay.versions}

    def accuse(self, run: Run, engine: Engine, publication_id: int) -> None:
        relay = relay_of(run, engine)
        if relay is not None and publication_id in relay.versions:
            relay.restart_reason = f"{engine.id} cannot load from it"
