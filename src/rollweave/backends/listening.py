"""A server of ours that listens: one way to open and to close it, and what becomes of more connections than it may have."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from aiohttp import http_exceptions, web

BACKLOG = 128
"""Connections that wait in the kernel, at most; so many are accepted before the first of them is looked at."""

TURNED_AWAY = 64
"""Connections over the bound that are told so at one time; still more are closed without a word."""

TURNED_AWAY_S = 2.0
"""That such a one may take to ask and to hear it."""


def _is_ours(record: logging.LogRecord) -> bool:
    """False for what is no HTTP: whoever sent it is told, and it is no failure of ours."""
    return not (record.exc_info and isinstance(record.exc_info[1], http_exceptions.HttpProcessingError))


_LOG = logging.getLogger("rollweave.http")
_LOG.addFilter(_is_ours)


@contextlib.asynccontextmanager
async def listening(
    app: web.Application, host: str, port: int, *, shutdown_s: float, most: int | None = None, refusal: bytes = b""
) -> AsyncIterator[str]:
    """Serve while the context is open; its base URL. Port 0 is a free one. Raises OSError where the port is taken.

    A client that goes away cancels what is done for it; at the end `shutdown_s` is left to what is under way. While there are
    `most` connections, idle ones too, others get `refusal`, a whole answer in HTTP. For a moment there may be `BACKLOG` and
    `TURNED_AWAY` more, which take files too.
    """
    runner = web.AppRunner(app, access_log=None, logger=_LOG, shutdown_timeout=shutdown_s, handler_cancellation=True)
    await runner.setup()
    try:
        assert runner.server is not None, "it was set up"
        server, turned_away = runner.server, set[Doorman]()
        factory = server if most is None else lambda: Doorman(server, most, refusal, turned_away)
        listener = await asyncio.get_running_loop().create_server(factory, host, port, backlog=BACKLOG)
        try:
            bound = listener.sockets[0].getsockname()
            yield f"http://{bound[0]}:{bound[1]}"
        finally:
            listener.close()
            for doorman in turned_away:
                doorman.close()
    finally:
        await runner.cleanup()


class Doorman(asyncio.Protocol):
    """Lets a new connection in to `server`, or tells it to come again."""

    def __init__(self, server: web.Server, most: int, refusal: bytes, turned_away: "set[Doorman]") -> None:
        self._server, self._most, self._refusal, self._turned_away = server, most, refusal, turned_away
        self._transport: asyncio.Transport | None = None
        self._told = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream"
        if len(self._server.connections) < self._most:
            protocol = self._server()
            transport.set_protocol(protocol)
            protocol.connection_made(transport)
        elif len(self._turned_away) < TURNED_AWAY:
            self._transport = transport
            self._turned_away.add(self)
            asyncio.get_running_loop().call_later(TURNED_AWAY_S, self.close)
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """It has asked for something. What else it says is read and dropped: to close before would take back the answer."""
        if self._transport is not None and not self._told:
            self._told = True
            self._transport.write(self._refusal)
            self._transport.write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        self._turned_away.discard(self)

    def close(self) -> None:
        """Do not wait for it any longer."""
        if self._transport is not None:
            self._transport.abort()
