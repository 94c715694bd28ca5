"""Channels between hosts: what relays and stores need of whatever carries their bytes.

A channel carries messages: a head, which is a word (`weights/words.py`), and perhaps a
body, which is bytes of weights. Invariants, whatever the transport: who connects shows
the secret first, and learns nothing without it; what `receive` returns is what was
sent, to the bit, else it raises TakeError (broken), and after any error a channel says
nothing more; every wait ends: a peer of which nothing comes counts as gone (TakeError,
source).
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

import xxhash

from rollweave.schema.weights import RelayAddress
from rollweave.weights.words import Word

Room = Callable[[Word, int], memoryview]
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

    async def send(self, word: Word, body: Body | None = None) -> None:
        """Raises TakeError (source)."""

    async def receive(self, room: Room | None = None) -> tuple[Word, int]:
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
