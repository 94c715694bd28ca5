"""A store of versions in the memory of a host near the engines (RollArt §6.3; ROSE §4.2
and App. F).

The trainer's ranks write a version once, in buckets, over the slow link between
clusters, each its own bytes. The hosts of engines read what they need over fast links,
full versions or their own shards, as soon as a bucket is there. Push and pull overlap
each other and the rollout: engines wait only for the remainder of the pull.

Invariants: a version counts only once its whole payload has the digest of its manifest;
a version that is incomplete, damaged or not made from the base that it names is
dropped, which is reported to everything that sends or reads it, and affects no other; a
bucket that has arrived is not requested again. A relay can fetch from a store as from a
relay: it sends `Request`, and verifies the version itself.
"""

import asyncio

from rollweave.schema.weights import RelayAddress, WeightManifest
from rollweave.weights.memory import Ranges, in_thread
from rollweave.weights.protocol import (
    Base,
    Complete,
    Delta,
    FetchError,
    KeepAlive,
    Message,
    Missing,
    Push,
    Range,
    Raw,
    Refused,
    Request,
    within,
)
from rollweave.weights.serve import Broadcast, DeltaPiece, ServedVersion, serve_version
from rollweave.weights.transport import Body, Channel, Listener, Transport
from rollweave.weights.version_store import (
    StoredVersion,
    VersionStore,
    VersionWriter,
    check_same,
    close_all,
)

BUCKET_BYTES = 64 << 20
"""Bytes of payload in one bucket: ROSE's size (§4.2)."""

MAX_BUCKET_BYTES = 1 << 30
"""Maximum bytes of a received bucket."""

LINGER_S = 60.0
"""Seconds without a bucket after which an incomplete version is dropped."""


class _Upload:
    """A version that is being pushed.

    `claimed` are bytes that have arrived or are arriving.
    """

    def __init__(self, writer: VersionWriter, version: ServedVersion) -> None:
        self.writer, self.version = writer, version
        self.claimed = Ranges()
        self.writing = asyncio.Lock()
        self.senders = 0
        """Number of connections that send buckets. While there are none, the version
        waits only for a while.
        """
        self.expiry: asyncio.TimerHandle | None = None

    def claimed_by(self, message: Message, nbytes: int, base: StoredVersion | None) -> Range:
        """Return the bytes that a bucket claims, which no other bucket has claimed.

        Raises FetchError (broken).
        """
        if self.version.withdrawn:
            raise FetchError("broken", self.version.withdrawn)
        if not isinstance(message, Raw | Delta) or not within(
            ((message.start, message.stop),), self.writer.manifest.nbytes
        ):
            raise FetchError("broken", f"{nbytes} bytes do not fit {message}")
        if (isinstance(message, Raw) and nbytes != message.stop - message.start) or (
            isinstance(message, Delta) and base is None
        ):
            raise FetchError("broken", f"{nbytes} bytes do not fit {message}")
        if self.claimed.touches(message.start, message.stop):
            raise FetchError(
                "broken",
                f"bytes {message.start} to {message.stop} were sent twice: "
                "senders must not overlap",
            )
        self.claimed.add(message.start, message.stop)
        return message.start, message.stop


