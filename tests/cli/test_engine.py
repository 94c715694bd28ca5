"""`rollweave engine` in another process: it serves, ends in order, and its loss is
noticed.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from openai import AsyncOpenAI
from typer.testing import CliRunner

from rollweave.cli.main import app
from rollweave.engine.clients.http import HttpEngine, HttpSpec
from rollweave.schema.errors import EngineLostError
from rollweave.schema.serving import GenerateRequest, Sampling
from tests.support.engines import environment, tiny_checkpoint
from tests.support.forking import forked
from tests.support.real_gateway import checkpoint


@contextlib.asynccontextmanager
async def started(
    model: Path, *options: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, str]]]:
    """Start the process and yield it, with its `url` and `token`; kill it on exit."""
    command = [
        sys.executable,
        "-m",
        "rollweave.cli.main",
        "engine",
        str(model),
        "--port",
        "0",
        "--kv-tokens",
        "1024",
        *options,
    ]
    command += ["--token-file", str(model / "token")]
    process = await forked(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment()},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = (await process.stdout.readline()).decode()
        if not line:
            raise AssertionError((await process.stderr.read()).decode())
        url, notice = (
            line.split(" at ")[1].split(",")[0],
            (await process.stdout.readline()).decode(),
        )
        token = (model / "token").read_text().strip()
        assert notice.startswith(f"token: {token} (stored in ")
        yield process, {"url": url, "token": token}
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_serves_and_ends_in_order(tmp_path: Path) -> None:
    async with started(tiny_checkpoint(tmp_path)) as (process, place):
        engine = HttpEngine(HttpSpec(name="e0", vocab=128, **place), reply_s=20.0)
        try:
            await engine.ready()
            result = await engine.generate(
                GenerateRequest(id="r0", tokens=(5,), sampling=Sampling(max_tokens=3))
            )
            assert 1 <= len(result.tokens) <= 3
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        finally:
            await engine.close()


@pytest.mark.extended
async def test_a_server_that_is_killed_during_a_turn_is_lost(tmp_path: Path) -> None:
    async with started(tiny_checkpoint(tmp_path)) as (process, place):
        engine = HttpEngine(
            HttpSpec(name="e0", vocab=128, **place, dialect="prorl"), reply_s=20.0, check_s=1000.0
        )
        try:
            await engine.ready()
            # so that it cannot have answered before it is killed
            process.send_signal(signal.SIGSTOP)
            pending = engine.generate(
                GenerateRequest(id="r0", tokens=(5,), sampling=Sampling(max_tokens=200))
            )
            while (await engine.stats()).running == 0:  # noqa: ASYNC110 (our own count: the server is frozen)
                await asyncio.sleep(0)
            process.kill()
            with pytest.raises(EngineLostError, match="does not answer"):
                await pending
        finally:
            await engine.close()


@pytest.mark.extended
async def test_openai_s_client_chats_with_it(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    async with (
        started(checkpoint(tmp_path)) as (_, place),
        AsyncOpenAI(base_url=place["url"] + "/v1", api_key=place["token"], max_retries=0) as openai,
    ):
        stream = await openai.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "hi"}], max_tokens=6, stream=True
        )
        assert [chunk async for chunk in stream][-1].choices[0].finish_reason in ("stop", "length")
        answer = await openai.completions.create(model="any", prompt="hi", max_tokens=3)
        assert answer.usage is not None
        assert 1 <= answer.usage.completion_tokens <= 3
    async with started(tiny_checkpoint(bare)) as (_, place), aiohttp.ClientSession() as http:
        head = {"Authorization": f"Bearer {place['token']}"}
        for path, body, status, text in (
            (
                "chat/completions",
                {"messages": [{"role": "user", "content": "hi"}]},
                400,
                "no chat template",
            ),
            ("completions", {"prompt": "hi"}, 400, "no tokenizer"),
            ("completions", {"prompt": [5], "return_token_ids": True}, 200, "token_ids"),
        ):
            url = f"{place['url']}/v1/{path}"
            async with http.post(url, json={"model": "any", **body}, headers=head) as response:
                assert response.status == status
                assert text in await response.text()


@pytest.mark.extended
async def test_prompts_are_computed_at_another_engine_until_it_dies(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path)

    async def answer(
        http: aiohttp.ClientSession, place: dict[str, str], first: int, tokens: int = 6
    ) -> list[int]:
        body = {
            "prompt": [1 + (first + at) % 120 for at in range(70)],
            "max_tokens": tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        head = {"Authorization": f"Bearer {place['token']}"}
        url = place["url"] + "/v1/completions"
        async with http.post(url, json=body, headers=head) as response:
            assert response.status == 200, await response.text()
            token_ids: list[int] = (await response.json())["choices"][0]["token_ids"]
            return token_ids

    async def stats(http: aiohttp.ClientSession, place: dict[str, str]) -> dict[str, int]:
        head = {"Authorization": f"Bearer {place['token']}"}
        async with http.get(place["url"] + "/rollweave/v1/stats", headers=head) as response:
            found: dict[str, int] = await response.json()
            return found

    async with (
        aiohttp.ClientSession() as http,
        started(model) as (source, prefill),
        started(model, "--prefill-at", prefill["url"]) as (process, decode),
    ):
        answered = await answer(http, decode, 1)
        assert (await stats(http, decode))["cached_tokens"] == 64
        assert (await stats(http, prefill))["output_tokens"] == 1
        assert await answer(http, prefill, 1) == answered
        source.kill()
        await source.wait()
        assert len(await answer(http, decode, 2)) == 6
        assert (await stats(http, decode))["cached_tokens"] == 64
        assert process.stderr is not None
        while b"prompts are computed here" not in (line := await process.stderr.readline()):
            assert line


@pytest.mark.extended
async def test_requires_the_token(tmp_path: Path) -> None:
    async with started(tiny_checkpoint(tmp_path)) as (_, place), aiohttp.ClientSession() as session:
        body = {"prompt_ids": [5], "max_tokens": 1}
        for headers, status in (({}, 401), ({"Authorization": f"Bearer {place['token']}"}, 200)):
            async with session.post(
                place["url"] + "/generate", json=body, headers=headers
            ) as response:
                assert response.status == status
        async with session.get(place["url"] + "/health") as response:
            assert response.status == 200


@pytest.mark.parametrize(
    "arguments", [["--no-token", "--host", "0.0.0.0"], ["--no-token", "--token-file", "x"]]
)
def test_no_token_is_allowed_only_on_the_loopback(tmp_path: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["engine", str(tiny_checkpoint(tmp_path)), *arguments])
    assert result.exit_code == 2
    assert "--no-token" in result.stderr


@pytest.mark.parametrize("arguments", [["nowhere"], ["nowhere", "--port", "70000"]])
def test_reports_wrong_input(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["engine", *arguments])
    assert result.exit_code == 2


def test_reports_an_address_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        result = CliRunner().invoke(
            app, ["engine", str(tiny_checkpoint(tmp_path)), "--port", port, "--no-token"]
        )
    assert result.exit_code == 2
    line = (
        f"--host and --port must be a free address of this machine, got 127.0.0.1:{port}: address "
        "already in use"
    )
    assert line in result.stderr
    assert "loading" not in result.stderr  # the error precedes the reading of the model


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--device", "gpu"], "--device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
        (["--dtype", "int8"], "--dtype must be one of float32, bfloat16, float16, got 'int8'"),
        (["--device", "cuda:99"], "--device must be a device of this machine, got cuda:99"),
    ],
)
def test_a_wrong_device_or_dtype_is_one_line(
    arguments: list[str], line: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(app, ["engine", str(tiny_checkpoint(tmp_path)), *arguments])
    assert result.exit_code == 2
    assert line in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--secret-file", "host.secret"), ("--resource", "serving"), ("--join-s", "5")),
        *(("--ttft-ms", "500"), ("--tpot-ms", "150")),
    ],
)
def test_options_of_a_loan_are_refused_without_one(tmp_path: Path, option: str, value: str) -> None:
    arguments = ["engine", str(tiny_checkpoint(tmp_path)), "--port", "0", option, value]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert f"{option} must be given with --lend, got {value}" in line


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--lend", "nowhere"], "--lend must be HOST:PORT of the controller, got nowhere"),
        (["--lend", "a:８０"], "--lend must be HOST:PORT of the controller, got a:８０"),
        (["--lend", "127.0.0.1:9", "--ttft-ms", "0"], "--ttft-ms must be positive and finite"),
        (["--lend", "127.0.0.1:9", "--tpot-ms", "nan"], "--tpot-ms must be positive and finite"),
        (["--lend", "127.0.0.1:9", "--secret-file", "gone"], "--secret-file gone must be"),
        (
            ["--lend", "127.0.0.1:9", "--prefill-only", "--tpot-ms", "50"],
            "--tpot-ms must be left out with --prefill-only, which samples no second token, got 50",
        ),
        (
            ["--prefill-at", "http://127.0.0.1:9/v1"],
            "--prefill-at must be http://host:port or https://host:port, without a path",
        ),
        (
            ["--prefill-at", "http://127.0.0.1:9", "--prefill-only"],
            "--prefill-at must be given without --prefill-only, got http://127.0.0.1:9",
        ),
    ],
)
def test_a_wrong_loan_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], text: str
) -> None:
    monkeypatch.setenv("ROLLWEAVE_HOST_SECRET", "secret")
    options = ["--port", "0", "--no-token", *arguments]
    result = CliRunner().invoke(app, ["engine", str(tiny_checkpoint(tmp_path)), *options])
    assert result.exit_code == 2
    assert text in result.stderr
