"""A relay: fetches versions into this host's memory, and serves the bytes that have
arrived while the rest is still arriving (Laminar §4).

Invariants: every `FetchVersion` is answered once, and commands for one version are
answered in order; engines see a version only when it is complete and verified; a failed
fetch changes nothing, and the bytes received so far wait a while for a `FetchVersion`
from another source, which resumes after the last complete piece, so that no piece is
received twice. Several versions may arrive at the same time, each into its own memory;
versions that the newest `FetchVersion` does not keep are evicted. Memory is bounded by
the versions kept, the versions arriving, and the deltas of the newest two versions.
"""

import asyncio
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollweave.schema.weights import (
    FetchReply,
    FetchVersion,
    RelayAddress,
    RelayReply,
    ServePart,
    VersionFailed,
    VersionFetched,
    WeightManifest,
    WeightPart,
)
from rollweave.weights.arrivals import SUPERSEDED, Arrival, PendingVersion
from rollweave.weights.memory import in_thread
from rollweave.weights.serve import (
    Broadcast,
    DeltaPiece,
    ServedVersion,
    VersionDelta,
    serve_version,
)
from rollweave.weights.tcp import Channel, Listener, Tcp
from rollweave.weights.transport import Body, FetchError, Range, Refused, Request
from rollweave.weights.version_store import (
    StoredVersion,
    VersionStore,
    VersionWriter,
    check_same,
    chunks_of,
    close_all,
    encode_spans,
    open_source,
)

CHUNK_BYTES = 4 << 20
"""Maximum bytes of a piece of a part: its checksum is computed before it is sent."""

LINGER_S = 60.0
"""Seconds that a partly received version waits for another source: much longer than a
controller takes to find one.
"""

DELTA_VERSIONS = 2
"""Number of newest versions whose deltas are kept: the version in transit, and the
version before it for relays that are late.
"""

ENCODERS = 4
"""Maximum number of threads that encode deltas."""


class ServedPart:
    """A part in the trainer's memory, open as `fd`."""

    def __init__(self, manifest: WeightManifest, part: WeightPart, fd: int) -> None:
        self.part, self.version = part, ServedVersion(manifest, fd)
        for low, high in part.ranges:
            for start in range(low, high, CHUNK_BYTES):
                self.version.add_piece(start, min(start + CHUNK_BYTES, high))

    def has(self, ranges: Sequence[Range]) -> bool:
        """Return whether these bytes are in this part."""
        return all(
            any(low <= start and stop <= high for low, high in self.part.ranges)
            for start, stop in ranges
        )

    def close(self, reason: str) -> None:
        """Release the memory, and report the reason to relays that read the part."""
        self.version.withdraw(reason)
        os.close(self.version.fd)


