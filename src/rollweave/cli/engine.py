"""`rollweave engine`: the embedded engine as a server of its own, over HTTP."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

from rollweave.backends.client import EngineClient
from rollweave.backends.listening import listening
from rollweave.backends.process import in_process
from rollweave.backends.server import EngineServer, TextCodec
from rollweave.cli.console import err, out
from rollweave.live.signals import on_ending_signals
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
    ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # cancelled when it is time
    present: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    present.set_result(None)
    with tempfile.TemporaryDirectory(prefix="rollweave-engine-") as scratch, on_ending_signals(ending.cancel):
        log = Path(scratch) / "engine.log"
        link = in_process(spec, module="rollweave.live.engine_process", log=log, env={}, model_ready=present)
        backend = EngineClient("the engine", link, start_s=START_S, reply_s=REPLY_S)
        try:
            err.print(f"[dim]loading {spec.model}[/]")
            ready = asyncio.ensure_future(backend.ready())
            await _first(ready, ending)
            if not ready.done():
                ready.cancel()
                return
            slots = ready.result().max_slots
            async with _listening(_application(spec, backend), host, port) as address:
                out.print(f"serving {spec.model} at {address}, {slots} requests at once", soft_wrap=True)
                await _first(backend.lost, ending)
            if backend.lost.done():
                raise EngineLostError(backend.lost.result())
        finally:
            await backend.close()


async def _first(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)


def _application(spec: EngineSpec, backend: EngineClient) -> web.Application:
    path = Path(spec.model) / "tokenizer.json"
    text: TextCodec | None = Tokens(path) if path.exists() else None
    return EngineServer(backend, model=spec.model, text=text).application()


@contextlib.asynccontextmanager
async def _listening(app: web.Application, host: str, port: int) -> AsyncIterator[str]:
    async with contextlib.AsyncExitStack() as stack:
        try:
            address = await stack.enter_async_context(listening(app, host, port, shutdown_s=1.0))
        except OSError as error:
            raise ConfigError(f"--host and --port must be an address to listen at, got {host}:{port}: {error}") from error
        yield address
