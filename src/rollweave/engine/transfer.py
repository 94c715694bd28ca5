"""The bytes of KV on their way from engine to engine: memory that another process maps,
or a socket that wants a secret.

All of it runs on a thread of its own, which an engine starts when it first has to move
KV, so that its loop never waits for a network, and seldom for memory. Invariants: a
payload never changes once it is sealed, and vanishes with its last holder, so a kill
leaves nothing behind; what arrives is verified before anybody uses it; a connection
gets nothing before it has shown a secret, which is good once; nothing waits longer than
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
from rollweave.schema.serving import KvManifest, KvMemory, KvPort
from rollweave.weights.memory import read_payload, seal

TRANSFER_S = 30.0
"""Seconds that a transfer may take, and that an export waits for one: more than anybody
waits for it (`runtime/supervisors/engines.py`).
"""
GREETING_S = 5.0
"""Seconds in which a connection must show its secret."""
CONNECTIONS = 16
"""Connections at once: each that was asked for, and some that were not."""
CLOSE_S = 5.0
"""Seconds that the thread has to let go of what it does: no step of it is longer."""

REQUEST = struct.Struct("<32sQQ")
"""What a connection sends first: secret, first byte of the payload, and how many from
there.
"""


class SideThread:
    """An event loop on a daemon thread, which begins with the first `spawn`.

    `spawn` and `close` belong to one thread.
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
        """Run `job()` there. It must not raise."""
        if self._loop is None:
            loop = self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._main, args=(loop,), name=self._name, daemon=True
            )
            self._thread.start()
        self._loop.call_soon_threadsafe(self._begin, job)

    def close(self) -> None:
        """Cancel everything, and wait until the thread has ended."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(CLOSE_S)

    def _begin(self, job: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.ensure_future(job())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _main(self, loop: asyncio.AbstractEventLoop) -> None:
        # its end cancels all tasks, and waits for them
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._end.wait())


class Payload:
    """The memory of one export: written through `buffer`, then sealed, and read by
    whoever knows its path or has it sent.
    """

    def __init__(self, nbytes: int) -> None:
        """Memory that is there: writing to it later neither waits for the system nor
        fails. Raises OSError, KvError.
        """
        if not hasattr(os, "memfd_create"):
            raise KvError("this system has no memory files")
        self.nbytes = nbytes
        self.fd = os.memfd_create("kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, nbytes)
            self.buffer = mmap.mmap(self.fd, nbytes)
            # Touch every page, in a call that lets other threads run (MAP_POPULATE does
            # not).
            torch.frombuffer(self.buffer, dtype=torch.uint8).zero_()
        except BaseException:
            os.close(self.fd)
            raise

    def seal(self, nbytes: int, chunk_bytes: int) -> tuple[int, ...]:
        """Keep the first `nbytes` bytes, as they are, for ever.

        Returns the digests of their chunks.
        """
        found = digests(self.buffer, nbytes, chunk_bytes)
        self.buffer.close()
        os.ftruncate(self.fd, nbytes)
        self.nbytes = nbytes
        seal(self.fd)
        return found

    @property
    def memory(self) -> KvMemory:
        return KvMemory(path=f"/proc/{os.getpid()}/fd/{self.fd}")

    def close(self) -> None:
        """Let it go. Who has mapped it, or sends it, keeps it until then."""
        # a copy into it failed, and its error still refers to the memory
        with contextlib.suppress(BufferError):
            self.buffer.close()
        os.close(self.fd)


def digests(
    payload: mmap.mmap | bytearray | memoryview, nbytes: int, chunk_bytes: int
) -> tuple[int, ...]:
    """The xxh3-64 of each chunk of the first `nbytes` bytes.

    Hashing lets other threads run.
    """
    with memoryview(payload) as view:
        return tuple(
            xxhash.xxh3_64_intdigest(view[start : min(start + chunk_bytes, nbytes)])
            for start in range(0, nbytes, chunk_bytes)
        )


class Server:
    """Sends payloads to those who show their secret.

    Listens from the first `offer` on, until its tasks are cancelled.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._listening: asyncio.Task[None] | None = None
        self._port: asyncio.Future[int] | None = None
        self._offers: dict[bytes, Payload] = {}
        self._connections = 0

    async def offer(self, payload: Payload) -> KvPort:
        """Where to get the payload, until `withdraw`.

        Raises OSError where the host is no address of ours.
        """
        if self._port is None or self._listening is None or self._listening.done():
            self._port = asyncio.get_running_loop().create_future()
            self._listening = asyncio.ensure_future(self._listen(self._port))
        port = await asyncio.shield(self._port)
        secret = secrets.token_bytes(32)
        self._offers[secret] = payload
        return KvPort(host=self._host, port=port, secret=secret)

    def withdraw(self, port: KvPort) -> None:
        """Its secret is worth nothing any more."""
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
            if self._connections <= CONNECTIONS:
                await self._answer(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, RuntimeError):
            # the other side is gone or late; if it is there, it sees the end before all
            # of it came
            pass
        finally:
            self._connections -= 1
            writer.transport.abort()  # what was sent is the system's to deliver

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(GREETING_S):
            secret, start, length = REQUEST.unpack(await reader.readexactly(REQUEST.size))
        payload = self._offers.pop(secret, None)
        if payload is None or start + length > payload.nbytes:
            return
        # Its own descriptor: that of a payload which is closed meanwhile may soon be
        # another file's.
        with os.fdopen(os.dup(payload.fd), "rb") as file:
            async with asyncio.timeout(TRANSFER_S):
                await asyncio.get_running_loop().sendfile(writer.transport, file, start, length)


async def fetch(manifest: KvManifest, *, chunk_bytes: int, first: int, last: int) -> memoryview:
    """Chunks `[first, last)` of the payload, verified. Writes to them stay here.

    Raises KvError.
    """
    start, end = first * chunk_bytes, min(last * chunk_bytes, manifest.nbytes)
    match manifest.where:
        case KvMemory(path=path):
            try:
                found = memoryview(read_payload(path, manifest.nbytes, where=f"KV at {path}"))[
                    start:end
                ]
            except WeightsError as error:
                raise KvError(str(error)) from None
        case KvPort() as port:
            found = memoryview(await _receive(port, start, end - start))
    if digests(found, end - start, chunk_bytes) != manifest.digests[first:last]:
        raise KvError("the payload is not what was exported: its digests differ")
    return found


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
                            f"{where} gave {done} of {length} bytes: the source is "
                            "gone, or knows no such secret"
                        )
                    done += count
    except TimeoutError:
        raise KvError(f"{where} gave {done} of {length} bytes in {TRANSFER_S:g} s") from None
    except OSError as error:
        raise KvError(f"{where}: {error}") from None
    return payload
