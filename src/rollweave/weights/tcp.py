"""Channels between hosts, over TCP sockets. Bodies travel in the sockets, or through a
library outside them.

Invariants: a client presents the secret first and learns nothing without it; `receive`
returns exactly the bits that were sent, or raises FetchError (broken), and after any
error a channel sends nothing more; every wait ends, because a silent peer counts as
gone (FetchError, source).
"""

import asyncio
import contextlib
import hashlib
import hmac
import mmap
import os
import socket
import struct
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import xxhash

from rollweave.io.wire import encode
from rollweave.schema.base import TaggedStruct
from rollweave.schema.errors import WireError
from rollweave.schema.weights import HEARTBEAT_S, RelayAddress, TransportName
from rollweave.weights.carriers import MooncakeCarrier, NixlCarrier
from rollweave.weights.transport import Allocate, Body, Carrier, FetchError, decode_message

IDLE_TIMEOUT_S = 10.0
"""Seconds without a byte after which a peer counts as gone.

A live peer that has nothing to send sends several keep-alives within this time.
"""

HELLO = b"rollweave weights 1\n"
WELCOME = b"welcome\n"

HEAD = struct.Struct("<IQQ")
"""Start of a message: bytes of its head, bytes of its body, xxh3-64 of the body."""
CHECK = struct.Struct("<Q")
"""The xxh3-64 of the start and the head, which follows the start."""

MAX_HEAD_BYTES = 64 << 20
"""Maximum bytes of a head: a manifest of a million tensors has fewer."""

SLICE_BYTES = 1 << 20
"""Bytes sent or received before other tasks get their turn."""

MAX_CONNECTIONS = 256
"""Maximum connections that one listener serves at the same time; further connections
are closed.
"""

MAX_UNAUTHENTICATED = 64
"""Maximum connections that have not presented the secret yet; a further connection
replaces the oldest of them.
"""

ACCEPT_PAUSE_S = 0.1
"""Seconds without accepting connections after the process ran out of descriptors."""


Decode = Callable[[bytes], object]


class Tcp:
    """Connects hosts: by sockets, and `sendfile` straight from shared memory. With a
    `carrier` only heads travel over the sockets.
    """

    def __init__(
        self,
        *,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
        carrier: Carrier | None = None,
        decode: Decode = decode_message,
    ) -> None:
        """Messages are what `decode` returns, which raises WireError for all else."""
        if idle_timeout_s <= 0:
            raise ValueError(f"idle_timeout_s must be above 0, got {idle_timeout_s}")
        self._idle_timeout_s, self._carrier, self._decode = idle_timeout_s, carrier, decode

    async def listen(self, host: str, serve: "Serve") -> "Listener":
        """Serve every channel whose client has presented the secret. Raises OSError."""
        loop = asyncio.get_running_loop()
        addresses = await loop.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        sock = socket.socket(addresses[0][0], socket.SOCK_STREAM)
        try:
            sock.bind(addresses[0][4])
            sock.listen(MAX_CONNECTIONS)
            sock.setblocking(False)
            return Listener(sock, host, serve, self._channel, self._idle_timeout_s)
        except BaseException:
            sock.close()
            raise

    async def connect(self, address: RelayAddress) -> "Channel":
        """Open a channel. Raises FetchError (source)."""
        where = f"{address.host}:{address.port}"
        loop = asyncio.get_running_loop()
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                addresses = await loop.getaddrinfo(
                    address.host, address.port, type=socket.SOCK_STREAM
                )
                sock = socket.socket(addresses[0][0], socket.SOCK_STREAM)
                sock.setblocking(False)
                await loop.sock_connect(sock, addresses[0][4])
                await loop.sock_sendall(sock, HELLO + _hashed(address.secret))
                if await _receive(loop, sock, len(WELCOME)) != WELCOME:
                    raise FetchError(
                        "source",
                        f"{where} closed the connection: it is not a relay, has another secret, "
                        "or is shutting down",
                    )
            return self._channel(sock, where)
        except TimeoutError:
            _close_socket(sock)
            raise FetchError(
                "source", f"{where} did not answer within {self._idle_timeout_s:g} s"
            ) from None
        except OSError as error:
            _close_socket(sock)
            raise FetchError("source", f"{where} cannot be reached: {error}") from error
        except BaseException:
            _close_socket(sock)
            raise

    def _channel(self, sock: socket.socket, peer: str) -> "Channel":
        return Channel(sock, peer, self._idle_timeout_s, self._carrier, self._decode)


