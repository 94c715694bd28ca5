"""Channels between hosts: the interface of transports, which transfer bytes for relays.

A channel carries messages (`weights/protocol.py`), some with a body of weights.
Invariants of every transport: a client presents the secret first and learns nothing
without it; `receive` returns exactly the bits that were sent, or raises FetchError
(broken), and after any error a channel sends nothing more; every wait ends, because a
silent peer counts as gone (FetchError, source).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

import xxhash

from rollweave.schema.weights import HEARTBEAT_S, RelayAddress
from rollweave.weights.protocol import Message

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

    Invariant: as with relays (runtime/links/relay), it counts ticks of a clock that
    advances only while this loop runs, and bytes that have arrived are processed before
    a tick. A piece may take any time, as long as some of its bytes arrive.
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
