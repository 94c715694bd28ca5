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
from rollweave.io.wire import CODE_BYTES, LENGTH, Seal, frame
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
        self.changed, self.closes_after = asyncio.Event(), -1
        self.framed = FramedSocket(
            sock, on_frame=self._take, on_end=self._ended, limit=limit, seal=seal
        )

    def _take(self, payload: bytes) -> None:
        self.frames.append(payload)
        if len(self.frames) == self.closes_after:
            self.framed.close()
        self.changed.set()

    def _ended(self, reason: str) -> None:
        self.ends.append(reason)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


@contextlib.asynccontextmanager
async def one_end(*, limit: int = 1 << 20) -> AsyncIterator[tuple[End, socket.socket]]:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.setblocking(False)
        end = End(ours, limit=limit)
        try:
            yield end, theirs
        finally:
            end.framed.close()


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
    other.framed.send(b"answer")
    await other.until(lambda: other.frames[-1] == b"another")
    await one.until(lambda: one.frames == [b"answer"])
    one.framed.close()
    assert (one.ends, one.framed.closed, sockets[0].fileno()) == ([""], True, -1)
    await other.until(lambda: bool(other.ends))
    assert (other.ends, other.framed.closed, sockets[1].fileno()) == ([""], True, -1)


async def test_a_closed_connection_neither_sends_nor_ends_again() -> None:
    async with one_end() as (end, theirs):
        end.framed.send(b"dropped")
        end.framed.close()
        end.framed.close()
        end.framed.send(b"dropped too")
        await asyncio.sleep(0)
        assert end.ends == [""]
        assert theirs.recv(100) == b""


async def test_no_frame_is_delivered_after_the_end() -> None:
    async with one_end() as (end, theirs):
        end.closes_after = 2
        theirs.send(b"".join(part for text in (b"a", b"b", b"c") for part in frame(text)))
        await end.until(lambda: bool(end.ends))
        assert (end.frames, end.ends) == ([b"a", b"b"], [""])


async def test_a_frame_above_the_limit_ends_the_connection() -> None:
    async with one_end(limit=4) as (end, theirs):
        theirs.send(b"".join(frame(b"four")))
        await end.until(lambda: bool(end.frames))
        theirs.send(b"".join(frame(b"above")))
        await end.until(lambda: bool(end.ends))
        assert end.frames == [b"four"]
        reason = "sent an invalid frame: frame must have at most 4 bytes, got 5"
        assert end.ends == [reason]


async def test_a_sealed_frame_may_have_as_many_bytes_as_another() -> None:
    sockets = socket.socketpair()
    first, second = SEALS[1]
    one, other = End(sockets[0], seal=first()), End(sockets[1], limit=4, seal=second())
    one.framed.send(b"four")
    await other.until(lambda: bool(other.frames))
    one.framed.send(b"above")
    await other.until(lambda: bool(other.ends))
    assert other.frames == [b"four"]
    assert other.ends == ["sent an invalid frame: frame must have at most 36 bytes, got 37"]
    one.framed.close()


async def test_what_waits_for_a_peer_that_does_not_read_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(framing, "UNREAD_BYTES", 20)
    async with one_end() as (end, theirs):
        end.framed.send(b"x" * 16)
        assert not end.framed.closed
        await asyncio.sleep(0)  # it is sent: the bound is free again
        end.framed.send(b"y" * 6)
        end.framed.send(b"z" * 6)  # 20 bytes with their lengths
        assert not end.framed.closed
        end.framed.send(b"")
        assert end.ends == ["does not read: more than 20 bytes wait"]
        assert theirs.recv(100) == LENGTH.pack(16) + b"x" * 16


async def test_what_a_peer_sent_before_its_end_is_delivered_though_it_reads_no_more() -> None:
    async with one_end() as (end, theirs):
        theirs.send(b"".join(frame(b"farewell")))
        theirs.close()
        end.framed.send(b"too late")
        end.framed._flush()
        assert end.framed._unsent_bytes == 0
        await end.until(lambda: bool(end.ends))
        assert (end.frames, end.ends) == ([b"farewell"], [""])


async def test_bytes_are_received_exactly() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.send(b"123456789")
        assert await receive_exactly(ours, 0) == b""
        assert await receive_exactly(ours, 4) == b"1234"
        assert await receive_exactly(ours, 2) == b"56"
        waiting = asyncio.create_task(receive_exactly(ours, 5))
        await asyncio.sleep(0)
        theirs.send(b"0")
        theirs.close()
        with pytest.raises(ConnectionResetError, match=r"^the connection ended 1 bytes early$"):
            await waiting


async def test_one_sealed_frame_is_received_and_nothing_after_it() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for each in (ours, theirs):
            each.setblocking(False)
        sending, receiving = Seal(b"a" * 32, b"b" * 32), Seal(b"b" * 32, b"a" * 32)
        await send_frame(theirs, b"four", sending)
        theirs.send(b"after")
        assert await receive_frame(ours, receiving, limit=4) == b"four"
        assert ours.recv(100) == b"after"
        await send_frame(theirs, b"above", sending)
        with pytest.raises(WireError) as caught:
            await receive_frame(ours, receiving, limit=4)
        assert str(caught.value) == f"frame must have at most 4 bytes, got {5 + CODE_BYTES}"
