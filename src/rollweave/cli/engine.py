"""`rollweave engine`: the embedded engine as a server of its own, over HTTP."""

import asyncio
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

from rollweave.backends.client import EngineClient
from rollweave.backends.process import in_process
from rollweave.backends.server import EngineServer, TextCodec
from rollweave.cli.console import err, out
from rollweave.schema.errors import ConfigError, EngineLostError
from rollweave.schema.serving import EngineSpec
from rollweave.weights.checkpoint import read_shape

START_S = 300.0
"""Limit to reading a checkpoint: minutes for a large one on a slow disk."""

REPLY_S = 60.0
"""Limit to a sample of the engine's state, which waits for a step."""


class Tokens:
    """`TextCodec` of a checkpoint's tokenizer.json."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str) -> Sequence[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text


def engine(spec: EngineSpec, *, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError for a wrong checkpoint or address, and EngineLostError."""
    read_shape(Path(spec.model))  # wrong input is said before a process starts
    asyncio.run(_serve(spec, host=host, port=port))


async def _serve(spec: EngineSpec, *, host: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    ending: asyncio.Future[None] = loop.create_future()  # cancelled when it is time
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ending.cancel)
    present: asyncio.Future[None] = loop.create_future()
    present.set_result(None)
    with tempfile.TemporaryDirectory(prefix="rollweave-engine-") as scratch:
        log = Path(scratch) / "engine.log"
        link = in_process(spec, module="rollweave.live.engine_process", log=log, env={}, model_ready=present)
        backend = EngineClient("the engine", link, start_s=START_S, reply_s=REPLY_S)
        runner = web.AppRunner(_application(spec, backend), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        try:
            err.print(f"[dim]loading {spec.model}[/]")
            ready = asyncio.ensure_future(backend.ready())
            await _first(ready, ending)
            if not ready.done():
                ready.cancel()
                return
            slots = ready.result().max_slots
            await runner.setup()
            out.print(f"serving {spec.model} at {await _listen(runner, host, port)}, {slots} requests at once", soft_wrap=True)
            await _first(backend.lost, ending)
            if backend.lost.done():
                raise EngineLostError(backend.lost.result())
        finally:
            await runner.cleanup()
            await backend.close()


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _application(spec: EngineSpec, backend: EngineClient) -> web.Application:
    path = Path(spec.model) / "tokenizer.json"
    text: TextCodec | None = Tokens(path) if path.exists() else None
    return EngineServer(backend, model=spec.model, text=text).application()


async def _listen(runner: web.AppRunner, host: str, port: int) -> str:
    """Where it listens: with port 0, at a port that the system chose."""
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        raise ConfigError(f"--host and --port must be an address to listen at, got {host}:{port}: {error}") from error
    bound = runner.addresses[0]
    return f"http://{host}:{bound[1]}"
