"""Both ends of a transfer between relays: serving versions while they arrive, piece by
piece, as raw bytes or as deltas, and reading parts of a version as the parts become
available at another relay.

Invariants of serving: a piece is sent only once it is present and its bytes can no
longer change; a client that requests a missing piece waits, and receives keep-alives
meanwhile; a withdrawn version ends in a refusal. One `ServedVersion` serves any number
of clients at the same time, with and without a base. Everything here belongs to one
event loop.

Invariants of reading: no byte is received twice, and no byte that was not requested; a
relay that sends anything else, or refuses, causes a FetchError. The bytes are not
verified here: the caller compares the digest of the whole version.
"""

import asyncio
import bisect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from rollweave.schema.weights import HEARTBEAT_S, RelayAddress, WeightManifest
from rollweave.weights.memory import Ranges, hash_file
from rollweave.weights.tcp import Channel, Tcp
from rollweave.weights.transport import (
    Base,
    Body,
    Delta,
    FetchError,
    KeepAlive,
    Message,
    Range,
    Raw,
    RawRanges,
    Refused,
    Request,
    within,
)

KEEPALIVE_S = HEARTBEAT_S
"""Seconds between two keep-alives to a client that is waiting."""

SHORT_BYTES = 64 << 10
"""Ranges shorter than this many bytes are sent together: a message costs about as much
as this many bytes, and a shard may have thousands of short ranges.
"""

BATCH_BYTES = 4 << 20
"""Maximum bytes of short ranges in one message."""

BATCH_RANGES = 4096
"""Maximum number of short ranges in one message."""

UNKNOWN_VERSION_S = 10.0
"""Maximum seconds that a client waits for an unknown version: its `FetchVersion` may be
on the way to this relay.
"""


class _Piece(NamedTuple):
    """A raw piece of the payload; `checksum` is its xxh3-64, or None if it has not been
    needed yet.
    """

    stop: int
    checksum: int | None


class DeltaPiece(NamedTuple):
    """A piece as a delta: consecutive blocks of weights/delta, of `sizes` bytes."""

    stop: int
    sizes: tuple[int, ...]
    body: Body


@dataclass
class VersionDelta:
    """The pieces of a version that are available as deltas against one base. The last
    piece ends at `stop`.
    """

    base: Base
    starts: list[int] = field(default_factory=list)
    pieces: dict[int, DeltaPiece] = field(default_factory=dict)
    stop: int = -1
    open: bool = True
    """True while more deltas are coming, so that waiting for them is better than
    sending raw bytes.
    """

    def next_start(self, at: int, stop: int) -> int:
        """Return the first position after `at`, and before `stop`, from which a delta
        is available; else `stop`.
        """
        number = bisect.bisect_right(self.starts, at)
        if number < len(self.starts):
            return min(self.starts[number], stop)
        return min(self.stop, stop) if self.open and at < self.stop else stop


