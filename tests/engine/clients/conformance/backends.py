"""The engines that the suites of this folder connect to: in a thread, in a process and
over HTTP, with the fake and the embedded engine, and servers of other kinds.
"""

import asyncio
import socket
from collections.abc import Callable

import pytest
from aiohttp import web

from rollweave.engine.clients.client import EngineClient
from rollweave.engine.clients.http import HttpEngine, HttpSpec
from rollweave.engine.clients.server import EngineServer
from rollweave.schema.serving import GenerateRequest, Sampling
from tests.support.engines import needs_vllm

Connect = Callable[..., EngineClient]


KINDS = ("fake in a thread", "fake in a process", "ours in a thread", "ours in a process")
QUICK = KINDS[:3]
FAKES = KINDS[:2]
"""The backends with the fake engine. The embedded engine in a process takes seconds to
import; one test of it covers the connection.
"""
SERVERS = (
    pytest.param("vllm", marks=needs_vllm),
    pytest.param("sglang", marks=pytest.mark.slow),
    pytest.param("attached", marks=pytest.mark.slow),
)
"""A server behind the process of an engine: a real vLLM, which starts in tens of
seconds, and the servers of `packages/servers/tests` that compute with the embedded
engine: `sglang_server.py`, and `vllm_server.py`, which is started before the engine.
"""
HTTP = ("fake over HTTP", "ours over HTTP")
"""An engine in a thread, served to a client that can only let it generate."""


def over_http(engine: EngineClient) -> HttpEngine:
    """Return a client of a server of `engine`.

    The server starts at once; a request before it listens waits.
    """
    place = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{place.getsockname()[1]}"
    client = HttpEngine(HttpSpec(name="engine e0", url=url, vocab=128), start_s=60.0, reply_s=20.0)
    runner = web.AppRunner(
        EngineServer(engine, model="m").application(),
        handler_cancellation=True,
        shutdown_timeout=1.0,
    )

    async def serve() -> None:
        await runner.setup()
        await web.SockSite(runner, place).start()
        await asyncio.wait([client.lost])
        await runner.cleanup()

    serving = asyncio.ensure_future(serve())
    client.lost.add_done_callback(lambda _: serving)  # kept until then
    return client


def request(id: str, *tokens: int, count: int = 3) -> GenerateRequest:
    return GenerateRequest(id=id, tokens=tokens, sampling=Sampling(max_tokens=count, seed=5))
