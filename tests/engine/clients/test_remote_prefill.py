"""Prompts that another server computes: their KV arrives, and a server that fails, or
that has other weights, costs a request nothing but time.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

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
    """A server that computes prompts at `url`, one that decodes, and their engines."""

    def __init__(self, source: EngineClient, engine: EngineClient, url: str) -> None:
        self.source, self.engine, self.url = source, engine, url
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
        yield Pair(source, engine, url)


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


async def test_an_engine_of_prompts_samples_no_second_token(pair: Pair) -> None:
    server = EngineServer(pair.source, model="tiny", prompts_only=True)
    with pytest.raises(EngineError, match="max_tokens must be 1 on an engine that computes"):
        await server.generate(asks("long", tokens=2))
    assert len((await server.generate(asks("one", tokens=1))).tokens) == 1