class Broadcast:
    """Wakes all waiting tasks at every change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify_all(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> bool:
        """Return True at the next change, or False when `KEEPALIVE_S` has passed."""
        try:
            async with asyncio.timeout(KEEPALIVE_S):
                await self._event.wait()
        except TimeoutError:
            return False
        return True


class ServedVersion:
    """One version, in memory file `fd`. The owner keeps the file, and may replace it by
    another with the same bytes.
    """

    def __init__(self, manifest: WeightManifest, fd: int) -> None:
        self.manifest, self.fd = manifest, fd
        self._starts: list[int] = []
        self._pieces: dict[int, _Piece] = {}
        self._deltas: dict[Base, VersionDelta] = {}
        self.updates = Broadcast()
        self.withdrawn = ""

    # Called by the owner.

    def add_piece(self, start: int, stop: int, checksum: int | None = None) -> None:
        """Add bytes `[start, stop)`. Bytes at the beginning may have been present
        before.
        """
        before = bisect.bisect_right(self._starts, start) - 1
        if before >= 0 and self._pieces[self._starts[before]].stop > start:
            start, checksum = self._pieces[self._starts[before]].stop, None
        if start < stop:
            bisect.insort(self._starts, start)
            self._pieces[start] = _Piece(stop, checksum)
            self.updates.notify_all()

    def expect_delta(self, base: Base | None) -> VersionDelta | None:
        """Expect deltas against `base`, and no others, from now on. Earlier deltas stay
        available.
        """
        for delta in self._deltas.values():
            delta.open = False
        deltas = None
        if base is not None:
            deltas = self._deltas.setdefault(base, VersionDelta(base))
            deltas.open = True
        self.updates.notify_all()
        return deltas

    def add_delta_piece(self, delta: VersionDelta, start: int, piece: DeltaPiece) -> None:
        """Add bytes `[start, piece.stop)` as a delta."""
        if start not in delta.pieces:
            bisect.insort(delta.starts, start)
        delta.pieces[start] = piece
        delta.stop = max(delta.stop, piece.stop)
        self.updates.notify_all()

    def close_delta(self, delta: VersionDelta) -> None:
        """Record that no more deltas are expected."""
        delta.open = False
        self.updates.notify_all()

    def drop_deltas(self) -> None:
        """Drop all deltas: clients now receive raw bytes."""
        self._deltas.clear()
        self.updates.notify_all()

    def withdraw(self, reason: str) -> None:
        """Stop serving the version."""
        self.withdrawn = reason
        self._deltas.clear()
        self.updates.notify_all()

    # Called while serving.

    def next_piece(
        self, at: int, stop: int, base: Base | None
    ) -> tuple[Raw | Delta, Body | None] | None:
        """Return the piece that begins at `at` and ends at `stop` or before, or None if
        it is not available yet.

        A body of None means the raw bytes.
        """
        delta = self._deltas.get(base) if base is not None else None
        if delta is not None:
            piece = delta.pieces.get(at)
            if piece is not None and piece.stop <= stop:
                return Delta(start=at, stop=piece.stop, sizes=piece.sizes), piece.body
            if delta.open and at >= delta.stop:
                return None
            stop = delta.next_start(at, stop)
        number = bisect.bisect_right(self._starts, at) - 1
        if number < 0:
            return None
        start = self._starts[number]
        raw = self._pieces[start]
        if at >= raw.stop:
            return None
        end = min(raw.stop, stop)
        if (start, raw.stop) == (at, end) and raw.checksum is not None:
            return Raw(start=at, stop=end), Body.of_file(self.fd, at, end, checksum=raw.checksum)
        return Raw(start=at, stop=end), None

    def batchable_ranges(self, ranges: Sequence[Range]) -> tuple[Range, ...]:
        """Return the longest prefix of `ranges` whose ranges are short and present, and
        fit in one message.
        """
        count = nbytes = 0
        for start, stop in ranges:
            number = bisect.bisect_right(self._starts, start) - 1
            nbytes += stop - start
            if stop - start >= SHORT_BYTES or nbytes > BATCH_BYTES:
                break
            if number < 0 or self._pieces[self._starts[number]].stop < stop:
                break
            count += 1
        return tuple(ranges[:count])

    def record_checksum(self, message: Raw, checksum: int) -> None:
        """Record the xxh3-64 of a piece, so that it is computed only once."""
        piece = self._pieces.get(message.start)
        if piece is not None and piece.stop == message.stop:
            self._pieces[message.start] = piece._replace(checksum=checksum)


Lookup = Callable[[Request], ServedVersion | None]
"""Finds the requested version; None if it may still arrive.

