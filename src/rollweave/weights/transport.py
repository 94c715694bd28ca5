"""Channels between hosts: what relays and stores need of whatever carries their bytes.

A channel carries messages: a head, which is a word (`weights/words.py`), and perhaps a
body, which is bytes of weights. Invariants, whatever the transport: who connects shows
the secret first, and learns nothing without it; what `receive` returns is what was
sent, to the bit, else it raises TakeError (broken), and after any error a channel says
nothing more; every wait ends: a peer of which nothing comes counts as gone (TakeError,
source).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

import xxhash

from rollweave.schema.weights import HEARTBEAT_S, RelayAddress
from rollweave.weights.protocol import Message

Allocate = Callable[[Message, int], memoryview]
"""Where the body of so many bytes goes, which comes with a word.

Raises TakeError to refuse it.
"""


class Body(NamedTuple):
    """Bytes on their way out: `data`, or else those of file `fd` from `offset` on."""

    nbytes: int
    check: int
    data: memoryview | None = None
    fd: int = -1
    offset: int = 0

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview) -> "Body":
        return cls(len(data), xxhash.xxh3_64_intdigest(data), memoryview(data))

    @classmethod
    def of_file(cls, fd: int, start: int, stop: int, *, check: int) -> "Body":
        """Bytes `[start, stop)` of a file that does not change; `check` is their
        xxh3-64.
        """
        return cls(stop - start, check, None, fd, start)


class Channel(Protocol):
    """One end of a conversation. One task sends and one receives at a time."""

    @property
    def waits_since(self) -> float | None:
        """Since when, on the loop's clock, `receive` has waited without a byte; None
        while it does not wait, or cannot tell.
        """

    async def send(self, word: Message, body: Body | None = None) -> None:
        """Raises TakeError (source)."""

    async def receive(self, room: Allocate | None = None) -> tuple[Message, int]:
        """The next word, with its body in `room`, and the body's xxh3-64. Without a
        `room` a body is broken.

        Raises TakeError (source, broken).
        """

    def close(self) -> None:
        """Hang up. A second call does nothing."""


class Listener(Protocol):
    """Serves whoever connects."""

    @property
    def address(self) -> RelayAddress:
        """Where."""

    async def close(self) -> None:
        """Stop, and hang up on everybody."""


Serve = Callable[[Channel], Awaitable[None]]


class Transport(Protocol):
    """How hosts reach each other."""

    async def listen(self, host: str, serve: Serve) -> Listener:
        """Serve every channel that somebody opens to us, who has shown the secret.

        Raises OSError.
        """

    async def connect(self, address: RelayAddress) -> Channel:
        """Raises TakeError (source)."""


class Carrier(Protocol):
    """Moves bodies beside a socket: by RDMA, say. Its calls block, in threads."""

    def offer(self, body: memoryview) -> bytes:
        """Let a peer read `body`; returns how it finds it."""

    def withdraw(self, token: bytes) -> None:
        """Nobody reads it any more."""

    def fetch(self, token: bytes, into: memoryview) -> None:
        """Read what a peer offers. Raises TakeError (source)."""


STALL_BEATS = 3
"""Ticks in a row that see one and the same wait: a source with nothing to send says so
more often (offers.ALIVE_S).
"""


class StallDetector:
    """Calls `stalled`, again and again as long as it lasts, while nothing comes over
    `channel`, or it cannot be opened.
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
        since = self.channel.waits_since if self.channel is not None else self._opening
        self._ticks = self._ticks + 1 if since is not None and since == self._since else 0
        self._since = since
        if self._ticks == STALL_BEATS:
            self._ticks = 0
            self._stalled()
