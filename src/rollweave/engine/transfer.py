"""Moves the bytes of KV between engines: through memory that another process maps, or
through a socket that requires a secret.

All of it runs on a side thread, which an engine starts when it first has to move KV, so
that its loop never waits for a network, and seldom for memory. Invariants: a payload
never changes once it is sealed, and vanishes with its last holder, so a kill leaves
nothing behind; received bytes are verified before they are used; a connection gets
nothing before it has presented a secret, which is valid once; nothing waits longer than
`TRANSFER_S`.
"""

import asyncio
import contextlib
import mmap
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import torch
import xxhash

from rollweave.schema.errors import KvError, WeightsError
from rollweave.schema.serving import KvHeld, KvManifest, KvMemory, KvPort
from rollweave.weights.memory import read_payload, seal

TRANSFER_S = 30.0
"""Maximum seconds of a transfer, and maximum seconds that an export waits for one:
longer than the controller waits for it (`runtime/supervisors/engines.py`).
"""
GREETING_S = 5.0
"""Maximum seconds until a connection must have presented its secret."""
MAX_CONNECTIONS = 16
"""Maximum number of concurrent connections: all expected ones, and some unexpected
ones.
"""
CLOSE_S = 5.0
"""Maximum seconds that the thread gets to end its work: none of its steps takes longer.
"""

REQUEST = struct.Struct("<32sQQ")
"""The first message of a connection: the secret, the offset of the first byte of the
payload, and the number of bytes.
"""


