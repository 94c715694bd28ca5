"""The relays of the live world: executes the core's commands about relays and says what
came of them.

Each relay is a process that listens on a loopback address of its own, as if it were
alone on its machine. Invariants, as of engines in `runtime/supervisors/engines.py`: a
relay has at most one living process, that of its newest epoch; every epoch ends in
exactly one `RelayLost`, unless we ended it ourselves; of several takes of the same
weights only the last is answered.
"""

import asyncio
import importlib.util
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field

from rollweave.core.policy.relay import chunk_bytes
from rollweave.record.trace import RELAYS, Trace
from rollweave.runtime.links.relay import OpenRelay, RelayLink
from rollweave.runtime.manifests import Manifests
from rollweave.runtime.tasks import Tasks
from rollweave.schema.commands import FetchWeights, RemoveRelay, RestartRelay
from rollweave.schema.config.sections import WeightsConfig
from rollweave.schema.errors import WeightsError
from rollweave.schema.events import (
    Event,
    FetchFailed,
    FetchStalled,
    RefusalReason,
    RelayJoined,
    RelayLost,
    RelayRecovered,
    RelaySuspected,
    WeightsFetched,
)
from rollweave.schema.weights import (
    FetchReply,
    FetchVersion,
    RelayAddress,
    RelaySpec,
    TransportName,
    VersionFailed,
    VersionFetched,
    VersionStalled,
    WeightManifest,
)

FIRST_HOST = ipaddress.IPv4Address("127.0.0.2")
"""Machines are loopback addresses from here on: each looks like a host of its own, and
`tc` can tell them apart.
"""


START_S = 1e-3
"""Seconds that a chunk costs beyond its bytes: its frame, its digest, and waking
whoever waits for it.
"""
BYTE_S = 1e-9
"""Seconds of a byte until one has travelled: 1 GB/s, about what TCP does on one
machine.
"""

MODULES: dict[TransportName, str] = {"mooncake": "mooncake", "nixl": "nixl"}
"""What a transport needs to be installed, by the name of its extra."""


def missing_extra(config: WeightsConfig) -> str | None:
    """The extra that these relays lack; None if they lack none."""
    module = MODULES.get(config.transport) if config.relays else None
    return (
        config.transport
        if module is not None and importlib.util.find_spec(module) is None
        else None
    )


def host_of(machine: int) -> str:
    """The address that its relay listens on."""
    return str(FIRST_HOST + machine)


@dataclass(slots=True)
class Seat:
    """One epoch of one relay.

    `link` is None until its process is started, `address` until it listens.
    """

    machine: int
    epoch: int
    link: RelayLink | None = None
    address: RelayAddress | None = None
    ours: bool = False  # we are ending it, so its loss is no news
    closed: asyncio.Event = field(default_factory=asyncio.Event)


