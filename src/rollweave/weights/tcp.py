"""`Transport` over TCP sockets, with the bodies in them or carried by a library beside
them.
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
from collections.abc import Callable

import xxhash

from rollweave.io.wire import encode
from rollweave.schema.errors import WireError
from rollweave.schema.weights import RelayAddress, TransportName
from rollweave.weights.carriers import MooncakeCarrier, NixlCarrier
from rollweave.weights.protocol import FetchError, Message, decode_message
from rollweave.weights.transport import Allocate, Body, Carrier, Serve, Transport

IDLE_TIMEOUT_S = 10.0
"""Seconds without a byte after which a peer is gone.

One that lives and has nothing to send says so several times within it.
"""

HELLO = b"rollweave weights 1\n"
WELCOME = b"welcome\n"

HEAD = struct.Struct("<IQQ")
"""Of a message: bytes of its head and of its body, xxh3-64 of the body."""
CHECK = struct.Struct("<Q")
"""Then xxh3-64 of that and of the head."""

MAX_HEAD_BYTES = 64 << 20
"""Bytes of the largest head: a manifest of a million tensors has fewer."""

SLICE_BYTES = 1 << 20
"""Bytes sent or received before others get their turn."""

MAX_CONNECTIONS = 256
"""That one listener serves at once; who comes beyond them is turned away."""

MAX_UNAUTHENTICATED = 64
"""Connections that have not shown the secret yet; who comes beyond them takes the place
of the one that has had longest to.
"""

ACCEPT_PAUSE_S = 0.1
"""Seconds without accepting, where the process has no more descriptors."""


class Tcp:
    """The default: sockets, and `sendfile` straight from shared memory.

    With a `carrier` only heads go over the sockets.
    """

    def __init__(self, *, silent_s: float = IDLE_TIMEOUT_S, carrier: Carrier | None = None) -> None:
        if silent_s <= 0:
            raise ValueError(f"silent_s must be above 0, got {silent_s}")
        self._silent_s, self._carrier = silent_s, carrier

    async def listen(self, host: str, serve: Serve) -> "TcpListener":
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        sock = socket.socket(found[0][0], socket.SOCK_STREAM)
        try:
            sock.bind(found[0][4])
            sock.listen(MAX_CONNECTIONS)
            sock.setblocking(False)
            return TcpListener(sock, host, serve, self._channel, self._silent_s)
        except BaseException:
            sock.close()
            raise

    async def connect(self, address: RelayAddress) -> "TcpChannel":
        where = f"{address.host}:{address.port}"
        loop = asyncio.get_running_loop()
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(self._silent_s):
                found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
                sock = socket.socket(found[0][0], socket.SOCK_STREAM)
                sock.setblocking(False)
                await loop.sock_connect(sock, found[0][4])
                await loop.sock_sendall(sock, HELLO + _hashed(address.secret))
                if await _receive(loop, sock, len(WELCOME)) != WELCOME:
                    raise FetchError(
                        "source",
                        f"{where} has hung up: it is no relay, our secret is not its "
                        "own, or it has ended",
                    )
            return self._channel(sock, where)
        except TimeoutError:
            _hang_up(sock)
            raise FetchError(
                "source", f"{where} did not answer within {self._silent_s:g} s"
            ) from None
        except OSError as error:
            _hang_up(sock)
            raise FetchError("source", f"{where} cannot be reached: {error}") from error
        except BaseException:
            _hang_up(sock)
            raise

    def _channel(self, sock: socket.socket, peer: str) -> "TcpChannel":
        return TcpChannel(sock, peer, self._silent_s, self._carrier)


class TcpListener:
    """`Listener`. Each connection is a task, ended by `close`."""

    def __init__(
        self,
        sock: socket.socket,
        host: str,
        serve: Serve,
        channel: "Callable[[socket.socket, str], TcpChannel]",
        silent_s: float,
    ) -> None:
        self._sock, self._serve, self._channel, self._silent_s = sock, serve, channel, silent_s
        self._loop = asyncio.get_running_loop()
        self.address = RelayAddress(host=host, port=sock.getsockname()[1], secret=os.urandom(32))
        self._shown = HELLO + _hashed(self.address.secret)
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], None] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock, self._accept)

    async def close(self) -> None:
        self._loop.remove_reader(self._sock)
        if self._pause is not None:
            self._pause.cancel()
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
        except OSError as error:  # too many open files, say
            print(f"cannot accept connections for a moment: {error}", file=sys.stderr, flush=True)
            self._loop.remove_reader(self._sock)
            self._pause = self._loop.call_later(
                ACCEPT_PAUSE_S, self._loop.add_reader, self._sock, self._accept
            )
            return
        sock.setblocking(False)
        if len(self._tasks) - len(self._strangers) >= MAX_CONNECTIONS:
            sock.close()
            return
        if len(self._strangers) >= MAX_UNAUTHENTICATED:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._one(sock, f"{peer[0]}:{peer[1]}"), name=f"serve {peer}")
        self._tasks.add(task)
        self._strangers[task] = None
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: self._strangers.pop(task, None))
        # also where it was cancelled before it began
        task.add_done_callback(lambda _: _hang_up(sock))

    async def _one(self, sock: socket.socket, peer: str) -> None:
        channel: TcpChannel | None = None
        try:
            async with asyncio.timeout(self._silent_s):
                if not hmac.compare_digest(
                    await _receive(self._loop, sock, len(self._shown)), self._shown
                ):
                    return
                task = asyncio.current_task()
                assert task is not None, "we are one"
                self._strangers.pop(task, None)
                await self._loop.sock_sendall(sock, WELCOME)
            channel = self._channel(sock, peer)
            await self._serve(channel)
        except (FetchError, OSError, TimeoutError):
            pass  # whoever asked sees the end of the connection, and tells why it matters
        except Exception:
            traceback.print_exc()  # a slip of ours ends this conversation alone
        finally:
            if channel is not None:
                channel.close()


class TcpChannel:
    """`Channel` over a connected socket."""

    def __init__(
        self, sock: socket.socket, peer: str, silent_s: float, carrier: Carrier | None
    ) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._peer, self._silent_s, self._carrier = sock, peer, silent_s, carrier
        self._loop = asyncio.get_running_loop()
        self.waits_since: float | None = None

    async def send(self, word: Message, body: Body | None = None) -> None:
        head = encode(word)
        nbytes, check = (body.nbytes, body.check) if body is not None else (0, 0)
        start = HEAD.pack(len(head), nbytes, check)
        check = xxhash.xxh3_64_intdigest(start + head)
        try:
            await self._send_all(memoryview(start + CHECK.pack(check) + head))
            if body is None or nbytes == 0:
                return
            if self._carrier is not None:
                await self._carried_out(body, self._carrier)
            elif body.data is not None:
                await self._send_all(body.data)
            else:
                await self._send_file(body)
        except OSError as error:
            self.close()
            raise FetchError("source", f"{self._peer} has gone: {error}") from error
        except BaseException:
            self.close()
            raise

    async def receive(self, room: Allocate | None = None) -> tuple[Message, int]:
        try:
            start = await self._take(HEAD.size + CHECK.size)
            size, nbytes, check = HEAD.unpack_from(start)
            if size > MAX_HEAD_BYTES:
                raise FetchError("broken", f"{self._peer} sent what is no message of ours")
            head = await self._take(size)
            if (
                xxhash.xxh3_64_intdigest(bytes(start[: HEAD.size]) + head)
                != CHECK.unpack_from(start, HEAD.size)[0]
            ):
                raise FetchError("broken", f"{self._peer} sent a head that was damaged on the way")
            word: Message = decode_message(bytes(head))
            if nbytes:
                if room is None:
                    raise FetchError(
                        "broken", f"{self._peer} sent {nbytes} bytes with a {type(word).__name__}"
                    )
                with room(word, nbytes) as view:
                    await self._take_body(view)
                    if xxhash.xxh3_64_intdigest(view) != check:
                        raise FetchError(
                            "broken",
                            f"{self._peer} sent {nbytes} bytes that were damaged on the way",
                        )
            return word, check
        except WireError as error:
            self.close()
            raise FetchError("broken", f"{self._peer}: {error}") from error
        except OSError as error:
            self.close()
            raise FetchError("source", f"{self._peer} has gone: {error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            _hang_up(self._sock)

    # Bytes out.

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
            assert sent, "shared memory that is given away does not shrink"
            offset += sent
            await asyncio.sleep(0)

    async def _writable(self) -> None:
        """Return once the socket takes more. Raises TakeError (source)."""
        ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self._sock, lambda: None if ready.done() else ready.set_result(None))
        try:
            async with asyncio.timeout(self._silent_s):
                await ready
        except TimeoutError:
            raise FetchError(
                "source", f"{self._peer} has taken nothing for {self._silent_s:g} s"
            ) from None
        finally:
            self._loop.remove_writer(self._sock)

    # Bytes in.

    async def _take(self, count: int) -> bytearray:
        data = bytearray(count)
        with memoryview(data) as view:
            await self._fill(view)
        return data

    async def _fill(self, view: memoryview) -> None:
        """Raises TakeError (source)."""
        done = 0
        while done < len(view):
            self.waits_since = self._loop.time()
            try:
                async with asyncio.timeout(self._silent_s):
                    count = await self._loop.sock_recv_into(
                        self._sock, view[done : done + SLICE_BYTES]
                    )
            except TimeoutError:
                raise FetchError(
                    "source", f"{self._peer} has said nothing for {self._silent_s:g} s"
                ) from None
            finally:
                self.waits_since = None
            if count == 0:
                raise FetchError("source", f"{self._peer} has hung up")
            done += count
            # where bytes come faster than they are taken, nothing above waits
            await asyncio.sleep(0)

    # Bodies that a library carries: the socket has a token instead, and an answer once
    # the peer has read it.

    async def _carried_out(self, body: Body, carrier: Carrier) -> None:
        # Each reader has its own mapping or copy: a library registers an address once.
        data = memoryview(bytearray(body.data)) if body.data is not None else _mapped(body)
        token = await asyncio.to_thread(carrier.offer, data)
        try:
            await self._send_all(memoryview(CHECK.pack(len(token)) + token))
            await self._take(1)
        finally:
            await asyncio.to_thread(carrier.withdraw, token)

    async def _take_body(self, view: memoryview) -> None:
        if self._carrier is None:
            await self._fill(view)
            return
        (size,) = CHECK.unpack(await self._take(CHECK.size))
        if size > SLICE_BYTES:
            raise FetchError("broken", f"{self._peer} does not use the same transport")
        token = bytes(await self._take(size))
        # The thread writes into `view`, so it is waited for, whatever happens to us.
        reading = asyncio.ensure_future(asyncio.to_thread(self._carrier.fetch, token, view))
        try:
            await asyncio.shield(reading)
        except asyncio.CancelledError:
            await asyncio.wait([reading])
            raise
        await self._send_all(memoryview(b"\n"))


def _hashed(secret: bytes) -> bytes:
    """A secret of any length in 32 bytes."""
    return hashlib.sha256(secret).digest()


async def _receive(loop: asyncio.AbstractEventLoop, sock: socket.socket, count: int) -> bytes:
    """`count` bytes, or fewer where the peer hangs up."""
    data = b""
    while len(data) < count and (more := await loop.sock_recv(sock, count - len(data))):
        data += more
    return data


def _hang_up(sock: socket.socket | None) -> None:
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.close()


def _mapped(body: Body) -> memoryview:
    base = body.offset - body.offset % mmap.ALLOCATIONGRANULARITY
    found = mmap.mmap(
        body.fd, body.offset - base + body.nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ, offset=base
    )
    return memoryview(found)[body.offset - base :]


def transport_of(name: TransportName, *, host: str) -> Transport:
    """The transport of that name, for a process that listens on `host`.

    Raises ConfigError where its extra is not installed.
    """
    match name:
        case "tcp":
            return Tcp()
        case "mooncake":
            return Tcp(carrier=MooncakeCarrier(host))
        case "nixl":
            return Tcp(carrier=NixlCarrier())
