"""Execute the core's commands about relays, and report the results; and the link to
one relay, which sends fetches of versions and receives their results.

Each relay is a process that listens on its host's address. Invariants: those of
`runtime/supervisors/supervisor.py`; if several fetches of the same weights overlap,
only the last one is answered; every `fetch` of a link has one result, at the latest
once the relay is lost; `on_suspected` is called with True and False in turn, and never
after the loss.

Silence is measured in missed heartbeats, on a clock that runs only while our own event
loop does: each tick is scheduled when the former one was handled, and frames that wait
in the socket are read before a tick is handled. However long our own loop was blocked,
it adds at most one heartbeat to a relay's silence.
"""

import asyncio
import importlib.util
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rollweave.core.mechanisms.relays.state import relay_id
from rollweave.core.policy.relay import chunk_bytes
from rollweave.io.child import Spawn
from rollweave.io.extras import how_to_install, how_to_install_distribution
from rollweave.io.wire import decoder_of, encode
from rollweave.record.trace import RELAYS, Trace
from rollweave.runtime.hosts.hosts import Hosts
from rollweave.runtime.supervisors.engines import Manifests
from rollweave.runtime.supervisors.supervisor import ProcessLink, Supervised, TracedSupervisor
from rollweave.runtime.tasks import Tasks
from rollweave.schema.commands import FetchWeights, RemoveRelay, RestartRelay
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import FieldError, WeightsError
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
from rollweave.schema.hosts import Program, Share
from rollweave.schema.weights import (
    HEARTBEAT_S,
    FetchReply,
    FetchVersion,
    PartSource,
    RelayAddress,
    RelayHeartbeat,
    RelayReady,
    RelayReply,
    RelaySpec,
    ServePart,
    StopRelay,
    TransportName,
    VersionFailed,
    VersionFetched,
    VersionStalled,
    WeightManifest,
)
from rollweave.weights.transport import GROUP_DISTRIBUTION

T = TypeVar("T")

SUSPECT_BEATS = 3
"""Number of missed heartbeats in a row after which a relay is suspected.

After a wrong suspicion, the relays that fetch from it only use another source.
"""

SILENT_S = 5.0
"""Seconds without a heartbeat after which a relay counts as lost, and is killed: more
than a busy machine delays it.
"""

START_S = 60.0
"""Maximum time for a relay to start an interpreter, import numpy and listen, in
seconds.
"""

CLOSE_S = 5.0
"""Maximum time for a relay to end by itself, in seconds."""

_decode = decoder_of(RelayReply)


class RelayLostError(WeightsError):
    """The relay's process has ended, or was killed because it was silent."""


OnSuspected = Callable[[bool], None]
"""Receives True after `SUSPECT_BEATS` missed heartbeats, and False at the next
frame.
"""

OnStalled = Callable[[VersionStalled], None]
"""Receives the report that a fetch makes no progress."""


class RelayLink(ProcessLink[RelayReady]):
    """The link to one relay, a process whose first frame is a `RelaySpec`."""

    def __init__(
        self,
        spec: RelaySpec,
        on_suspected: OnSuspected,
        on_stalled: OnStalled,
        *,
        spawn: Spawn,
        log: Path,
        silent_s: float = SILENT_S,
        start_s: float = START_S,
    ) -> None:
        super().__init__(
            "relay",
            spec.id,
            spec,
            spawn=spawn,
            log=log,
            start_s=start_s,
            stop=StopRelay(),
            close_s=CLOSE_S,
            lost_error=RelayLostError,
        )
        self._silent_s = silent_s
        self._on_suspected, self._on_stalled = on_suspected, on_stalled
        self._missed = 0
        """Number of missed heartbeats in a row."""
        self._heartbeat = RelayHeartbeat()
        """The newest heartbeat."""
        self._fetches: dict[int, deque[tuple[str, asyncio.Future[FetchReply | None]]]] = {}
        """Unanswered fetches by version, with their digests.

        A relay answers all of them, those of one version in the order in which they
        were sent.
        """

    @property
    def progress(self) -> tuple[int, int]:
        """The bytes of the version that it fetches which have arrived, and the size of
        that version; zeros if it fetches none.
        """
        return self._heartbeat.received, self._heartbeat.whole

    def fetch(self, command: FetchVersion) -> "asyncio.Future[FetchReply | None]":
        """Let the relay fetch a version, and return the result.

        The result is None if the relay is lost, or if a later fetch of the same version
        (the same bytes under one id) from another source replaces this one.
        """
        result: asyncio.Future[FetchReply | None] = self._loop.create_future()
        if self.lost.done():
            result.set_result(None)
            return result
        digest = command.manifest.digest
        fetches = self._fetches.setdefault(command.manifest.publication_id, deque())
        for other, replaced in fetches:
            if other == digest:
                _resolve(replaced, None)
        fetches.append((digest, result))
        self._child.send(encode(command))
        return result

    def serve_part(self, command: ServePart) -> None:
        """Let the relay serve what the trainer's ranks have published on its host."""
        if not self.lost.done():
            self._child.send(encode(command))

    def _on_frame(self, payload: bytes) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(HEARTBEAT_S, self._on_missed)
        missed, self._missed = self._missed, 0
        if missed >= SUSPECT_BEATS:
            self._on_suspected(False)
        match _decode(payload):
            case RelayReady() as ready:
                _resolve(self._ready, ready)
            case VersionFetched() as taken:
                self._on_result(taken.manifest.publication_id, taken)
            case VersionFailed() as failed:
                self._on_result(failed.publication_id, failed)
            case VersionStalled() as stalled:
                self._on_stalled(stalled)
            case RelayHeartbeat() as heartbeat:
                self._heartbeat = heartbeat

    def _on_missed(self) -> None:
        """Count a missed heartbeat."""
        self._missed += 1
        if self._missed * HEARTBEAT_S >= self._silent_s:
            self._give_up(f"sent nothing for {self._silent_s:g} s")
            return
        self._timer = self._loop.call_later(HEARTBEAT_S, self._on_missed)
        if self._missed == SUSPECT_BEATS:
            self._on_suspected(True)

    def _on_result(self, publication_id: int, result: FetchReply) -> None:
        fetches = self._fetches.get(publication_id)
        if fetches is None:
            return self._give_up(
                f"answered a fetch of weights {publication_id} that was never sent"
            )
        _resolve(fetches.popleft()[1], result)
        if not fetches:
            del self._fetches[publication_id]
        return None

    def _on_gone(self, reason: str) -> None:
        super()._on_gone(reason)
        while self._fetches:
            for _, result in self._fetches.popitem()[1]:
                _resolve(result, None)