class Listener:
    """Serves the clients that connect to `address`. Each connection is a task, which
    `close` cancels.
    """

    def __init__(
        self,
        sock: socket.socket,
        host: str,
        serve: "Serve",
        channel: "Callable[[socket.socket, str], Channel]",
        idle_timeout_s: float,
    ) -> None:
        self._sock, self._serve = sock, serve
        self._channel, self._idle_timeout_s = channel, idle_timeout_s
        self._loop = asyncio.get_running_loop()
        self.address = RelayAddress(host=host, port=sock.getsockname()[1], secret=os.urandom(32))
        self._expected_hello = HELLO + _hashed(self.address.secret)
        self._tasks: set[asyncio.Task[None]] = set()
        self._unauthenticated: dict[asyncio.Task[None], None] = {}
        self._resume_timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock, self._accept)

    async def close(self) -> None:
        self._loop.remove_reader(self._sock)
        if self._resume_timer is not None:
            self._resume_timer.cancel()
        self._sock.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _accept(self) -> None:
        try:
            sock, peer = self._sock.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # for example too many open files
            print(f"cannot accept connections for a moment: {error}", file=sys.stderr, flush=True)
            self._loop.remove_reader(self._sock)
            self._resume_timer = self._loop.call_later(
                ACCEPT_PAUSE_S, self._loop.add_reader, self._sock, self._accept
            )
            return
        sock.setblocking(False)
        if len(self._tasks) - len(self._unauthenticated) >= MAX_CONNECTIONS:
            sock.close()
            return
        if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.cancel()
        task = self._loop.create_task(
            self._serve_connection(sock, f"{peer[0]}:{peer[1]}"), name=f"serve {peer}"
        )
        self._tasks.add(task)
        self._unauthenticated[task] = None
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: self._unauthenticated.pop(task, None))
        # also closes the socket of a task that was cancelled before it started
        task.add_done_callback(lambda _: _close_socket(sock))

    async def _serve_connection(self, sock: socket.socket, peer: str) -> None:
        channel: Channel | None = None
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                if not hmac.compare_digest(
                    await _receive(self._loop, sock, len(self._expected_hello)),
                    self._expected_hello,
                ):
                    return
                task = asyncio.current_task()
                assert task is not None, "this runs in a task"
                self._unauthenticated.pop(task, None)
                await self._loop.sock_sendall(sock, WELCOME)
            channel = self._channel(sock, peer)
            await self._serve(channel)
        except (FetchError, OSError, TimeoutError):
            pass  # the peer sees the connection close, and reports why that matters
        except Exception:
            traceback.print_exc()  # a bug of ours ends this connection only
        finally:
            if channel is not None:
                channel.close()


