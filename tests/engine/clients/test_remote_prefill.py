"""Prompts that another server computes: their KV arrives, and a server that fails, or
that has other weights, costs a request nothing but time.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from safetensors.torch import load_file, save_file

from rollweave.engine.clients.client import EngineClient
from rollweave.engine.clients.remote_prefill import RemotePrefill
from rollweave.engine.clients.server import EngineServer
from rollweave.io.http.guard import Guard
from rollweave.io.http.listening import listening
from rollweave.schema.base import EngineId
from rollweave.schema.errors import EngineError
from rollweave.schema.serving import EngineSpec, GenerateRequest, Sampling
from tests.support.engines import engine_in_thread, tiny_checkpoint

TOKEN = "of both"
PROMPT, BLOCK = 70, 16


def asks(name: str, *, first: int = 0, tokens: int = 6, **fields: Any) -> GenerateRequest:
    return GenerateRequest(
        id=name,
        tokens=tuple(1 + (first + 7 * at) % 120 for at in range(PROMPT)),
        sampling=Sampling(temperature=0, max_tokens=tokens),
        **fields,
    )


class Pair:
    """A server that computes prompts at `url`, one that decodes, and their engines.
    `spec` is that of the engine that decodes.
    """

    def __init__(
        self, source: EngineClient, engine: EngineClient, url: str, spec: EngineSpec
    ) -> None:
        self.source, self.engine, self.url, self.spec = source, engine, url, spec
        self.said: list[str] = []

    @asynccontextmanager
    async def decoding(self, *, url: str = "", token: str = TOKEN) -> AsyncIterator[EngineServer]:
        async with RemotePrefill(
            url or self.url, token=token, engine=self.engine, report=self.said.append
        ) as prompts:
            yield EngineServer(self.engine, model="tiny", prompts=prompts)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    model = str(tiny_checkpoint(tmp_path))
    specs = [
        EngineSpec(id=EngineId(name), model=model, max_slots=4, kv_tokens=1024)
        for name in ("source", "decode")
    ]
    source, engine = (engine_in_thread(spec, reply_s=20.0) for spec in specs)
    async with AsyncExitStack() as stack:
        for one in (source, engine):
            stack.push_async_callback(one.close)
            await one.ready()
        app = EngineServer(source, model="tiny", prompts_only=True).application()
        guard = Guard(token=TOKEN, hosts=("127.0.0.1",))
        url = await stack.enter_async_context(
            listening(app, "127.0.0.1", 0, guard=guard, shutdown_s=1.0)
        )
        yield Pair(source, engine, url, specs[1])


async def test_the_kv_of_prompts_arrives_and_answers_are_the_same(pair: Pair) -> None:
    async with pair.decoding() as server:
        answers = [await server.generate(asks(str(first), first=first)) for first in range(3)]
    whole = PROMPT // BLOCK * BLOCK
    for first, answer in enumerate(answers):
        assert answer.cached_tokens == whole
        assert answer.first_token_s > 0
        expected = await pair.source.generate(asks(f"x{first}", first=first))
        assert answer.tokens == expected.tokens
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert (await pair.source.stats()).prompt_tokens >= 3 * PROMPT
    assert not pair.said


async def test_a_short_prompt_and_one_to_score_are_computed_here(pair: Pair) -> None:
    async with pair.decoding() as server:
        short = GenerateRequest(id="s", tokens=(1, 2, 3), sampling=Sampling(max_tokens=1))
        await server.generate(short)
        scored = await server.generate(asks("p", prompt_logprobs=True))
    assert len(scored.prompt_logprobs) == PROMPT - 1
    assert (await pair.source.stats()).prompt_tokens == 0


@pytest.mark.parametrize("trouble", ["gone", "token"])
async def test_a_prompt_is_computed_here_if_the_server_fails(pair: Pair, trouble: str) -> None:
    wrong = {"gone": {"url": "http://127.0.0.1:9"}, "token": {"token": "another"}}[trouble]
    async with pair.decoding(**wrong) as server:
        answers = [await server.generate(asks(str(first), first=first)) for first in range(3)]
    assert [len(answer.tokens) for answer in answers] == [6, 6, 6]
    assert [answer.cached_tokens for answer in answers] == [0, 0, 0]
    (line,) = pair.said
    assert line.startswith("prompts are computed here, not at http://127.0.0.1:")
    assert {"gone": "Cannot connect", "token": "status 401"}[trouble] in line


async def test_other_weights_of_the_same_path_are_refused(pair: Pair) -> None:
    model = Path(pair.spec.model)
    tensors = load_file(model / "model.safetensors")
    tensors = {name: tensor + 0.1 for name, tensor in tensors.items()}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    later = engine_in_thread(pair.spec, reply_s=20.0)
    await later.ready()
    other = Pair(pair.source, later, pair.url, pair.spec)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(later.close)
        server = await stack.enter_async_context(other.decoding())
        answer = await server.generate(asks("a"))
        expected = await later.generate(asks("b"))
    assert answer.cached_tokens == 0
    assert answer.tokens == expected.tokens
    (line,) = other.said
    assert "model of the KV must be this engine's" in line


async def test_a_prompt_that_is_refused_costs_no_other_one(pair: Pair) -> None:
    """A token that no vocabulary has is refused by both servers."""
    async with pair.decoding() as server:
        with pytest.raises(EngineError, match="must be"):
            await server.generate(
                GenerateRequest(id="x", tokens=(9999,) * PROMPT, sampling=Sampling(max_tokens=2))
            )
        assert (await server.generate(asks("a"))).cached_tokens == PROMPT // BLOCK * BLOCK
    (line,) = pair.said
    assert "a prompt is computed here, not at" in line
    assert "status 400" in line


async def test_a_server_that_is_its_own_source_computes_a_prompt_once(pair: Pair) -> None:
    """A request for a prompt is never passed on, so that a circle cannot grow."""
    async with AsyncExitStack() as stack:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        server = await stack.enter_async_context(pair.decoding(url=f"http://127.0.0.1:{port}"))
        guard = Guard(token=TOKEN, hosts=("127.0.0.1",))
        await stack.enter_async_context(
            listening(server.application(), "127.0.0.1", port, guard=guard, shutdown_s=1.0)
        )
        assert len((await server.generate(asks("a"))).tokens) == 6
    assert (await pair.engine.stats()).prompt_tokens <= 2 * PROMPT
    assert not pair.said


async def test_no_prompt_waits_for_a_server_that_hangs_once_one_has_failed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    tried = asyncio.Event()

    async def hangs(request: web.Request) -> web.Response:
        asked.append(request.path)
        tried.set()
        if len(asked) == 3:
            return web.Response(status=500, text="no luck")
        await asyncio.Event().wait()
        raise AssertionError

    app = web.Application()
    app.router.add_post("/{any:.*}", hangs)
    async with AsyncExitStack() as stack:
        guard = Guard(token=TOKEN, hosts=("127.0.0.1",))
        url = await stack.enter_async_context(
            listening(app, "127.0.0.1", 0, guard=guard, shutdown_s=0.1)
        )
        server = await stack.enter_async_context(pair.decoding(url=url))
        async with asyncio.timeout(20):  # less than a prompt may take
            answers = await asyncio.gather(
                *(server.generate(asks(str(first), first=first)) for first in range(8))
            )
            assert [len(answer.tokens) for answer in answers] == [6] * 8
            monkeypatch.setattr("rollweave.engine.clients.remote_prefill.RETRY_S", 0.0)
            assert server._prompts is not None
            server._prompts._rests_until = 0.0
            before = len(asked)
            tried.clear()
            trying = asyncio.create_task(server.generate(asks("t", first=50)))
            await tried.wait()
            assert len((await server.generate(asks("u", first=60))).tokens) == 6
            trying.cancel()
            with pytest.raises(asyncio.CancelledError):
                await trying
        assert len(asked) == before + 1
    (line,) = pair.said
    assert "no luck" in line


async def test_an_engine_of_prompts_samples_no_second_token(pair: Pair) -> None:
    server = EngineServer(pair.source, model="tiny", prompts_only=True)
    with pytest.raises(EngineError, match="max_tokens must be 1 on an engine that computes"):
        await server.generate(asks("long", tokens=2))
    assert len((await server.generate(asks("one", tokens=1))).tokens) == 1