def _resolve(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


CHUNK_S = 1e-3
"""Seconds that a chunk costs beyond its bytes: frame, digest, and a wake-up of the
receiver.
"""

BYTE_S = 1e-9
"""Assumed seconds per byte until a transfer was measured: 1 GB/s, about the speed of
TCP on one machine.
"""

MODULES = {"mooncake": "mooncake", "nixl": "nixl", "collective": "rollweave_collective"}
"""Module that a transport needs. The transport is also the name of the extra that
installs it, but that of a group is a distribution of its own.
"""


def check_transport(config: RunConfig) -> None:
    """Raise FieldError if the package of `weights.transport` is not installed."""
    transport = config.weights.transport
    module = MODULES.get(transport)
    if module is not None and importlib.util.find_spec(module) is None:
        command = how_to_install_distribution(GROUP_DISTRIBUTION)
        if not config.weights.collective:
            command = how_to_install(transport)
        rule = f"be installed ({command})"
        raise FieldError("weights.transport", rule, transport)


OpenRelay = Callable[[Spawn, RelaySpec, OnSuspected, OnStalled], RelayLink]
"""Start a relay by this `Spawn`. Raises OSError."""


@dataclass(slots=True, eq=False, kw_only=True)
class RelayProcess(Supervised[RelayLink]):
    """One epoch of one relay."""

    host: int
    address: RelayAddress | None = None
    """None until the relay listens."""


class RelaySupervisor(TracedSupervisor[RelayProcess, RelayReady]):
    """All relays of a world, r0, r1, and so on.

    It records in `manifests` which versions they have, where engines look them up.
    """

    category = RELAYS

    def __init__(
        self,
        *,
        hosts: Hosts,
        open_relay: OpenRelay,
        transport: TransportName,
        manifests: Manifests,
        tasks: Tasks,
        post: Callable[[Event], None],
        clock: Callable[[], float],
        trace: Trace,
    ) -> None:
        super().__init__(tasks=tasks, post=post, clock=clock, trace=trace)
        self._hosts, self._manifests = hosts, manifests
        self._open_relay, self._transport = open_relay, transport
        self._byte_s = BYTE_S

    def start(self, count: int) -> None:
        """Start epoch 0 of the relays of the first `count` hosts, at the beginning of a
        life.
        """
        for host in range(count):
            self._begin(RelayProcess(name=relay_id(host), epoch=0, host=host))

    def fetch(self, command: FetchWeights) -> None:
        relay = self._processes.get(command.relay_id)
        if relay is None or relay.link is None:
            return  # the event of its loss follows
        try:
            manifest, source = self._origin(command)
            parts = self._parts(command, relay.host)
        except WeightsError as error:
            self._post(_failed(command, relay, "source", str(error)))
            return
        keep = (*command.keep, command.base_id) if command.base_id is not None else command.keep
        self._manifests.keep(relay.host, keep)
        chunk = chunk_bytes(
            manifest.nbytes, nodes=len(self._processes), start_s=CHUNK_S, byte_s=self._byte_s
        )
        reply = relay.link.fetch(
            FetchVersion(
                manifest=manifest,
                base_id=command.base_id,
                source=source,
                parts=parts,
                keep=keep,
                chunk_bytes=chunk,
            )
        )
        self._tasks.spawn(
            self._fetch(command, relay, reply), f"fetch {command.publication_id} {command.relay_id}"
        )

    def restart(self, command: RestartRelay) -> None:
        self._manifests.keep(command.host, ())
        self._begin(RelayProcess(name=command.relay_id, epoch=command.epoch, host=command.host))

    def remove(self, command: RemoveRelay) -> None:
        relay = self._remove(command.relay_id)
        if relay is not None:
            self._manifests.keep(relay.host, ())

    def progress(self) -> dict[str, tuple[int, int]]:
        """Return the progress of each running relay (`RelayLink.progress`)."""
        links = {name: relay.link for name, relay in self._processes.items()}
        return {name: link.progress for name, link in links.items() if link is not None}

    async def _open(self, relay: RelayProcess) -> RelayReady:
        host = self._hosts.host(relay.host)
        spec = RelaySpec(id=relay.name, host=host.address, transport=self._transport)
        relay.link = self._open_relay(
            host.starting(Program.RELAY, Share()),
            spec,
            lambda silent: self._on_suspected(relay, silent=silent),
            lambda message: self._on_stalled(relay, message),
        )
        return await relay.link.ready()

    def _on_ready(self, relay: RelayProcess, ready: RelayReady) -> None:
        relay.address = ready.address
        super()._on_ready(relay, ready)
        self._post(RelayJoined(relay_id=relay.name, epoch=relay.epoch))

    def _on_lost(self, relay: RelayProcess, error: Exception | str) -> None:
        self._manifests.keep(relay.host, ())
        super()._on_lost(relay, error)
        self._post(RelayLost(relay_id=relay.name, epoch=relay.epoch, error=str(error)))

    def _on_suspected(self, relay: RelayProcess, *, silent: bool) -> None:
        if relay.retired:
            return
        self._mark(relay.name, "suspected" if silent else "recovered")
        kind = RelaySuspected if silent else RelayRecovered
        self._post(kind(relay_id=relay.name, epoch=relay.epoch))

    def _on_stalled(self, relay: RelayProcess, message: VersionStalled) -> None:
        source = next(
            (other.name for other in self._processes.values() if other.address == message.source),
            None,
        )
        if not relay.retired and source is not None:
            event = FetchStalled(
                relay_id=relay.name,
                epoch=relay.epoch,
                publication_id=message.publication_id,
                source=source,
            )
            self._post(event)

    def _origin(self, command: FetchWeights) -> tuple[WeightManifest, RelayAddress | None]:
        """Return the weights to fetch and their source; None stands for the trainer.

        Raises WeightsError.
        """
        locate = self._manifests.of_trainer if command.source is None else self._manifests.anywhere
        manifest = locate(command.publication_id)
        if manifest is None:
            raise WeightsError(f"weights {command.publication_id} are no longer published")
        if command.source is None:
            return manifest, None
        source = self._processes.get(command.source)
        if source is None or source.address is None:
            raise WeightsError(f"relay {command.source} is not running")
        return manifest, source.address

    def _parts(self, command: FetchWeights, host: int) -> tuple[PartSource, ...]:
        """Return the sources from which this host's relay gets the parts of a version
        that ranks on several hosts have published. The relays of the other hosts begin
        to serve theirs.

        Raises WeightsError.
        """
        parts = []
        for number, holder in enumerate(self._manifests.part_hosts(command.publication_id)):
            if self._hosts.share_memory(holder, host):
                parts.append(PartSource(part=number))
            elif command.source is None:
                relay = self._processes.get(relay_id(holder))
                manifest = self._manifests.of_trainer(command.publication_id)
                if relay is None or relay.link is None or relay.address is None:
                    raise WeightsError(f"relay {relay_id(holder)} is not running")
                if manifest is not None:
                    relay.link.serve_part(ServePart(manifest=manifest, part=number))
                parts.append(PartSource(part=number, source=relay.address))
        return tuple(parts)

    async def _fetch(
        self, command: FetchWeights, relay: RelayProcess, reply: "asyncio.Future[FetchReply | None]"
    ) -> None:
        """Wait for the result of a fetch, and report it."""
        started = self._clock()
        result = await reply
        if result is None:
            # the relay is lost, which is an event by itself, or a later fetch of the
            # same weights replaced this one
            return
        name = f"take {command.publication_id} from {command.source or 'the trainer'}"
        nbytes, error = (
            (result.nbytes, "") if isinstance(result, VersionFetched) else (0, result.error)
        )
        details = {"base": command.base_id, "nbytes": nbytes, "error": error}
        self._span(command.relay_id, name, started, **details)
        if isinstance(result, VersionFailed):
            self._post(_failed(command, relay, result.reason, result.error))
            return
        if command.source is not None and command.base_id is None and result.nbytes:
            self._byte_s = result.seconds / result.nbytes
        if not relay.retired:
            self._manifests.add(relay.host, result.manifest)
        self._post(
            WeightsFetched(
                relay_id=command.relay_id,
                epoch=relay.epoch,
                publication_id=command.publication_id,
                nbytes=result.nbytes,
            )
        )


def _failed(
    command: FetchWeights, relay: RelayProcess, reason: RefusalReason, error: str
) -> FetchFailed:
    return FetchFailed(
        relay_id=command.relay_id,
        epoch=relay.epoch,
        publication_id=command.publication_id,
        fetch_number=command.fetch_number,
        reason=reason,
        error=error,
    )
