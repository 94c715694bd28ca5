"""A real HTTP server on the loopback interface whose every byte is decided by the test,
and a model that it can imitate.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Handle = Callable[["Exchange"], Awaitable[None]]

HANG = 0
"""A health check that is never answered."""


@dataclass
class Exchange:
    """One request, and its connection."""

    path: str
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def json_body(self) -> Any:
        return json.loads(self.body)

    def send(
        self, body: object, *, status: int = 200, length: int | None = None, **headers: str
    ) -> None:
        """Send an answer; `length` is the claimed length, if it differs from the real
        one.

        Bytes are sent as they are, other values as JSON.
        """
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [
            f"HTTP/1.1 {status} Said",
            f"Content-Length: {len(data) if length is None else length}",
        ]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + data)

    async def hung_up(self) -> None:
        """Return once the client has closed the connection."""
        while await self.reader.read(1 << 16):
            pass


@dataclass
class Wire:
    """A server.

    `handle` answers requests other than health checks and probes; `probed` answers
    probes, `health` gives a status.
    """

    handle: Handle
    probed: Handle
    health: int = 200
    port: int = 0
    seen: list[Exchange] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """Wait for a request that is not a probe."""
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    def die(self) -> None:
        """Imitate a killed process: nothing listens, every connection is reset."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                await self._answer(Exchange(head[0].split(" ")[1], body, reader, writer))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, exchange: Exchange) -> None:
        if exchange.path == "/health":
            if self.health == HANG:
                await exchange.hung_up()
            exchange.send({}, status=self.health)
        elif b"[3,1,4,1,5]" in exchange.body:
            await self.probed(exchange)
        else:
            self.seen.append(exchange)
            self.arrived.set()
            await self.handle(exchange)


@asynccontextmanager
async def serving(
    handle: Handle, *, probed: Handle | None = None, health: int = 200
) -> AsyncIterator[Wire]:
    """Run a server for the duration of the context."""
    wire = Wire(handle, probed or prorl(hot=-1.5), health)
    await wire.start()
    try:
        yield wire
    finally:
        wire.die()


def prorl(*, cold: float = -0.5, hot: float = -0.5) -> Handle:
    """Imitate a model in ProRL's dialect that counts: token n follows n - 1.

    The arguments are its log-probs at temperature 0, and at any other.
    """

    async def handle(exchange: Exchange) -> None:
        body = exchange.json_body
        tokens = [body["prompt_ids"][-1] + 1 + at for at in range(body["max_tokens"])]
        logprob = cold if body["temperature"] == 0 else hot
        exchange.send({"response_ids": tokens, "logprobs": [logprob] * len(tokens)})

    return handle