class Relay:
    """A relay without its process. `report` receives its answers."""

    def __init__(
        self,
        transport: Tcp,
        report: Callable[[RelayReply], None],
        *,
        linger_s: float = LINGER_S,
    ) -> None:
        self._transport, self._report, self._linger_s = transport, report, linger_s
        self._store = VersionStore()
        self._served: dict[int, ServedVersion] = {}
        self._parts: list[ServedPart] = []
        """Parts of one version that is not fetched here."""
        self._pending: dict[int, PendingVersion] = {}
        self._keep: set[int] = set()
        self._arrivals = Broadcast()
        self._encoding: dict[int, asyncio.Task[None]] = {}
        self._freeing: set[asyncio.Task[None]] = set()
        self._pool = ThreadPoolExecutor(
            min(ENCODERS, os.cpu_count() or 1), thread_name_prefix="encode"
        )
        self._listener: Listener | None = None

    async def listen(self, host: str) -> RelayAddress:
        """Start to serve other relays. Raises OSError."""
        self._listener = await self._transport.listen(host, self._serve)
        return self._listener.address

    def fetch(self, command: FetchVersion) -> None:
        """Start to fetch a version. The answer is reported later."""
        publication_id = command.manifest.publication_id
        self._keep = {*command.keep, publication_id}
        for other, pending in list(self._pending.items()):
            if other not in self._keep:
                self._cancel(
                    pending,
                    f"evicted: the FetchVersion of publication {publication_id} does not keep it",
                )
        pending = self._pending.setdefault(publication_id, PendingVersion(command.manifest))
        pending.cancel_reason, pending.cancelled = SUPERSEDED, False
        if pending.expiry is not None:
            pending.expiry.cancel()
        pending.commands.append(command)
        if pending.work is not None and _supersedes(command, pending.commands[0]):
            pending.work.cancel()
        if pending.worker is None:
            pending.worker = asyncio.get_running_loop().create_task(
                self._run_commands(pending), name=f"fetch {publication_id}"
            )

    def serve_part(self, command: ServePart) -> None:
        """Serve a part from the trainer's memory; parts of other versions are
        dropped.
        """
        manifest, part = command.manifest, command.manifest.parts[command.part]
        for served in [s for s in self._parts if s.version.manifest != manifest]:
            self._parts.remove(served)
            served.close(f"publication {manifest.publication_id} has been published")
        if any(served.part == part for served in self._parts):
            return
        try:
            fd = open_source(part.location, manifest.nbytes)
        except FetchError as error:
            print(error, file=sys.stderr)
            return  # requests for it are refused
        self._parts.append(ServedPart(manifest, part, fd))
        self._arrivals.notify_all()

    def manifest(self, publication_id: int) -> WeightManifest | None:
        """Return the manifest of a stored version."""
        stored = self._store.get(publication_id)
        return stored.manifest if stored is not None else None

    def progress(self) -> tuple[int, int]:
        """Return the bytes that have arrived of the version that is being fetched, and
        its size; zeros if none is.
        """
        for pending in self._pending.values():
            if pending.work is not None:
                received = pending.writer.contiguous if pending.writer is not None else 0
                if pending.channel is not None:
                    received += pending.channel.received_bytes
                return min(received, pending.manifest.nbytes), pending.manifest.nbytes
        return 0, 0

    async def close(self) -> None:
        """Release everything. Fetches in progress are not answered."""
        if self._listener is not None:
            await self._listener.close()
        tasks: list[asyncio.Task[Any]] = [*self._encoding.values()]
        for pending in self._pending.values():
            if pending.expiry is not None:
                pending.expiry.cancel()
            tasks.extend(task for task in (pending.worker, pending.work) if task is not None)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for pending in self._pending.values():
            if pending.writer is not None:
                pending.writer.close()
        for served in self._parts:
            served.close("the relay ends")
        if self._freeing:
            await asyncio.wait(self._freeing)
        self._pool.shutdown(cancel_futures=True)
        self._store.close()

    # Fetching.

    async def _run_commands(self, pending: PendingVersion) -> None:
        """Execute the commands of one version. Only the last command counts."""
        publication_id = pending.manifest.publication_id
        while pending.commands:
            command = pending.commands[0]
            if pending.cancelled or any(
                _supersedes(other, command) for other in list(pending.commands)[1:]
            ):
                answer: FetchReply = VersionFailed(
                    publication_id=publication_id, reason="source", error=pending.cancel_reason
                )
            else:
                pending.work = asyncio.get_running_loop().create_task(
                    self._fetch_version(command, pending)
                )
                await asyncio.wait([pending.work])
                answer, pending.work = self._answer(pending, pending.work), None
            pending.commands.popleft()
            self._report(answer)
        pending.worker = None
        if self._store.get(publication_id) is not None:
            del self._pending[publication_id]
        elif pending.writer is None or pending.cancelled:
            self._remove(pending)
        else:
            reason = f"no other source was named within {self._linger_s:g} s"
            pending.expiry = asyncio.get_running_loop().call_later(
                self._linger_s, self._cancel, pending, reason
            )

    def _answer(self, pending: PendingVersion, work: "asyncio.Task[StoredVersion]") -> FetchReply:
        publication_id = pending.manifest.publication_id
        if work.cancelled():
            return VersionFailed(
                publication_id=publication_id, reason="source", error=pending.cancel_reason
            )
        error = work.exception()
        if error is None:
            seconds = time.monotonic() - pending.started
            return VersionFetched(
                manifest=work.result().manifest, nbytes=pending.nbytes, seconds=seconds
            )
        if isinstance(error, FetchError):
            return VersionFailed(
                publication_id=publication_id, reason=error.reason, error=str(error)
            )
        traceback.print_exception(error, file=sys.stderr)
        return VersionFailed(
            publication_id=publication_id, reason="broken", error=f"{type(error).__name__}: {error}"
        )

    async def _fetch_version(self, command: FetchVersion, pending: PendingVersion) -> StoredVersion:
        """Fetch and store the version. Raises FetchError."""
        manifest = command.manifest
        check_same(pending.manifest, manifest)
        self._store.check(manifest)
        stored = self._store.get(manifest.publication_id)
        if stored is not None:
            self._evict_unneeded()
            return stored
        base = self._store.base_version(command.base_id) if command.base_id is not None else None
        writer = await self._open_writer(command, pending)
        version = self._served[manifest.publication_id]
        deltas = version.expect_delta(base.identity if base is not None else None)
        arrival = Arrival(self._transport, self._report, pending, writer, version)
        if command.parts:
            await arrival.fetch_parts(command)
        elif command.source is not None:
            await arrival.receive(command.source, base, deltas)
        else:
            try:
                await arrival.load(command.chunk_bytes)
            except BaseException:
                # no other source can continue in memory that this relay does not own
                self._discard(pending, "it could not be read from memory")
                raise
        pending.writer = None  # complete or broken, it is no longer a partial version
        try:
            stored = writer.finish()
        except FetchError as error:
            self._withdraw(manifest.publication_id, str(error))
            raise
        self._store.add(stored)
        # a relay that reads locally, or in parts, has received no deltas
        encodes = command.source is None or command.parts
        if deltas is not None and base is not None and encodes:
            encoding = self._encode(version, deltas, base, stored, command.chunk_bytes)
            self._encoding[manifest.publication_id] = asyncio.get_running_loop().create_task(
                encoding
            )
        self._evict_unneeded()
        return stored

    async def _open_writer(self, command: FetchVersion, pending: PendingVersion) -> VersionWriter:
        """Return the writer of the version: the existing one, or a new one.

        Raises FetchError.
        """
        remote = command.source is not None or bool(command.parts)
        if pending.writer is not None and remote:
            return pending.writer
        open_writer = self._store.create if remote else self._store.open_local
        try:
            writer = await in_thread(open_writer, command.manifest, undo=VersionWriter.close)
        except FetchError as error:
            base = set() if command.base_id is None else {command.base_id}
            if error.reason != "room":
                raise
            self._evict(self._keep | base)
            if not self._freeing:
                raise
            await asyncio.wait(self._freeing)
            writer = await in_thread(open_writer, command.manifest, undo=VersionWriter.close)
        publication_id = command.manifest.publication_id
        version = self._served.get(publication_id)
        if version is not None and not remote:
            version.fd = writer.fd  # the same bytes, in the publisher's memory
        else:
            self._withdraw(publication_id, "it is fetched again")
            self._served[publication_id] = ServedVersion(command.manifest, writer.fd)
            self._arrivals.notify_all()
        if pending.writer is not None:
            pending.writer.close()
        pending.writer = writer
        return writer

    async def _encode(
        self,
        version: ServedVersion,
        deltas: VersionDelta,
        base: StoredVersion,
        stored: StoredVersion,
        chunk_bytes: int,
    ) -> None:
        """Encode the deltas against `base` that were not received, once for all
        clients.
        """
        # The views stay readable, even if the versions are evicted.
        old, new = base.view(), stored.view()
        try:
            for chunk in chunks_of(version.manifest, chunk_bytes):
                rest = tuple(span for span in chunk.spans if span.start >= deltas.stop)
                if not rest:
                    continue
                blocks = await in_thread(
                    encode_spans, rest, old.__getitem__, new.__getitem__, self._pool
                )
                if version.withdrawn or not deltas.open:
                    return
                sizes = tuple(len(block) for block in blocks)
                version.add_delta_piece(
                    deltas,
                    rest[0].start,
                    DeltaPiece(rest[-1].stop, sizes, Body.of(b"".join(blocks))),
                )
        finally:
            version.close_delta(deltas)

    # Eviction.

    def _evict_unneeded(self) -> None:
        """Evict what is no longer needed, after a version has arrived."""
        self._evict(self._keep)
        for publication_id in sorted(self._store.ids())[:-DELTA_VERSIONS]:
            self._served[publication_id].drop_deltas()
        for publication_id, encoding in list(self._encoding.items()):
            if encoding.done():
                del self._encoding[publication_id]

    def _evict(self, keep: set[int]) -> None:
        """Evict versions. Gigabytes are freed in a thread, so that serving and
        heartbeats continue.
        """
        evicted = self._store.evict_except(keep)
        for stored in evicted:
            publication_id = stored.manifest.publication_id
            self._withdraw(publication_id, f"publication {publication_id} was evicted")
        if evicted:
            freeing = asyncio.get_running_loop().create_task(
                in_thread(close_all, evicted), name="free memory"
            )
            self._freeing.add(freeing)
            freeing.add_done_callback(self._freeing.discard)

    def _cancel(self, pending: PendingVersion, reason: str) -> None:
        """Stop fetching this version. If it has a worker, the worker cleans up."""
        pending.cancel_reason, pending.cancelled = reason, True
        if pending.work is not None:
            pending.work.cancel()
        if pending.worker is None:
            self._remove(pending)

    def _remove(self, pending: PendingVersion) -> None:
        if pending.expiry is not None:
            pending.expiry.cancel()
        del self._pending[pending.manifest.publication_id]
        self._discard(pending, pending.cancel_reason)

    def _discard(self, pending: PendingVersion, reason: str) -> None:
        """Discard the received bytes."""
        if pending.writer is not None:
            pending.writer.close()
            pending.writer = None
            self._withdraw(pending.manifest.publication_id, reason)

    def _withdraw(self, publication_id: int, reason: str) -> None:
        version = self._served.pop(publication_id, None)
        if version is not None:
            version.withdraw(reason)

    # Serving.

    def _find(self, request: Request) -> ServedVersion | None:
        """Return the requested version, or the part of it that is served here."""
        version = self._served.get(request.publication_id)
        if version is not None:
            return version
        parts = (
            served.version
            for served in self._parts
            if served.version.manifest.publication_id == request.publication_id
            and served.has(request.ranges[:1])
        )
        return next(parts, None)

    async def _serve(self, channel: Channel) -> None:
        message, _ = await channel.receive()
        if isinstance(message, Request):
            await serve_version(channel, message, self._find, self._arrivals)
        else:
            error = f"a relay answers Request, got {type(message).__name__}"
            await channel.send(Refused(reason="source", error=error))


def _supersedes(later: FetchVersion, command: FetchVersion) -> bool:
    """Return whether `later`, sent after `command`, supersedes it: both want the same
    bytes.
    """
    return later.manifest.digest == command.manifest.digest