class Relays:
    """All relays, r0, r1, ….

    What they hold they write down in `manifests`, where engines look for it.
    """

    def __init__(
        self,
        *,
        count: int,
        open_relay: OpenRelay,
        transport: TransportName,
        manifests: Manifests,
        tasks: Tasks,
        post: Callable[[Event], None],
        clock: Callable[[], float],
        trace: Trace,
    ) -> None:
        self._count, self._open, self._transport, self._manifests = (
            count,
            open_relay,
            transport,
            manifests,
        )
        self._tasks, self._post, self._clock, self._trace = tasks, post, clock, trace
        self._seats: dict[str, Seat] = {}
        self._byte_s = BYTE_S

    def start(self) -> None:
        """Start epoch 0 of each: a world begins."""
        for machine in range(self._count):
            self._begin(f"r{machine}", Seat(machine=machine, epoch=0), None)

    def take(self, command: FetchWeights) -> None:
        seat = self._seats.get(command.relay_id)
        if seat is None or seat.link is None:
            return  # its loss is on its way
        try:
            manifest, source = self._origin(command)
        except WeightsError as error:
            self._post(_refused(command, seat, "source", str(error)))
            return
        kept = (*command.keep, command.base_id) if command.base_id is not None else command.keep
        self._manifests.keep(seat.machine, kept)
        chunk = chunk_bytes(
            manifest.nbytes, nodes=len(self._seats), start_s=START_S, byte_s=self._byte_s
        )
        answer = seat.link.take(
            FetchVersion(
                manifest=manifest,
                base_id=command.base_id,
                source=source,
                keep=kept,
                chunk_bytes=chunk,
            )
        )
        self._tasks.spawn(
            self._taken(command, seat, answer), f"take {command.weights_id} {command.relay_id}"
        )

    def restart(self, command: RestartRelay) -> None:
        former = self._seats[command.relay_id]
        self._begin(command.relay_id, Seat(machine=former.machine, epoch=command.epoch), former)

    def remove(self, command: RemoveRelay) -> None:
        seat = self._seats.pop(command.relay_id)
        self._end(seat)

    async def close(self) -> None:
        """End every relay, in order if they can."""
        seats = list(self._seats.values())
        self._seats.clear()
        for seat in seats:
            seat.ours = True
        await asyncio.gather(*(seat.link.close() for seat in seats if seat.link is not None))

    def _begin(self, relay_id: str, seat: Seat, former: Seat | None) -> None:
        self._seats[relay_id] = seat
        if former is not None:
            self._end(former)
        self._tasks.spawn(self._live(relay_id, seat, former), f"relay {relay_id}.{seat.epoch}")

    def _end(self, seat: Seat) -> None:
        seat.ours = True
        self._manifests.keep(seat.machine, ())
        if seat.link is not None:
            seat.link.kill()

    async def _live(self, relay_id: str, seat: Seat, former: Seat | None) -> None:
        """One epoch from its start to its loss."""
        try:
            if former is not None:
                await former.closed.wait()
            if seat.ours:
                return
            started = self._clock()
            try:
                spec = RelaySpec(id=relay_id, host=host_of(seat.machine), transport=self._transport)
                seat.link = self._open(
                    spec,
                    lambda silent: self._suspected(relay_id, seat, silent=silent),
                    lambda word: self._stalled(relay_id, seat, word),
                )
                seat.address = (await seat.link.ready()).address
            except (WeightsError, OSError) as error:
                self._lost(relay_id, seat, str(error))
                return
            self._trace.span(RELAYS, relay_id, "start", started, self._clock(), epoch=seat.epoch)
            self._post(RelayJoined(relay_id=relay_id, epoch=seat.epoch))
            self._lost(relay_id, seat, await asyncio.shield(seat.link.lost))
        finally:
            if seat.link is not None:
                seat.link.kill()
            seat.closed.set()

    def _suspected(self, relay_id: str, seat: Seat, *, silent: bool) -> None:
        if not seat.ours:
            self._trace.instant(
                RELAYS, relay_id, "suspected" if silent else "heard again", self._clock()
            )
            kind = RelaySuspected if silent else RelayRecovered
            self._post(kind(relay_id=relay_id, epoch=seat.epoch))

    def _stalled(self, relay_id: str, seat: Seat, word: VersionStalled) -> None:
        source = next(
            (other for other, its in self._seats.items() if its.address == word.source), None
        )
        if not seat.ours and source is not None:
            event = FetchStalled(
                relay_id=relay_id, epoch=seat.epoch, weights_id=word.weights_id, source=source
            )
            self._post(event)

    def _lost(self, relay_id: str, seat: Seat, error: str) -> None:
        if not seat.ours:
            self._manifests.keep(seat.machine, ())
            self._trace.instant(RELAYS, relay_id, "lost", self._clock())
            self._post(RelayLost(relay_id=relay_id, epoch=seat.epoch, error=error))

    def _origin(self, command: FetchWeights) -> tuple[WeightManifest, RelayAddress | None]:
        """What is to be taken, and from where. Raises WeightsError."""
        found = self._manifests.of_trainer if command.source is None else self._manifests.anywhere
        manifest = found(command.weights_id)
        if manifest is None:
            raise WeightsError(f"weights {command.weights_id} are not published any more")
        if command.source is None:
            return manifest, None
        source = self._seats.get(command.source)
        if source is None or source.address is None:
            raise WeightsError(f"relay {command.source} is not there")
        return manifest, source.address

    async def _taken(
        self,
        command: FetchWeights,
        seat: Seat,
        answer: "asyncio.Future[FetchReply | None]",
    ) -> None:
        started = self._clock()
        found = await answer
        if found is None:
            # lost, which is an event of its own, or overtaken by another take of the
            # same weights
            return
        name = f"take {command.weights_id} from {command.source or 'the trainer'}"
        nbytes, error = (
            (found.nbytes, "") if isinstance(found, VersionFetched) else (0, found.error)
        )
        self._trace.span(
            RELAYS,
            command.relay_id,
            name,
            started,
            self._clock(),
            base=command.base_id,
            nbytes=nbytes,
            error=error,
        )
        if isinstance(found, VersionFailed):
            self._post(_refused(command, seat, found.reason, found.error))
            return
        if command.source is not None and command.base_id is None and found.nbytes:
            self._byte_s = found.seconds / found.nbytes
        if not seat.ours:
            self._manifests.hold(seat.machine, found.manifest)
        held = WeightsFetched(
            relay_id=command.relay_id, epoch=seat.epoch, weights_id=command.weights_id
        )
        self._post(held)


def _refused(command: FetchWeights, seat: Seat, reason: RefusalReason, error: str) -> FetchFailed:
    return FetchFailed(
        relay_id=command.relay_id,
        epoch=seat.epoch,
        weights_id=command.weights_id,
        try_number=command.try_number,
        reason=reason,
        error=error,
    )
