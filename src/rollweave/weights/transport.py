"""Channels between hosts: the messages that relays exchange, the reasons why a fetch
fails, and the interface of transports, which transfer bytes for relays.

A channel carries messages, some with a body of weights. Invariants of every transport:
a client presents the secret first and learns nothing without it; `receive` returns
exactly the bits that were sent, or raises FetchError (broken), and after any error a
channel sends nothing more; every wait ends, because a silent peer counts as gone
(FetchError, source).
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Literal, NamedTuple, Protocol

import xxhash

from rollweave.io.wire import decoder_of
from rollweave.schema.base import TaggedStruct
from rollweave.schema.errors import WeightsError
from rollweave.schema.weights import HEARTBEAT_S, RelayAddress

FailureReason = Literal["source", "base", "broken", "room"]
"""See `schema/weights.VersionFailed`."""

Range = tuple[int, int]
"""Bytes `[start, stop)` of a payload."""


class FetchError(WeightsError):
    """A version, or a part of it, could not be fetched; the caller's versions are
    unaffected.
    """

    def __init__(self, reason: FailureReason, error: str) -> None:
        super().__init__(error)
        self.reason: FailureReason = reason


class Base(TaggedStruct, frozen=True, kw_only=True):
    """The version that a delta is made from. The digest is part of its identity,
    because two trainers may have used one id.
    """

    publication_id: int
    digest: str


class Request(TaggedStruct, frozen=True, kw_only=True):
    """Request `ranges` of a version from a relay, in order, as they become available.

    With `base`, pieces may come as deltas against that version; without it, or where
    there is no delta, they come as raw bytes.
    """

    publication_id: int
    digest: str
    nbytes: int
    ranges: tuple[Range, ...]
    base: Base | None = None


class Raw(TaggedStruct, frozen=True, kw_only=True):
    """The body is bytes `[start, stop)` of the payload."""

    start: int
    stop: int


class RawRanges(TaggedStruct, frozen=True, kw_only=True):
    """Several `ranges` of the payload, whose bytes follow each other in the body.

    Each range is too short to be worth its own message.
    """

    ranges: tuple[Range, ...]


class Delta(TaggedStruct, frozen=True, kw_only=True):
    """The body is bytes `[start, stop)` of the payload as blocks of weights/delta,
    which have `sizes` bytes.
    """

    start: int
    stop: int
    sizes: tuple[int, ...]


class KeepAlive(TaggedStruct, frozen=True, kw_only=True):
    """There is nothing to send yet."""


class Refused(TaggedStruct, frozen=True, kw_only=True):
    """The request has failed. This is the last message of its sender."""

    reason: FailureReason
    error: str


Message = Request | Raw | RawRanges | Delta | KeepAlive | Refused

decode_message = decoder_of(Message)


def within(ranges: Collection[Range], nbytes: int) -> bool:
    """Return whether `ranges` are bytes of a payload of `nbytes`."""
    return all(0 <= start < stop <= nbytes for start, stop in ranges)


Allocate = Callable[[Message, int], memoryview]
"""Called with a message and the number of bytes of its body; returns memory for the
body.

Raises FetchError to refuse the body.
"""


class Body(NamedTuple):
    """Bytes to send: `data`, or the bytes of file `fd` from `offset` on. `checksum` is
    the xxh3-64 of the bytes.
    """

    nbytes: int
    checksum: int
    data: memoryview | None = None
    fd: int = -1
    offset: int = 0

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview) -> "Body":
        return cls(len(data), xxhash.xxh3_64_intdigest(data), memoryview(data))

    @classmethod
    def of_file(cls, fd: int, start: int, stop: int, *, checksum: int) -> "Body":
        """Return the bytes `[start, stop)` of a file that does not change."""
        return cls(stop - start, checksum, None, fd, start)


class Channel(Protocol):
    """One end of a connection. At most one task sends and one receives at a time."""

    @property
    def waiting_since(self) -> float | None:
        """The time on the loop's clock since which `receive` has waited without a byte;
        None if it is not waiting, or if the time is unknown.
        """

    @property
    def received_bytes(self) -> int:
        """The bytes that have arrived through this connection, of the body for which
        `receive` is waiting.
        """

    async def send(self, message: Message, body: Body | None = None) -> None:
        """Send a message. Raises FetchError (source)."""

    async def receive(self, allocate: Allocate | None = None) -> tuple[Message, int]:
        """Return the next message and the xxh3-64 of its body, which goes to memory
        from `allocate`. Without `allocate`, a body is an error.

        Raises FetchError (source, broken).
        """

    def close(self) -> None:
        """Close the connection. A second call does nothing."""


class Listener(Protocol):
    """Serves the clients that connect."""

    @property
    def address(self) -> RelayAddress:
        """The address at which it listens."""

    async def close(self) -> None:
        """Stop listening and close all connections."""


Serve = Callable[[Channel], Awaitable[None]]


class Transport(Protocol):
    """Connects hosts."""

    async def listen(self, host: str, serve: Serve) -> Listener:
        """Serve every channel whose client has presented the secret.

        Raises OSError.
        """

    async def connect(self, address: RelayAddress) -> Channel:
        """Open a channel. Raises FetchError (source)."""


class Carrier(Protocol):
    """Transfers bodies outside the socket, for example by RDMA. Its calls block, so
    they run in threads.
    """

    def register(self, body: memoryview) -> bytes:
        """Let a peer read `body`; return the token by which the peer finds it."""

    def unregister(self, token: bytes) -> None:
        """Stop letting peers read a registered body."""

    def read(self, token: bytes, into: memoryview) -> None:
        """Read a body that a peer registered. Raises FetchError (source)."""


STALL_BEATS = 3
"""Consecutive ticks that observe the same wait before it counts as a stall. A source
with nothing to send sends keep-alives more often (serve.KEEPALIVE_S).
"""


class StallDetector:
    """Calls `stalled`, repeatedly while the stall lasts, when nothing arrives over
    `channel` or it cannot be opened. A stall is noticed long before the source counts
    as gone: this link may be dead while another source's link works.

    Invariant: as with relays (runtime/supervisors/relays), it counts ticks of a clock
    that advances only while this loop runs, and bytes that have arrived are processed
    before a tick. A piece may take any time, as long as some of its bytes arrive.
    """

    def __init__(self, stalled: Callable[[], None]) -> None:
        self.channel: Channel | None = None
        self._stalled = stalled
        self._loop = asyncio.get_running_loop()
        self._opening = self._loop.time()
        self._since: float | None = None
        self._ticks = 0
        self._timer = self._loop.call_later(HEARTBEAT_S, self._tick)

    def close(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(HEARTBEAT_S, self._tick)
        since = self.channel.waiting_since if self.channel is not None else self._opening
        self._ticks = self._ticks + 1 if since is not None and since == self._since else 0
        self._since = since
        if self._ticks == STALL_BEATS:
            self._ticks = 0
            self._stalled()