class Channel:
    """One end of a connection. At most one task sends and one receives at a time."""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        idle_timeout_s: float,
        carrier: Carrier | None,
        decode: Decode,
    ) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._peer = sock, peer
        self._idle_timeout_s, self._carrier, self._decode = idle_timeout_s, carrier, decode
        self._loop = asyncio.get_running_loop()
        self.waiting_since: float | None = None
        """The time on the loop's clock since which `receive` has waited without a byte;
        None if it is not waiting.
        """
        self.received_bytes = 0
        """The bytes that have arrived of the body for which `receive` is waiting."""

    @property
    def host(self) -> str:
        """The address of this host by which the peer is reached."""
        host: str = self._sock.getsockname()[0]
        return host

    async def send(self, message: TaggedStruct, body: Body | None = None) -> None:
        """Send a message. Raises FetchError (source)."""
        head = encode(message)
        nbytes, check = (body.nbytes, body.checksum) if body is not None else (0, 0)
        start = HEAD.pack(len(head), nbytes, check)
        check = xxhash.xxh3_64_intdigest(start + head)
        try:
            await self._send_all(memoryview(start + CHECK.pack(check) + head))
            if body is None or nbytes == 0:
                return
            if self._carrier is not None:
                await self._send_by_carrier(body, self._carrier)
            elif body.data is not None:
                await self._send_all(body.data)
            else:
                await self._send_file(body)
        except OSError as error:
            self.close()
            raise FetchError("source", f"{self._peer} is gone: {error}") from error
        except BaseException:
            self.close()
            raise

    async def receive(self, allocate: Allocate | None = None) -> tuple[Any, int]:
        """Return the next message and the xxh3-64 of its body, which goes to memory
        from `allocate`. Without `allocate`, a body is an error.

        Raises FetchError (source, broken).
        """
        try:
            start = await self._receive_bytes(HEAD.size + CHECK.size)
            size, nbytes, check = HEAD.unpack_from(start)
            if size > MAX_HEAD_BYTES:
                raise FetchError("broken", f"{self._peer} sent bytes that are not a message")
            head = await self._receive_bytes(size)
            if (
                xxhash.xxh3_64_intdigest(bytes(start[: HEAD.size]) + head)
                != CHECK.unpack_from(start, HEAD.size)[0]
            ):
                raise FetchError("broken", f"{self._peer} sent a head that was damaged in transit")
            message: Any = self._decode(bytes(head))
            if nbytes:
                if allocate is None:
                    raise FetchError(
                        "broken",
                        f"{self._peer} sent {nbytes} bytes with a {type(message).__name__}",
                    )
                with allocate(message, nbytes) as view:
                    await self._receive_body(view)
                    if xxhash.xxh3_64_intdigest(view) != check:
                        raise FetchError(
                            "broken",
                            f"{self._peer} sent {nbytes} bytes that were damaged in transit",
                        )
            self.received_bytes = 0
            return message, check
        except WireError as error:
            self.close()
            raise FetchError("broken", f"{self._peer}: {error}") from error
        except OSError as error:
            self.close()
            raise FetchError("source", f"{self._peer} is gone: {error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection. A second call does nothing."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            _close_socket(self._sock)

    # Sending.

    async def _send_all(self, data: memoryview) -> None:
        while data:
            try:
                data = data[self._sock.send(data[:SLICE_BYTES]) :]
            except BlockingIOError:
                await self._writable()

    async def _send_file(self, body: Body) -> None:
        offset, end = body.offset, body.offset + body.nbytes
        while offset < end:
            try:
                sent = os.sendfile(
                    self._sock.fileno(), body.fd, offset, min(SLICE_BYTES, end - offset)
                )
            except BlockingIOError:
                await self._writable()
                continue
            assert sent, "served memory does not shrink"
            offset += sent
            await asyncio.sleep(0)

    async def _writable(self) -> None:
        """Wait until the socket accepts more bytes. Raises FetchError (source)."""
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self._sock, lambda: None if ready.done() else ready.set_result(None))
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                await ready
        except TimeoutError:
            raise FetchError(
                "source", f"{self._peer} has accepted nothing for {self._idle_timeout_s:g} s"
            ) from None
        finally:
            self._loop.remove_writer(self._sock)

    # Receiving.

    async def _receive_bytes(self, count: int) -> bytearray:
        data = bytearray(count)
        with memoryview(data) as view:
            await self._fill(view)
        return data

    async def _fill(self, view: memoryview) -> None:
        """Fill the view from the socket. Raises FetchError (source)."""
        done = 0
        while done < len(view):
            self.waiting_since = self._loop.time()
            try:
                async with asyncio.timeout(self._idle_timeout_s):
                    count = await self._loop.sock_recv_into(
                        self._sock, view[done : done + SLICE_BYTES]
                    )
            except TimeoutError:
                raise FetchError(
                    "source", f"{self._peer} has sent nothing for {self._idle_timeout_s:g} s"
                ) from None
            finally:
                self.waiting_since = None
            if count == 0:
                raise FetchError("source", f"{self._peer} closed the connection")
            done += count
            self.received_bytes = done
            # yields to other tasks even if bytes are always available
            await asyncio.sleep(0)

    # Bodies transferred by a carrier: the socket carries a token instead, and an
    # acknowledgement once the peer has read the body.

    async def _send_by_carrier(self, body: Body, carrier: Carrier) -> None:
        # Each reader has its own mapping or copy, because a library registers an
        # address only once.
        data = memoryview(bytearray(body.data)) if body.data is not None else _mapped(body)
        token = await asyncio.to_thread(carrier.register, data)
        try:
            await self._send_all(memoryview(CHECK.pack(len(token)) + token))
            await self._receive_bytes(1)
        finally:
            await asyncio.to_thread(carrier.unregister, token)

    async def _receive_body(self, view: memoryview) -> None:
        if self._carrier is None:
            await self._fill(view)
            return
        (size,) = CHECK.unpack(await self._receive_bytes(CHECK.size))
        if size > SLICE_BYTES:
            raise FetchError("broken", f"{self._peer} does not use the same transport")
        token = bytes(await self._receive_bytes(size))
        # The thread writes into `view`, so wait for it even when cancelled.
        reading = asyncio.ensure_future(asyncio.to_thread(self._carrier.read, token, view))
        try:
            await asyncio.shield(reading)
        except asyncio.CancelledError:
            await asyncio.wait([reading])
            raise
        await self._send_all(memoryview(b"\n"))


Serve = Callable[[Channel], Awaitable[None]]


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


def _hashed(secret: bytes) -> bytes:
    """Hash a secret of any length to 32 bytes."""
    return hashlib.sha256(secret).digest()


async def _receive(loop: asyncio.AbstractEventLoop, sock: socket.socket, count: int) -> bytes:
    """Receive `count` bytes, or fewer if the peer closes the connection."""
    data = b""
    while len(data) < count and (more := await loop.sock_recv(sock, count - len(data))):
        data += more
    return data


def _close_socket(sock: socket.socket | None) -> None:
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.close()


def _mapped(body: Body) -> memoryview:
    base = body.offset - body.offset % mmap.ALLOCATIONGRANULARITY
    mapping = mmap.mmap(
        body.fd, body.offset - base + body.nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ, offset=base
    )
    return memoryview(mapping)[body.offset - base :]


def transport_of(name: TransportName, *, host: str) -> Tcp:
    """Return the transport of that name, for a process that listens on `host`.

    Raises ConfigError if its extra is not installed.
    """
    match name:
        case "tcp":
            return Tcp()
        case "mooncake":
            return Tcp(carrier=MooncakeCarrier(host))
        case "nixl":
            return Tcp(carrier=NixlCarrier())
        case "collective":
            raise AssertionError("a group has no relays")
