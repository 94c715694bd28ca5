"""A service with registered engines, and checks of its sandboxes."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from packages.service.tests.rollout_service import service_config
from rollweave.engine.clients.client import EngineClient, in_thread
from rollweave.engine.clients.server import EngineServer
from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.front import ServingFront
from rollweave.schema.base import EngineId
from rollweave.schema.config.root import RunConfig
from rollweave.schema.serving import EngineSpec
from tests.support.echo_engine import EchoLoop
from tests.support.sandboxes import needs, no_process_left


def registered(directory: Path, **sections: Any) -> RunConfig:
    """Return the configuration of a service for registered engines. The echo engine's
    tokens are below 128.
    """
    config = service_config(directory, **sections)
    (Path(config.model.path or "") / "config.json").write_text(json.dumps({"vocab_size": 128}))
    return config


class Words(TextCodec):
    """A text is as many times the same token, and each token the same letter."""

    def encode_literal(self, text: str) -> tuple[int, ...]:
        return (5,) * len(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return "a" * len(tokens)


ECHO = EngineSpec(id=EngineId("e0"), model="echo", max_slots=4)


@contextlib.asynccontextmanager
async def elsewhere() -> AsyncIterator[tuple[EngineClient, str]]:
    """Serve an engine over HTTP, as `rollweave engine` does; yield its client and its
    address.
    """
    present: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    present.set_result(None)
    engine = EngineClient(
        "echo", in_thread(ECHO, EchoLoop, model_ready=present), start_s=20.0, reply_s=20.0
    )
    server = EngineServer(engine, model="echo")
    app = server.application()
    context = (await engine.ready()).max_context
    ServingFront(server, Words(None), context=context).add_to(app)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield engine, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
        await engine.close()


ZYGOTE = {"backend": "zygote"}


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    needs("zygote")
    with no_process_left():
        yield
