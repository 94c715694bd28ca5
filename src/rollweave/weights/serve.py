"""Versions as they are given away: piece by piece, as they come to be there, whole or
as changes.

Invariants: a piece is given only once it is there and its bytes cannot change any more;
who asks for one that has not come waits, and hears every while that we are alive; an
offer that is withdrawn ends in a refusal. One offer serves any number at once, those
with a base and those without. All of it belongs to one event loop.
"""

import asyncio
import bisect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from rollweave.schema.weights import HEARTBEAT_S, WeightManifest
from rollweave.weights.memory import READ_CHUNK
from rollweave.weights.protocol import (
    Base,
    Complete,
    Delta,
    FetchError,
    KeepAlive,
    Range,
    Raw,
    RawRanges,
    Refused,
    Request,
    within,
)
from rollweave.weights.transport import Body, Channel

KEEPALIVE_S = HEARTBEAT_S
"""Seconds between two words to somebody for whom there is nothing yet."""

SHORT_BYTES = 64 << 10
"""Ranges that are shorter travel together: a message costs as much as so many bytes,
and a shard may have thousands of them.
"""

BATCH_BYTES = 4 << 20
"""Of short ranges in one message, at most."""

BATCH_RANGES = 4096
"""Short ranges in one message, at most."""

UNKNOWN_VERSION_S = 10.0
"""Seconds that somebody may wait for a version of which nobody here has heard yet: its
`Take` may be on the way to us.
"""


class _Piece(NamedTuple):
    """A piece of the payload as it is; `check` is its xxh3-64, None where nobody has
    needed it yet.
    """

    stop: int
    check: int | None


class DeltaPiece(NamedTuple):
    """A piece as a change: weights/delta's blocks, of `sizes` bytes, one after the
    other.
    """

    stop: int
    sizes: tuple[int, ...]
    body: Body


@dataclass
class VersionDelta:
    """All of a version's pieces that are here as changes since one base; the last ends
    at `stop`.
    """

    base: Base
    starts: list[int] = field(default_factory=list)
    pieces: dict[int, DeltaPiece] = field(default_factory=dict)
    stop: int = -1
    open: bool = True
    """More are coming, so that it is better to wait for them than to take the bytes as
    they are.
    """

    def next_start(self, at: int, stop: int) -> int:
        """Where after `at`, and before `stop`, one can go on with a change; else
        `stop`.
        """
        number = bisect.bisect_right(self.starts, at)
        if number < len(self.starts):
            return min(self.starts[number], stop)
        return min(self.stop, stop) if self.open and at < self.stop else stop


class Broadcast:
    """Wakes all who wait, at every change."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def wake(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> bool:
        """Return True at the next change, or False when a while has gone by."""
        try:
            async with asyncio.timeout(KEEPALIVE_S):
                await self._event.wait()
        except TimeoutError:
            return False
        return True


class ServedVersion:
    """One version, in memory file `fd`, which stays its owner's, who may put another of
    the same bytes in its place.
    """

    def __init__(self, manifest: WeightManifest, fd: int) -> None:
        self.manifest, self.fd = manifest, fd
        self._starts: list[int] = []
        self._pieces: dict[int, _Piece] = {}
        self._changes: dict[Base, VersionDelta] = {}
        self.news = Broadcast()
        self.verified = False
        self.withdrawn = ""

    # What its owner says.

    def add(self, start: int, stop: int, check: int | None = None) -> None:
        """Bytes `[start, stop)` are there; the first of them may have been before."""
        before = bisect.bisect_right(self._starts, start) - 1
        if before >= 0 and self._pieces[self._starts[before]].stop > start:
            start, check = self._pieces[self._starts[before]].stop, None
        if start < stop:
            bisect.insort(self._starts, start)
            self._pieces[start] = _Piece(stop, check)
            self.news.wake()

    def expect(self, base: Base | None) -> VersionDelta | None:
        """From now on changes since `base`, and no other, will come; those that came
        before still count.
        """
        for changes in self._changes.values():
            changes.open = False
        found = None
        if base is not None:
            found = self._changes.setdefault(base, VersionDelta(base))
            found.open = True
        self.news.wake()
        return found

    def add_change(self, changes: VersionDelta, start: int, change: DeltaPiece) -> None:
        """Bytes `[start, change.stop)` have come as a change."""
        if start not in changes.pieces:
            bisect.insort(changes.starts, start)
        changes.pieces[start] = change
        changes.stop = max(changes.stop, change.stop)
        self.news.wake()

    def end_changes(self, changes: VersionDelta) -> None:
        """No more will come, as far as one can tell."""
        changes.open = False
        self.news.wake()

    def forget_changes(self) -> None:
        """Nobody needs changes any more: whoever comes gets the bytes as they are."""
        self._changes.clear()
        self.news.wake()

    def verify(self) -> None:
        """The version is whole, and what its manifest says."""
        self.verified = True
        self.news.wake()

    def withdraw(self, reason: str) -> None:
        """It is given to nobody any more."""
        self.withdrawn = reason
        self._changes.clear()
        self.news.wake()

    # What those who give it away ask.

    def next(self, at: int, stop: int, base: Base | None) -> tuple[Raw | Delta, Body | None] | None:
        """The piece from `at` on, within `stop`; None while there is none.

        A missing body is that of the bytes as they are.
        """
        changes = self._changes.get(base) if base is not None else None
        if changes is not None:
            change = changes.pieces.get(at)
            if change is not None and change.stop <= stop:
                return Delta(start=at, stop=change.stop, sizes=change.sizes), change.body
            if changes.open and at >= changes.stop:
                return None
            stop = changes.next_start(at, stop)
        number = bisect.bisect_right(self._starts, at) - 1
        if number < 0:
            return None
        start = self._starts[number]
        piece = self._pieces[start]
        if at >= piece.stop:
            return None
        end = min(piece.stop, stop)
        if (start, piece.stop) == (at, end) and piece.check is not None:
            return Raw(start=at, stop=end), Body.of_file(self.fd, at, end, check=piece.check)
        return Raw(start=at, stop=end), None

    def short(self, ranges: Sequence[Range]) -> tuple[Range, ...]:
        """Of these ranges, those from the first on that are short and here, as many as
        travel together.
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

    def checked(self, word: Raw, check: int) -> None:
        """The xxh3-64 of a piece is known now: nobody needs to compute it again."""
        piece = self._pieces.get(word.start)
        if piece is not None and piece.stop == word.stop:
            self._pieces[word.start] = piece._replace(check=check)