class RemoteStore:
    """Keeps the newest `keep` complete versions in the memory of this process."""

    def __init__(self, transport: Transport, *, keep: int = 2, linger_s: float = LINGER_S) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._transport, self._keep, self._linger_s = transport, keep, linger_s
        self._store = VersionStore()
        self._uploads: dict[int, _Upload] = {}
        self._served: dict[int, ServedVersion] = {}
        self._arrivals = Broadcast()
        self._opening = asyncio.Lock()
        self._listener: Listener | None = None

    async def listen(self, host: str) -> RelayAddress:
        """Start to serve. Raises OSError."""
        self._listener = await self._transport.listen(host, self._serve)
        return self._listener.address

    def ids(self) -> list[int]:
        """Return the ids of the complete versions."""
        return self._store.ids()

    async def close(self) -> None:
        """Release everything."""
        if self._listener is not None:
            await self._listener.close()
        for weights_id in list(self._uploads):
            self._drop(weights_id, "the store is closed")
        self._store.close()

    async def _serve(self, channel: Channel) -> None:
        message, _ = await channel.receive()
        match message:
            case Request():
                await serve_version(
                    channel,
                    message,
                    lambda request: self._served.get(request.weights_id),
                    self._arrivals,
                )
            case Push():
                try:
                    await self._receive(channel, message)
                except FetchError as error:
                    await channel.send(Refused(reason=error.reason, error=str(error)))
                    await _drain(channel)
            case _:
                await channel.send(
                    Refused(
                        reason="source",
                        error=f"a store answers Request and Push, got {type(message).__name__}",
                    )
                )

    async def _receive(self, channel: Channel, push: Push) -> None:
        """Receive one sender's part of a version; acknowledge its end once the version
        is complete. Raises FetchError.
        """
        manifest = push.manifest
        self._store.check(manifest)
        if not within(push.ranges, manifest.nbytes):
            raise FetchError(
                "broken", f"ranges must be within {manifest.nbytes} bytes, got {push.ranges}"
            )
        base = self._base(push.base)
        if self._store.get(manifest.weights_id) is not None:
            await channel.send(Missing(ranges=()))
            await _expect_end(channel)
            await channel.send(Complete())
            return
        upload = await self._open_upload(manifest)
        missing = [
            part
            for start, stop in push.ranges
            for part in upload.writer.received.missing(start, stop)
        ]
        await channel.send(Missing(ranges=tuple(missing)))
        upload.senders += 1
        self._schedule_expiry(upload)
        try:
            while not isinstance(await self._receive_bucket(channel, upload, base), Complete):
                await channel.send(KeepAlive())
            self._finish(upload)
        finally:
            upload.senders -= 1
            self._schedule_expiry(upload)
        while not upload.version.verified:
            if upload.version.withdrawn:
                raise FetchError("broken", upload.version.withdrawn)
            if not await upload.version.updates.wait():
                await channel.send(KeepAlive())
        await channel.send(Complete())

    def _base(self, identity: Base | None) -> StoredVersion | None:
        if identity is None:
            return None
        base = self._store.base_version(identity.weights_id)
        if base.identity != identity:
            raise FetchError(
                "base",
                f"weights id {identity.weights_id} is stored with another content: "
                f"{base.identity.digest}",
            )
        return base

    async def _open_upload(self, manifest: WeightManifest) -> _Upload:
        async with self._opening:
            upload = self._uploads.get(manifest.weights_id)
            if upload is None:
                writer = await in_thread(self._store.create, manifest, undo=VersionWriter.close)
                upload = self._uploads[manifest.weights_id] = _Upload(
                    writer, ServedVersion(manifest, writer.fd)
                )
                self._served[manifest.weights_id] = upload.version
                self._arrivals.notify_all()
        check_same(upload.writer.manifest, manifest)
        return upload

    async def _receive_bucket(
        self, channel: Channel, upload: _Upload, base: StoredVersion | None
    ) -> Message:
        """Receive one bucket, or the end. An interrupted bucket can be sent again.

        Raises FetchError.
        """
        writer, version = upload.writer, upload.version
        encoded = bytearray()
        claim: Range | None = None
        refusal: FetchError | None = None

        def allocate(message: Message, nbytes: int) -> memoryview:
            nonlocal claim, encoded, refusal
            if nbytes > MAX_BUCKET_BYTES:
                raise FetchError(
                    "broken", f"a bucket must have at most {MAX_BUCKET_BYTES} bytes, got {nbytes}"
                )
            try:
                claim = upload.claimed_by(message, nbytes, base)
            except FetchError as error:
                # Read the bucket first: its sender would not read the refusal before.
                refusal = error
            if claim is not None and isinstance(message, Raw):
                return writer.destination(*claim)
            encoded = bytearray(nbytes)
            return memoryview(encoded)

        try:
            message, checksum = await channel.receive(allocate)
            if refusal is not None:
                raise refusal
            async with upload.writing:
                if version.withdrawn:
                    raise FetchError("broken", version.withdrawn)
                if isinstance(message, Raw) and claim is not None:
                    await in_thread(writer.mark_received, message.start, message.stop)
                    version.add_piece(message.start, message.stop, checksum)
                elif isinstance(message, Delta) and claim is not None and base is not None:
                    await in_thread(
                        writer.apply_delta,
                        message.start,
                        message.stop,
                        memoryview(encoded),
                        message.sizes,
                        base,
                    )
                    deltas = version.expect_delta(base.identity)
                    assert deltas is not None, "there is a base"
                    # Nothing waits for a delta: the bytes always come with it.
                    version.close_delta(deltas)
                    body = Body(len(encoded), checksum, memoryview(encoded))
                    version.add_delta_piece(
                        deltas, message.start, DeltaPiece(message.stop, message.sizes, body)
                    )
                    version.add_piece(message.start, message.stop)
                elif not isinstance(message, Complete):
                    raise FetchError("broken", f"expected a bucket, got {type(message).__name__}")
        except BaseException:
            if claim is not None:
                upload.claimed.remove(*claim)
            raise
        return message

    def _finish(self, upload: _Upload) -> None:
        """Verify the version if this was the last part, and keep it or drop it."""
        writer = upload.writer
        manifest = writer.manifest
        if (
            writer.contiguous < manifest.nbytes
            or self._uploads.get(manifest.weights_id) is not upload
        ):
            return
        try:
            stored = writer.finish()
        except FetchError as error:
            self._drop(manifest.weights_id, str(error))
            raise
        self._close_upload(upload)
        self._store.add(stored)
        upload.version.mark_verified()
        evicted = self._store.evict_except(sorted(self._store.ids())[-self._keep :])
        for old in evicted:
            weights_id = old.manifest.weights_id
            self._served.pop(weights_id).withdraw(f"weights id {weights_id} was evicted")
        close_all(evicted)

    def _schedule_expiry(self, upload: _Upload) -> None:
        """Start or stop the expiry of a version when the number of its senders changes."""
        weights_id = upload.writer.manifest.weights_id
        if upload.expiry is not None:
            upload.expiry.cancel()
        if upload.senders == 0 and self._uploads.get(weights_id) is upload:
            reason = (
                f"weights id {weights_id} is incomplete, and nothing of it was sent for "
                f"{self._linger_s:g} s"
            )
            upload.expiry = asyncio.get_running_loop().call_later(
                self._linger_s, self._drop, weights_id, reason
            )

    def _close_upload(self, upload: _Upload) -> None:
        if upload.expiry is not None:
            upload.expiry.cancel()
        self._uploads.pop(upload.writer.manifest.weights_id, None)

    def _drop(self, weights_id: int, reason: str) -> None:
        upload = self._uploads.get(weights_id)
        if upload is not None:
            self._close_upload(upload)
            upload.writer.close()
            self._served.pop(weights_id).withdraw(reason)


async def _expect_end(channel: Channel) -> None:
    message, _ = await channel.receive()
    if not isinstance(message, Complete):
        raise FetchError("broken", f"expected the end of the push, got {type(message).__name__}")


async def _drain(channel: Channel) -> None:
    """Read what is in transit, so that the refusal arrives before the connection ends."""
    try:
        while True:
            await channel.receive(lambda _, nbytes: memoryview(bytearray(nbytes)))
    except FetchError:
        return
