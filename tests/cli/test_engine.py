"""`rollweave engine` as a process of its own: it serves, it ends in order, and it is missed when it is killed."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollweave.backends.http import HttpEngine, HttpSpec
from rollweave.cli.main import app
from rollweave.schema.errors import EngineLostError
from rollweave.schema.serving import GenerateRequest, Sampling
from tests.backends.test_conformance import environment, tiny_checkpoint


@contextlib.asynccontextmanager
async def started(model: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The process and its address; killed in the end."""
    command = [sys.executable, "-m", "rollweave.cli.main", "engine", str(model), "--port", "0", "--kv-tokens", "1024"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, **environment()}
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = (await process.stdout.readline()).decode()
        if not line:
            raise AssertionError((await process.stderr.read()).decode())
        yield process, line.split(" at ")[1].split(",")[0]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_it_serves_and_ends_in_order(tmp_path: Path) -> None:
    async with started(tiny_checkpoint(tmp_path)) as (process, url):
        engine = HttpEngine(HttpSpec(name="e0", url=url, vocab=128), reply_s=20.0)
        try:
            await engine.ready()
            result = await engine.generate(GenerateRequest(id="r0", tokens=(5,), sampling=Sampling(max_tokens=3)))
            assert 1 <= len(result.tokens) <= 3
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        finally:
            await engine.close()


async def test_a_server_that_is_killed_in_the_middle_of_a_turn_is_lost(tmp_path: Path) -> None:
    async with started(tiny_checkpoint(tmp_path)) as (process, url):
        engine = HttpEngine(HttpSpec(name="e0", url=url, vocab=128, dialect="prorl"), reply_s=20.0, check_s=1000.0)
        try:
            await engine.ready()
            process.send_signal(signal.SIGSTOP)  # so that it cannot have answered before it is killed
            pending = engine.generate(GenerateRequest(id="r0", tokens=(5,), sampling=Sampling(max_tokens=200)))
            while (await engine.stats()).running == 0:  # noqa: ASYNC110 (our own count: the server is frozen)
                await asyncio.sleep(0)
            process.kill()
            with pytest.raises(EngineLostError, match="does not answer"):
                await pending
        finally:
            await engine.close()


@pytest.mark.parametrize("arguments", [["nowhere"], ["nowhere", "--port", "70000"]])
def test_wrong_input_is_said(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["engine", *arguments])
    assert result.exit_code == 2


def test_an_address_in_use_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["engine", str(tiny_checkpoint(tmp_path)), "--port", port, "--kv-tokens", "64"])
    assert result.exit_code == 2
    assert "--host and --port must be an address" in result.stderr
