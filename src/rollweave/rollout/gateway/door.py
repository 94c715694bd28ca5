"""The gateway of a world: it listens, on the loopback, once a program is to be let in."""

import asyncio
import contextlib

from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.gateway.server import Gateway, serve_gateway


class Door:
    """`gateway` has the sessions, whoever asks them; `url` lets programs in.

    All calls belong to one event loop.
    """

    def __init__(self, codec: ChatCodec, *, model: str) -> None:
        self.gateway = Gateway(codec, model=model)
        self._opening = asyncio.Lock()
        self._stack = contextlib.AsyncExitStack()
        self._url: str | None = None
        self._closed = False

    async def url(self) -> str:
        """Where the gateway listens from now on.

        Raises OSError where it cannot, RuntimeError once it is closed.
        """
        async with self._opening:
            if self._closed:
                raise RuntimeError("the gateway is closed: the run is ending")
            if self._url is None:
                self._url = await self._stack.enter_async_context(serve_gateway(self.gateway))
            return self._url

    async def close(self) -> None:
        """Listen no more."""
        async with self._opening:
            self._closed = True
            await self._stack.aclose()
