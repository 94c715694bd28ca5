"""A server whose answers a test chooses: the URL of a reward, and a judge."""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web


class FakeServer:
    """A URL and a judge. `answer` returns what a request is answered with, or raises;
    each request waits for `gate`.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.answer: Callable[[int], Any] = lambda number: {"reward": 2}
        self.gate = asyncio.Event()
        self.gate.set()
        self.arrived = asyncio.Event()
        self.url, self.port = "", 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 24)
        app.add_routes(
            [web.post("/score", self._serve), web.post("/v1/chat/completions", self._serve)]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _serve(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.headers.append(request.headers)
        self.arrived.set()
        await self.gate.wait()
        answer = self.answer(len(self.requests))
        return answer if isinstance(answer, web.Response) else web.json_response(answer)


def graded(text: str | None) -> dict[str, Any]:
    """Return a judge's answer with this text."""
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}