Lookup = Callable[[Request], ServedVersion | None]
"""The offer of what is asked for; None: it may come.

Raises TakeError where it never will.
"""


async def serve_version(channel: Channel, ask: Request, find: Lookup, arrivals: Broadcast) -> None:
    """Answer `ask` over `channel`, which is left open; `arrivals` tells that `find` may
    find more.

    Raises TakeError (source) where the other end has gone.
    """
    try:
        if not within(ask.ranges, ask.nbytes):
            raise FetchError(
                "broken", f"ranges must be within {ask.nbytes} bytes, got {ask.ranges}"
            )
        offer = await _lookup(channel, ask, find, arrivals)
    except FetchError as error:
        await channel.send(Refused(reason=error.reason, error=str(error)))
        return
    owned = offer.fd
    fd = os.dup(owned)  # what we are sending stays, even if its owner lets go of it

    def current() -> int:
        nonlocal owned, fd
        if owned != offer.fd and not offer.withdrawn:
            os.close(fd)
            owned = offer.fd
            fd = os.dup(owned)
        return fd

    loop = asyncio.get_running_loop()
    spoke = loop.time()
    try:
        number = 0
        while number < len(ask.ranges):
            short = (
                offer.short(ask.ranges[number : number + BATCH_RANGES])
                if ask.base is None and not offer.withdrawn
                else ()
            )
            if len(short) > 1:
                await channel.send(
                    RawRanges(ranges=short), await asyncio.to_thread(_batch, current(), short)
                )
                number += len(short)
                continue
            at, stop = ask.ranges[number]
            number += 1
            while at < stop:
                piece = offer.next(at, stop, ask.base) if not offer.withdrawn else None
                if piece is not None:
                    word, body = piece
                    own = current()
                    await channel.send(
                        word,
                        body._replace(fd=own)
                        if body is not None
                        else await _raw_body(offer, word, own),
                    )
                    at, spoke = word.stop, loop.time()
                elif (told := await _wait_for_change(channel, offer, spoke)) is not None:
                    spoke = told
                else:
                    return
        while ask.confirm and not offer.verified:
            told = await _wait_for_change(channel, offer, spoke)
            if told is None:
                return
            spoke = told
        if ask.confirm:
            await channel.send(Complete())
    finally:
        os.close(fd)


def _batch(fd: int, ranges: Sequence[Range]) -> Body:
    return Body.of(b"".join(os.pread(fd, stop - start, start) for start, stop in ranges))


async def _lookup(
    channel: Channel, ask: Request, find: Lookup, arrivals: Broadcast
) -> ServedVersion:
    loop = asyncio.get_running_loop()
    until = loop.time() + UNKNOWN_VERSION_S
    while (offer := find(ask)) is None:
        if loop.time() > until:
            raise FetchError("source", f"weights id {ask.weights_id} is not here")
        if not await arrivals.wait():
            await channel.send(KeepAlive())
    if (offer.manifest.digest, offer.manifest.nbytes) != (ask.digest, ask.nbytes):
        raise FetchError(
            "source",
            f"weights id {ask.weights_id} is here with another content ({offer.manifest.digest}, "
            f"not {ask.digest}): "
            "do two trainers publish at once?",
        )
    return offer


async def _wait_for_change(channel: Channel, offer: ServedVersion, spoke: float) -> float | None:
    """Wait for news, or for a sign of life to be due.

    When we spoke last; or None, and refused, where no news will come.
    """
    if offer.withdrawn:
        await channel.send(Refused(reason="source", error=offer.withdrawn))
        return None
    loop = asyncio.get_running_loop()
    if await offer.news.wait() and loop.time() < spoke + KEEPALIVE_S:
        return spoke
    await channel.send(KeepAlive())
    return loop.time()


async def _raw_body(offer: ServedVersion, word: Raw | Delta, fd: int) -> Body:
    assert isinstance(word, Raw), "changes have bodies"
    check = await asyncio.to_thread(checksum_of, fd, word.start, word.stop)
    offer.checked(word, check)
    return Body.of_file(fd, word.start, word.stop, check=check)


def checksum_of(fd: int, start: int, stop: int) -> int:
    """xxh3-64 of bytes `[start, stop)` of a file."""
    found = xxhash.xxh3_64()
    for at in range(start, stop, READ_CHUNK):
        found.update(os.pread(fd, min(READ_CHUNK, stop - at), at))
    return found.intdigest()