class SideThread:
    """An event loop on a daemon thread, which starts with the first `spawn`.

    `spawn` and `close` must be called from one thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def started(self) -> bool:
        return self._thread is not None

    def spawn(self, job: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `job()` on the side thread. It must not raise."""
        if self._loop is None:
            loop = self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._run, args=(loop,), name=self._name, daemon=True
            )
            self._thread.start()
        self._loop.call_soon_threadsafe(self._start_task, job)

    def close(self) -> None:
        """Cancel all jobs, and wait until the thread has ended."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(CLOSE_S)

    def _start_task(self, job: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.ensure_future(job())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        # Its exit cancels all tasks, and waits for them.
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._end.wait())


class Payload:
    """The memory of one export: written through `buffer`, then sealed, and read by a
    process that knows its path or receives it.
    """

    def __init__(self, nbytes: int) -> None:
        """Allocate the memory completely, so that later writes neither wait for the
        system nor fail.

        Raises OSError, KvError.
        """
        self.nbytes = nbytes
        self.fd = os.memfd_create("kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, nbytes)
            self.buffer = mmap.mmap(self.fd, nbytes)
            # Touch every page, in a call that releases the GIL (MAP_POPULATE does not).
            torch.frombuffer(self.buffer, dtype=torch.uint8).zero_()
        except BaseException:
            os.close(self.fd)
            raise

    def seal(self, nbytes: int, chunk_bytes: int) -> tuple[int, ...]:
        """Keep the first `nbytes` bytes, and make them immutable.

        Return the digests of their chunks.
        """
        chunk_digests = digests(self.buffer, nbytes, chunk_bytes)
        self.buffer.close()
        os.ftruncate(self.fd, nbytes)
        self.nbytes = nbytes
        seal(self.fd)
        return chunk_digests

    @property
    def memory(self) -> KvMemory:
        return KvMemory(path=f"/proc/{os.getpid()}/fd/{self.fd}")

    def close(self) -> None:
        """Free the memory. A process that has mapped it, or a transfer that sends it,
        keeps it until it ends.
        """
        # A copy into it may have failed, and its error still refers to the memory.
        with contextlib.suppress(BufferError):
            self.buffer.close()
        os.close(self.fd)


def digests(
    payload: mmap.mmap | bytearray | memoryview, nbytes: int, chunk_bytes: int
) -> tuple[int, ...]:
    """Return the xxh3-64 of each chunk of the first `nbytes` bytes.

    Hashing releases the GIL.
    """
    with memoryview(payload) as view:
        return tuple(
            xxhash.xxh3_64_intdigest(view[start : min(start + chunk_bytes, nbytes)])
            for start in range(0, nbytes, chunk_bytes)
        )


class Server:
    """Sends payloads to peers that present their secret.

    It listens from the first `offer` on, until its tasks are cancelled.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._listening: asyncio.Task[None] | None = None
        self._port: asyncio.Future[int] | None = None
        self._offers: dict[bytes, Payload] = {}
        self._connections = 0

    async def offer(self, payload: Payload) -> KvPort:
        """Offer the payload until `withdraw`, and return where to get it.

        Raises OSError if the host is not an address of this machine.
        """
        if self._port is None or self._listening is None or self._listening.done():
            self._port = asyncio.get_running_loop().create_future()
            self._listening = asyncio.ensure_future(self._listen(self._port))
        port = await asyncio.shield(self._port)
        secret = secrets.token_bytes(32)
        self._offers[secret] = payload
        return KvPort(host=self._host, port=port, secret=secret)

    def withdraw(self, port: KvPort) -> None:
        """Invalidate the secret of an offer."""
        self._offers.pop(port.secret, None)

    async def _listen(self, port: asyncio.Future[int]) -> None:
        try:
            server = await asyncio.start_server(self._serve, self._host, 0)
        except OSError as error:
            port.set_exception(error)
            return
        async with server:
            port.set_result(server.sockets[0].getsockname()[1])
            await asyncio.Event().wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= MAX_CONNECTIONS:
                await self._send_payload(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, RuntimeError):
            # The peer is gone or late; if it is there, it sees the end of the stream
            # before the whole payload.
            pass
        finally:
            self._connections -= 1
            writer.transport.abort()  # the system delivers what was sent

    async def _send_payload(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async with asyncio.timeout(GREETING_S):
            secret, start, length = REQUEST.unpack(await reader.readexactly(REQUEST.size))
        payload = self._offers.pop(secret, None)
        if payload is None or start + length > payload.nbytes:
            return
        # Use a duplicate: if the payload is closed during the transfer, its descriptor
        # may be reused for another file.
        with os.fdopen(os.dup(payload.fd), "rb") as file:
            async with asyncio.timeout(TRANSFER_S):
                await asyncio.get_running_loop().sendfile(writer.transport, file, start, length)


async def fetch(manifest: KvManifest, *, chunk_bytes: int, first: int, last: int) -> memoryview:
    """Return chunks `[first, last)` of the payload, verified. Writes to them stay in
    this process.

    Raises KvError.
    """
    start, end = first * chunk_bytes, min(last * chunk_bytes, manifest.nbytes)
    match manifest.where:
        case KvMemory(path=path):
            try:
                payload = memoryview(read_payload(path, manifest.nbytes, where=f"KV at {path}"))
                chunks = payload[start:end]
            except WeightsError as error:
                raise KvError(str(error)) from None
        case KvHeld():
            raise KvError("the KV is held by an inference server")
        case KvPort() as port:
            chunks = memoryview(await _receive(port, start, end - start))
    if digests(chunks, end - start, chunk_bytes) != manifest.digests[first:last]:
        raise KvError("the payload differs from what was exported: its digests do not match")
    return chunks


async def _receive(port: KvPort, start: int, length: int) -> bytearray:
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in port.host else socket.AF_INET
    where = f"{port.host}:{port.port}"
    payload, done = bytearray(length), 0
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection, memoryview(payload) as view:
            connection.setblocking(False)
            async with asyncio.timeout(TRANSFER_S):
                await loop.sock_connect(connection, (port.host, port.port))
                await loop.sock_sendall(connection, REQUEST.pack(port.secret, start, length))
                while done < length:
                    count = await loop.sock_recv_into(connection, view[done:])
                    if not count:
                        raise KvError(
                            f"{where} sent {done} of {length} bytes: the source is "
                            "gone, or has withdrawn the export"
                        )
                    done += count
    except TimeoutError:
        raise KvError(f"{where} sent {done} of {length} bytes in {TRANSFER_S:g} s") from None
    except OSError as error:
        raise KvError(f"{where}: {error}") from None
    return payload
