"""Frames over a connected stream socket, on the event loop, sealed or not
(`io/wire`).

Invariants: `on_frame` receives each payload once, in order; `on_end` is called exactly
once, and no frame is delivered afterwards; the bytes that wait to be sent are bounded.
This module does not interpret the frames.
"""

import asyncio
import itertools
import socket
from collections import deque
from collections.abc import Callable

from rollweave.io.wire import CODE_BYTES, FRAME_BYTES, LENGTH, FrameDecoder, Seal, frame
from rollweave.schema.errors import WireError

RECEIVE_BYTES = 1 << 18
"""Maximum number of bytes in one read from the socket."""

UNREAD_BYTES = 1 << 30
"""Maximum number of bytes queued for a peer that does not read: more than any batch,
and less than a host's memory.
"""

PIECES = 64
"""Maximum number of pieces in one system call."""


class FramedSocket:
    """One end of a connection. All calls belong to the event loop's thread.

    `on_end` receives the reason if the peer broke the rules, and "" if the connection
    ended.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_frame: Callable[[bytes], None],
        on_end: Callable[[str], None],
        limit: int = FRAME_BYTES,
        seal: Seal | None = None,
    ) -> None:
        self._socket, self._on_frame, self._on_end = sock, on_frame, on_end
        self._seal = seal
        self._loop = asyncio.get_running_loop()
        self._decoder = FrameDecoder(limit + (0 if seal is None else CODE_BYTES))
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._closed = False
        sock.setblocking(False)
        self._loop.add_reader(sock, self._readable)

    @property
    def closed(self) -> bool:
        return self._closed

    def send(self, payload: bytes) -> None:
        """Queue one frame, which is sent together with all other frames of this pass of
        the event loop. The frame is dropped if the connection has ended.
        """
        if self._closed:
            return
        if not self._unsent:
            self._loop.call_soon(self._flush)
        for piece in frame(payload, b"" if self._seal is None else self._seal.code(payload)):
            self._unsent.append(memoryview(piece))
            self._unsent_bytes += len(piece)
        if self._unsent_bytes > UNREAD_BYTES:
            self._end(f"does not read: more than {UNREAD_BYTES} bytes wait")

    def close(self) -> None:
        """End the connection now; unsent frames are dropped."""
        self._end("")

    def _readable(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end("")
            return
        try:
            for payload in self._decoder.feed(data):
                if not self._closed:
                    self._on_frame(payload if self._seal is None else self._seal.opened(payload))
            self._decoder.feed(b"")  # raises if an invalid length follows these frames
        except WireError as error:
            self._end(f"sent an invalid frame: {error}")

    def _flush(self) -> None:
        if not self._closed:
            self._writable()

    def _writable(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.sendmsg(list(itertools.islice(self._unsent, PIECES)))
                self._unsent_bytes -= sent
                while sent:
                    piece = self._unsent.popleft()
                    if sent < len(piece):
                        self._unsent.appendleft(piece[sent:])
                    sent -= min(sent, len(piece))
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._writable)
            return
        except OSError:
            # the reader detects the end, after the frames that the peer sent before it
            self._unsent.clear()
            self._unsent_bytes = 0
        self._loop.remove_writer(self._socket)

    def _end(self, error: str) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._unsent.clear()
        self._on_end(error)


async def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """Receive exactly `count` bytes from a non-blocking socket; later bytes stay in the
    socket.

    Raises OSError, also for a connection that ends early.
    """
    loop, data = asyncio.get_running_loop(), bytearray()
    while len(data) < count:
        piece = await loop.sock_recv(sock, min(RECEIVE_BYTES, count - len(data)))
        if not piece:
            raise ConnectionResetError(f"the connection ended {count - len(data)} bytes early")
        data += piece
    return bytes(data)


async def receive_frame(sock: socket.socket, seal: Seal, *, limit: int) -> bytes:
    """Receive one sealed frame of at most `limit` bytes. Nothing after the frame is
    read, so another reader may then take over the socket.

    Raises WireError for a longer frame or a wrong seal, and OSError as
    `receive_exactly` does.
    """
    (length,) = LENGTH.unpack(await receive_exactly(sock, LENGTH.size))
    if length > limit + CODE_BYTES:
        raise WireError(f"frame must have at most {limit} bytes, got {length}")
    return seal.opened(await receive_exactly(sock, length))


async def send_frame(sock: socket.socket, payload: bytes, seal: Seal) -> None:
    """Send one sealed frame on a non-blocking socket. Raises OSError."""
    pieces = frame(payload, seal.code(payload))
    await asyncio.get_running_loop().sock_sendall(sock, b"".join(pieces))
