"""Frames that a peer sent before its end arrive."""

import asyncio
import socket

from rollweave.io.framing import FramedSocket
from rollweave.io.wire import frame


async def test_frames_before_the_end_arrive_even_if_a_frame_to_the_peer_fails() -> None:
    """A process that fails reports the reason and ends, while it is sent commands."""
    ours, theirs = socket.socketpair()
    received: list[bytes] = []
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    connection = FramedSocket(ours, on_frame=received.append, on_end=ended.set_result)
    theirs.sendall(b"".join(frame(b"the reason")))
    theirs.close()
    connection.send(b"a command")
    async with asyncio.timeout(10):
        assert await ended == ""
    assert received == [b"the reason"]
    assert connection.closed
    connection.send(b"another")
