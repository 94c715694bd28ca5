"""A transport without a network: channels are pairs of queues, and bodies are
copied.
"""

import asyncio
import os
from collections import deque

from rollweave.schema.weights import RelayAddress
from rollweave.weights.transport import Allocate, Body, FetchError, Message, Serve

AHEAD = 2
"""Maximum number of messages that wait in a channel."""


class FakeChannel:
    """One end of a channel. `None` in the queue means closed."""

    def __init__(self, idle_timeout_s: float) -> None:
        self._idle_timeout_s = idle_timeout_s
        self._inbox: deque[tuple[Message, bytes] | None] = deque()
        self._moved = asyncio.Event()
        self.other: FakeChannel | None = None
        self._closed = False
        self.waiting_since: float | None = None
        self.received_bytes = 0

    async def send(self, message: Message, body: Body | None = None) -> None:
        data = b""
        if body is not None:
            data = (
                bytes(body.data)
                if body.data is not None
                else os.pread(body.fd, body.nbytes, body.offset)
            )
        other = self.other
        assert other is not None
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                while len(other._inbox) >= AHEAD and not other._closed and not self._closed:
                    await other._wait()
        except TimeoutError:
            self.close()
            raise FetchError("source", "nothing was accepted") from None
        if other._closed or self._closed:
            raise FetchError("source", "the other end is gone")
        other._inbox.append((message, data))
        other._wake()

    async def receive(self, allocate: Allocate | None = None) -> tuple[Message, int]:
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                while not self._inbox:
                    if self._closed:
                        raise FetchError("source", "it is closed")
                    self.waiting_since = asyncio.get_running_loop().time()
                    await self._wait()
        except TimeoutError:
            self.close()
            raise FetchError("source", "nothing was sent") from None
        finally:
            self.waiting_since = None
        entry = self._inbox[0]
        if entry is None:
            raise FetchError("source", "the other end closed the channel")
        self._inbox.popleft()
        self._wake()
        message, data = entry
        if not data:
            return message, 0
        try:
            if allocate is None:
                raise FetchError("broken", "an unexpected body")
            with allocate(message, len(data)) as view:
                view[:] = data
        except FetchError:
            self.close()
            raise
        return message, Body.of(data).checksum

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._wake()
            assert self.other is not None
            self.other._inbox.append(None)
            self.other._wake()

    async def _wait(self) -> None:
        await self._moved.wait()

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()


class FakeListener:
    def __init__(self, net: "FakeTransport", address: RelayAddress, serve: Serve) -> None:
        self.address, self.serve, self._net = address, serve, net
        self.tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        del self._net.listeners[self.address.host, self.address.port]
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class FakeTransport:
    """`Transport` within this process."""

    def __init__(self, *, idle_timeout_s: float = 5.0) -> None:
        self._idle_timeout_s = idle_timeout_s
        self.listeners: dict[tuple[str, int], FakeListener] = {}
        self._port = 100

    async def listen(self, host: str, serve: Serve) -> FakeListener:
        self._port += 1
        address = RelayAddress(host=host, port=self._port, secret=os.urandom(8))
        self.listeners[host, self._port] = FakeListener(self, address, serve)
        return self.listeners[host, self._port]

    async def connect(self, address: RelayAddress) -> FakeChannel:
        listener = self.listeners.get((address.host, address.port))
        if listener is None or listener.address.secret != address.secret:
            raise FetchError(
                "source", f"{address.host}:{address.port} is not a relay, or has another secret"
            )
        near, far = FakeChannel(self._idle_timeout_s), FakeChannel(self._idle_timeout_s)
        near.other, far.other = far, near

        async def serve() -> None:
            try:
                await listener.serve(far)
            except FetchError:
                pass
            finally:
                far.close()

        task = asyncio.create_task(serve())
        listener.tasks.add(task)
        task.add_done_callback(listener.tasks.discard)
        return near
