"""A version on its way into a relay's memory: from this host's memory, in parts, or
from another relay, as raw bytes or as deltas. The bytes that have arrived are served
meanwhile.
"""

import asyncio
import functools
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollweave.schema.weights import (
    FetchVersion,
    RelayAddress,
    VersionStalled,
    WeightManifest,
    WeightPart,
)
from rollweave.weights.memory import in_thread
from rollweave.weights.serve import DeltaPiece, ServedVersion, VersionDelta, pull
from rollweave.weights.tcp import Channel, StallDetector, Tcp
from rollweave.weights.transport import (
    Body,
    Delta,
    FetchError,
    KeepAlive,
    Message,
    Range,
    Raw,
    Refused,
    Request,
)
from rollweave.weights.version_store import StoredVersion, VersionWriter, open_source

MAX_PIECE_BYTES = 1 << 30
"""Maximum bytes of payload in one received piece."""

SUPERSEDED = "superseded by another FetchVersion of the same version"


@dataclass
class PendingVersion:
    """A version that is being fetched."""

    manifest: WeightManifest
    commands: deque[FetchVersion] = field(default_factory=deque)
    writer: VersionWriter | None = None
    channel: Channel | None = None
    """Connection to the source from which it arrives."""
    nbytes: int = 0
    started: float = field(default_factory=time.monotonic)
    worker: "asyncio.Task[None] | None" = None
    work: "asyncio.Task[StoredVersion] | None" = None
    expiry: asyncio.TimerHandle | None = None
    cancel_reason: str = SUPERSEDED
    """The error to report for cancelled work."""
    cancelled: bool = False


@dataclass(frozen=True)
class Arrival:
    """The work on a pending version: its bytes go into `writer`, and `version` serves
    them. `stalled` is called, repeatedly, while a source sends nothing. All methods
    raise FetchError.
    """

    transport: Tcp
    stalled: Callable[[VersionStalled], None]
    pending: PendingVersion
    writer: VersionWriter
    version: ServedVersion

    async def load(self, chunk_bytes: int) -> None:
        """Load the version from this host's memory."""
        nbytes = self.writer.manifest.nbytes
        for start in range(0, nbytes, chunk_bytes):
            stop = min(start + chunk_bytes, nbytes)
            self.version.add_piece(start, stop, await in_thread(self.writer.load, start, stop))

    async def fetch_parts(self, command: FetchVersion) -> None:
        """Read this host's parts, for which other relays wait, and receive the rest."""
        manifest = self.writer.manifest
        for part in command.parts:
            if part.source is None:
                try:
                    await self._load_part(manifest.parts[part.part], command.chunk_bytes)
                except FetchError:
                    if command.source is None:
                        raise  # otherwise the source has the part, too
        for part in command.parts:
            if part.source is not None:
                await self._receive_ranges(part.source, manifest.parts[part.part].ranges)
        if command.source is not None:
            await self._receive_ranges(command.source, ((0, manifest.nbytes),))

    async def _load_part(self, part: WeightPart, chunk_bytes: int) -> None:
        """Read a part from this host's memory."""
        origin = open_source(part.location, self.writer.manifest.nbytes)
        try:
            for low, high in self._missing(part.ranges):
                for start in range(low, high, chunk_bytes):
                    stop = min(start + chunk_bytes, high)
                    load = functools.partial(self.writer.load, start, stop, origin=origin)
                    self.version.add_piece(start, stop, await in_thread(load))
        finally:
            os.close(origin)

    async def _receive_ranges(self, source: RelayAddress, ranges: Sequence[Range]) -> None:
        """Receive the missing parts of these ranges, as raw bytes."""

        def received(start: int, stop: int) -> None:
            self.writer.mark_received(start, stop)
            self.pending.nbytes += stop - start
            self.version.add_piece(start, stop)

        def opened(channel: Channel) -> None:
            stalls.channel = channel

        stalls = self._stalls(source)
        try:
            await pull(
                self.transport,
                source,
                self.writer.manifest,
                self._missing(ranges),
                self.writer.destination,
                on_piece=received,
                on_channel=opened,
            )
        finally:
            stalls.close()

    async def receive(
        self, source: RelayAddress, base: StoredVersion | None, deltas: VersionDelta | None
    ) -> None:
        """Receive the missing pieces from another relay, as changes of `base` where the
        relay has them; these are passed on as `deltas`.
        """
        manifest, writer, where = self.writer.manifest, self.writer, f"{source.host}:{source.port}"
        encoded = bytearray()

        def allocate(message: Message, nbytes: int) -> memoryview:
            nonlocal encoded
            if (
                not isinstance(message, Raw | Delta)
                or message.start != writer.contiguous
                or message.stop - message.start > MAX_PIECE_BYTES
            ):
                raise FetchError(
                    "broken", f"expected the piece from byte {writer.contiguous} on, got {message}"
                )
            view = writer.destination(message.start, message.stop)
            if isinstance(message, Raw) and nbytes == len(view):
                return view
            if (
                not isinstance(message, Delta)
                or base is None
                or nbytes > 2 * len(view) + MAX_PIECE_BYTES // 1024
            ):
                raise FetchError("broken", f"{nbytes} bytes do not fit {message}")
            encoded = bytearray(nbytes)
            return memoryview(encoded)

        stalls = self._stalls(source)
        channel: Channel | None = None
        try:
            channel = stalls.channel = await self.transport.connect(source)
            self.pending.channel = channel
            await channel.send(self._request(base))
            while writer.contiguous < manifest.nbytes:
                message, checksum = await channel.receive(allocate)
                match message:
                    case Raw(start=start, stop=stop):
                        writer.mark_received(start, stop)
                        self.pending.nbytes += stop - start
                        if deltas is not None:
                            self.version.close_delta(deltas)
                        self.version.add_piece(start, stop, checksum)
                    case Delta(start=start, stop=stop, sizes=sizes) if (
                        base is not None and deltas is not None
                    ):
                        data = memoryview(encoded)
                        await in_thread(writer.apply_delta, start, stop, data, sizes, base)
                        self.pending.nbytes += len(data)
                        piece = DeltaPiece(stop, sizes, Body(len(data), checksum, data))
                        deltas.open = True
                        self.version.add_delta_piece(deltas, start, piece)
                        self.version.add_piece(start, stop)
                    case Refused(reason=reason, error=error):
                        raise FetchError(reason, f"{where} refuses: {error}")
                    case KeepAlive():
                        pass
                    case _:
                        raise FetchError("broken", f"{where} sent {type(message).__name__}")
        finally:
            stalls.close()
            self.pending.channel = None
            if channel is not None:
                channel.close()

    def _stalls(self, source: RelayAddress) -> StallDetector:
        publication_id = self.writer.manifest.publication_id
        stall = VersionStalled(publication_id=publication_id, source=source)
        return StallDetector(lambda: self.stalled(stall))

    def _missing(self, ranges: Sequence[Range]) -> list[Range]:
        """Return the parts of these ranges that the writer lacks."""
        return [gap for low, high in ranges for gap in self.writer.received.missing(low, high)]

    def _request(self, base: StoredVersion | None) -> Request:
        """Return the request for all bytes that the writer lacks, as changes of `base`
        if given.
        """
        manifest, done = self.writer.manifest, self.writer.contiguous
        return Request(
            publication_id=manifest.publication_id,
            digest=manifest.digest,
            nbytes=manifest.nbytes,
            ranges=((done, manifest.nbytes),) if manifest.nbytes > done else (),
            base=base.identity if base is not None else None,
        )