Raises FetchError if it never will.
"""


async def serve_version(
    channel: Channel, request: Request, lookup: Lookup, arrivals: Broadcast
) -> None:
    """Answer `request` over `channel`, which stays open; `arrivals` announces that
    `lookup` may find more.

    Raises FetchError (source) if the client is gone.
    """
    try:
        if not within(request.ranges, request.nbytes):
            raise FetchError(
                "broken", f"ranges must be within {request.nbytes} bytes, got {request.ranges}"
            )
        version = await _lookup(channel, request, lookup, arrivals)
    except FetchError as error:
        await channel.send(Refused(reason=error.reason, error=str(error)))
        return
    owned = version.fd
    fd = os.dup(owned)  # keeps the bytes being sent, even if the owner evicts the version

    def current() -> int:
        nonlocal owned, fd
        if owned != version.fd and not version.withdrawn:
            os.close(fd)
            owned = version.fd
            fd = os.dup(owned)
        return fd

    loop = asyncio.get_running_loop()
    last_sent = loop.time()
    try:
        number = 0
        while number < len(request.ranges):
            short = (
                version.batchable_ranges(request.ranges[number : number + BATCH_RANGES])
                if request.base is None and not version.withdrawn
                else ()
            )
            if len(short) > 1:
                await channel.send(
                    RawRanges(ranges=short), await asyncio.to_thread(_batch, current(), short)
                )
                number += len(short)
                continue
            at, stop = request.ranges[number]
            number += 1
            while at < stop:
                piece = (
                    version.next_piece(at, stop, request.base) if not version.withdrawn else None
                )
                if piece is not None:
                    message, body = piece
                    own = current()
                    await channel.send(
                        message,
                        body._replace(fd=own)
                        if body is not None
                        else await _raw_body(version, message, own),
                    )
                    at, last_sent = message.stop, loop.time()
                elif (sent_at := await _wait_for_change(channel, version, last_sent)) is not None:
                    last_sent = sent_at
                else:
                    return
    finally:
        os.close(fd)


def _batch(fd: int, ranges: Sequence[Range]) -> Body:
    return Body.of(b"".join(os.pread(fd, stop - start, start) for start, stop in ranges))


async def _lookup(
    channel: Channel, request: Request, lookup: Lookup, arrivals: Broadcast
) -> ServedVersion:
    loop = asyncio.get_running_loop()
    until = loop.time() + UNKNOWN_VERSION_S
    while (version := lookup(request)) is None:
        if loop.time() > until:
            raise FetchError("source", f"publication {request.publication_id} is not stored here")
        if not await arrivals.wait():
            await channel.send(KeepAlive())
    if (version.manifest.digest, version.manifest.nbytes) != (request.digest, request.nbytes):
        raise FetchError(
            "source",
            f"publication {request.publication_id} is stored with another content "
            f"({version.manifest.digest}, not {request.digest}): are two trainers publishing at "
            "once?",
        )
    return version


async def _wait_for_change(
    channel: Channel, version: ServedVersion, last_sent: float
) -> float | None:
    """Wait for a change, or until a keep-alive is due.

    Return the time of the last message, or None after telling the client that the
    version was withdrawn.
    """
    if version.withdrawn:
        await channel.send(Refused(reason="source", error=version.withdrawn))
        return None
    loop = asyncio.get_running_loop()
    if await version.updates.wait() and loop.time() < last_sent + KEEPALIVE_S:
        return last_sent
    await channel.send(KeepAlive())
    return loop.time()


async def _raw_body(version: ServedVersion, message: Raw | Delta, fd: int) -> Body:
    assert isinstance(message, Raw), "deltas have bodies"
    checksum = await asyncio.to_thread(checksum_of, fd, message.start, message.stop)
    version.record_checksum(message, checksum)
    return Body.of_file(fd, message.start, message.stop, checksum=checksum)


def checksum_of(fd: int, start: int, stop: int) -> int:
    """Return the xxh3-64 of bytes `[start, stop)` of a file."""
    content = xxhash.xxh3_64()
    hash_file(content, fd, start, stop)
    return content.intdigest()


async def pull(
    transport: Tcp,
    address: RelayAddress,
    manifest: WeightManifest,
    ranges: Sequence[Range],
    into: Callable[[int, int], memoryview],
    *,
    on_piece: Callable[[int, int], None],
    on_channel: Callable[[Channel], None] = lambda channel: None,
) -> None:
    """Read `ranges` of a version into memory from `into`.

    `on_piece` is called with every range that was read, and `on_channel` once the relay
    is connected. Raises FetchError.
    """
    channel = await transport.connect(address)
    on_channel(channel)
    together = memoryview(b"")

    def allocate(message: Message, count: int) -> memoryview:
        nonlocal together
        if isinstance(message, RawRanges) and count == _check_ranges(message.ranges, missing):
            together = memoryview(bytearray(count))
            return together[:]
        if (
            not isinstance(message, Raw)
            or count != message.stop - message.start
            or missing.missing(message.start, message.stop)
        ):
            raise FetchError("broken", f"{count} bytes do not fit {message}")
        return into(message.start, message.stop)

    missing = Ranges()
    for part in ranges:
        missing.add(*part)
    try:
        await channel.send(
            Request(
                publication_id=manifest.publication_id,
                digest=manifest.digest,
                nbytes=manifest.nbytes,
                ranges=tuple(part for part in ranges if part[0] < part[1]),
            )
        )
        while list(missing):
            message, _ = await channel.receive(allocate)
            if isinstance(message, Refused):
                raise FetchError(message.reason, f"the relay refused: {message.error}")
            if isinstance(message, Raw):
                missing.remove(message.start, message.stop)
                on_piece(message.start, message.stop)
            elif isinstance(message, RawRanges):
                at = 0
                for low, high in message.ranges:
                    into(low, high)[:] = together[at : at + high - low]
                    missing.remove(low, high)
                    on_piece(low, high)
                    at += high - low
    finally:
        channel.close()


def _check_ranges(ranges: Sequence[Range], missing: Ranges) -> int:
    """Return the number of bytes in the ranges of one message. Raises FetchError
    (broken) if the ranges are not in order, or are not or no longer wanted.
    """
    end = 0
    for start, stop in ranges:
        if not end <= start < stop or missing.missing(start, stop):
            raise FetchError(
                "broken", f"bytes {start} to {stop} are not wanted, or were sent twice"
            )
        end = stop
    return sum(stop - start for start, stop in ranges)
