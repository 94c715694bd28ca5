"""Frames over a socket: each arrives once and in order however the system divides the
bytes, a connection ends once, and what waits to be sent is bounded.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable

import pytest

from rollweave.io import framing
from rollweave.io.framing import FramedSocket, receive_exactly, receive_frame, send_frame
from rollweave.io.wire import CODE_BYTES, Seal, frame
from rollweave.schema.errors import WireError

SEALS: list[tuple[Callable[[], Seal | None], Callable[[], Seal | None]]] = [
    (lambda: None, lambda: None),
    (lambda: Seal(b"a" * 32, b"b" * 32), lambda: Seal(b"b" * 32, b"a" * 32)),
]


class End:
    """One end of a connection, with what it received and how it ended."""

    def __init__(
        self, sock: socket.socket, *, limit: int = 1 << 20, seal: Seal | None = None
    ) -> None:
        self.sock, self.frames, self.ends = sock, list[bytes](), list[str]()
        self.changed = asyncio.Event()
        self.framed = FramedSocket(
            sock, on_frame=self._take, on_end=self._ended, limit=limit, seal=seal
        )

    def _take(self, payload: bytes) -> None:
        self.frames.append(payload)
        if payload == b"close":
            self.framed.close()
        self.changed.set()

    def _ended(self, reason: str) -> None:
        self.ends.append(reason)
        self.changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


@contextlib.asynccontextmanager
async def one_end(*, limit: int = 1 << 20) -> AsyncIterator[tuple[End, socket.socket]]:
    ours, theirs = socket.socketpair()
    with theirs:
        end = End(ours, limit=limit)
        try:
            yield end, theirs
        finally:
            end.framed.close()


def framed(*payloads: bytes) -> bytes:
    return b"".join(part for payload in payloads for part in frame(payload))


@pytest.mark.parametrize(("first", "second"), SEALS, ids=["plain", "sealed"])
async def test_frames_of_any_number_and_size_arrive_in_order(
    first: Callable[[], Seal | None], second: Callable[[], Seal | None]
) -> None:
    """They are more than one system call takes, and more than a socket holds."""
    sockets = socket.socketpair()
    one, other = End(sockets[0], seal=first()), End(sockets[1], seal=second())
    sent = [bytes([number % 256]) * (number % 7) for number in range(300)]
    sent += [bytes(1 << 20), b"", b"x" * 1_000_003, b"last"]
    for payload in sent:
        one.framed.send(payload)
    await other.until(lambda: len(other.frames) == len(sent))
    assert other.frames == sent
    assert one.framed._unsent_bytes == 0
    one.framed.send(b"another")  # after the queue was empty
    await other.until(lambda: other.frames[-1] == b"another")
    one.framed.send(b"dropped")
    one.framed.close()
    one.framed.close()
    one.framed.send(b"dropped too")
    await other.until(lambda: other.ends)
    for end in (one, other):
        assert (end.ends, end.framed.closed, end.sock.fileno()) == ([""], True, -1)
    assert other.frames[-1] == b"another"


async def test_a_frame_above_the_limit_ends_the_connection() -> None:
    async with one_end(limit=4) as (end, theirs):
        theirs.send(framed(b"four") + framed(b"above"))  # and nothing after them
        await end.until(lambda: end.ends)
        assert end.frames == [b"four"]
        assert end.ends == ["sent an invalid frame: frame must have at most 4 bytes, got 5"]


async def test_what_waits_for_a_peer_that_does_not_read_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(framing, "UNREAD_BYTES", 20)
    async with one_end() as (end, theirs):
        end.framed.send(b"x" * 16)
        await asyncio.sleep(0)  # it is sent: the bound is free again
        for _ in range(2):
            end.framed.send(b"y" * 6)  # 20 bytes with their lengths
            assert not end.framed.closed
        end.framed.send(b"")
        assert end.ends == ["does not read: more than 20 bytes wait"]
        assert theirs.recv(100) == framed(b"x" * 16)


async def test_what_a_peer_sent_before_its_end_is_delivered_though_it_reads_no_more() -> None:
    async with one_end() as (end, theirs):
        theirs.send(framed(b"farewell", b"close", b"after the end"))
        theirs.close()
        end.framed.send(b"too late")
        end.framed._flush()
        assert end.framed._unsent_bytes == 0
        await end.until(lambda: end.ends)
        assert (end.frames, end.ends) == ([b"farewell", b"close"], [""])


async def test_bytes_and_sealed_frames_are_received_and_nothing_after_them() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        theirs.send(b"123456789")
        received = [await receive_exactly(ours, count) for count in (0, 4, 5)]
        assert received == [b"", b"1234", b"56789"]
        sending, receiving = Seal(b"a" * 32, b"b" * 32), Seal(b"b" * 32, b"a" * 32)
        await send_frame(theirs, b"four", sending)
        theirs.send(b"after")
        assert await receive_frame(ours, receiving, limit=4) == b"four"
        assert ours.recv(100) == b"after"
        await send_frame(theirs, b"above", sending)
        with pytest.raises(WireError) as caught:
            await receive_frame(ours, receiving, limit=4)
        assert str(caught.value) == f"frame must have at most 4 bytes, got {5 + CODE_BYTES}"
        theirs.close()
        with pytest.raises(ConnectionResetError, match=r"^the connection ended 1 bytes early$"):
            await receive_exactly(ours, 5 + CODE_BYTES + 1)
