"""A server of ours that listens: one way to open and to close it."""

import contextlib
from collections.abc import AsyncIterator

from aiohttp import web


@contextlib.asynccontextmanager
async def listening(app: web.Application, host: str, port: int, *, shutdown_s: float) -> AsyncIterator[str]:
    """Serve while the context is open; its base URL. Port 0 is a free one. Raises OSError where the port is taken.

    A client that goes away cancels what is done for it; at the end `shutdown_s` is left to what is under way.
    """
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=shutdown_s, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        bound = runner.addresses[0]
        yield f"http://{bound[0]}:{bound[1]}"
    finally:
        await runner.cleanup()
