"""OpenAI's client, unchanged, against the serving front of an engine: nothing is
recorded, and every request stands alone.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import (
    APIStatusError,
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
    RateLimitError,
)

from rollweave.engine.clients.client import EngineClient
from rollweave.engine.clients.server import EngineServer
from rollweave.engine.clients.serving_metrics import BUCKETS, Histogram
from rollweave.io.http.guard import Guard
from rollweave.io.http.listening import listening
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.completions import CompletionsApi
from rollweave.rollout.gateway.fields import RequestError
from rollweave.rollout.gateway.front import ServingFront
from rollweave.rollout.gateway.requests import parse_chat
from rollweave.rollout.gateway.responses import ChatReply, ReplyHead
from rollweave.schema.chat import Message
from rollweave.schema.serving import FinishReason, GenerateRequest, GenerateResult, Sampling
from tests.support.real_gateway import CONTEXT, engine
from tests.support.scripted_gateway import TOOL, check_refusal

TOKEN = "secret-of-the-front"
ASK: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
MOST = 4


@pytest.fixture
async def tiny(directory: Path) -> AsyncIterator[EngineClient]:
    async with engine(directory) as client:
        yield client


@pytest.fixture
async def url(directory: Path, tiny: EngineClient) -> AsyncIterator[str]:
    server = EngineServer(tiny, model="tiny", max_requests=MOST)
    app = server.application()
    codec = ChatCodec.from_directory(directory)
    ServingFront(server, codec, context=CONTEXT).add_to(app)
    async with listening(app, "127.0.0.1", 0, guard=Guard(token=TOKEN), shutdown_s=1.0) as address:
        yield address


def client(url: str, key: str = TOKEN) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=url + "/v1", api_key=key, max_retries=0, timeout=60.0)


async def test_chat_is_what_the_engine_samples(
    directory: Path, tiny: EngineClient, url: str
) -> None:
    codec = ChatCodec.from_directory(directory)
    async with client(url) as openai:
        answer = await openai.chat.completions.create(
            **ASK, max_tokens=12, seed=5, logprobs=True, tools=[TOOL]
        )
        again = await openai.chat.completions.create(**ASK, max_tokens=12, seed=5, tools=[TOOL])
        assert [model.id async for model in openai.models.list()] == ["tiny"]
    asked = parse_chat(json.dumps({**ASK, "tools": [TOOL]}).encode())
    result = await tiny.generate(
        GenerateRequest(
            id="r",
            tokens=codec.start(asked.messages, asked.tools),
            sampling=Sampling(
                max_tokens=12, seed=5, stop_token_ids=codec.stop_token_ids, stop=codec.stop
            ),
        )
    )
    (choice,) = answer.choices
    assert choice.message.content == codec.text(result.tokens)
    assert [entry.logprob for entry in choice.logprobs.content or ()] == pytest.approx(
        result.logprobs[: len(choice.logprobs.content or ())]
    )
    assert answer.usage.completion_tokens == len(result.tokens)
    assert again.choices[0].message.content == choice.message.content
    assert again.id != answer.id


async def test_completions_of_text_are_streamed_and_add_up(url: str) -> None:
    same: dict[str, Any] = {"model": "any", "prompt": "once upon", "max_tokens": 20, "seed": 1}
    async with client(url) as openai:
        complete = await openai.completions.create(**same, logprobs=0)
        stream = await openai.completions.create(
            **same, logprobs=0, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == complete.choices[0].text
    assert chunks[-1].usage == complete.usage
    assert chunks[-2].choices[0].finish_reason == complete.choices[0].finish_reason
    assert chunks[-2].choices[0].text, "the last text says why it is the last"
    names = complete.choices[0].logprobs.tokens or []
    streamed = [
        (token, offset)
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs is not None
        for token, offset in zip(
            choice.logprobs.tokens or (), choice.logprobs.text_offset or (), strict=True
        )
    ]
    assert [token for token, _ in streamed] == names


async def test_a_stop_text_ends_a_completion_before_it(url: str) -> None:
    same: dict[str, Any] = {"model": "any", "prompt": "once upon", "max_tokens": 30, "seed": 2}
    async with client(url) as openai:
        text = (await openai.completions.create(**same)).choices[0].text
        stop = text[5:7]
        (choice,) = (await openai.completions.create(**same, stop=stop)).choices
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"


async def test_text_arrives_while_the_engine_samples(tiny: EngineClient, url: str) -> None:
    """The request is still running at the engine when its first text arrives, because
    nothing is left that could make it end: no other answer would be in time.
    """
    async with client(url) as openai:
        stream = await openai.completions.create(
            model="any", prompt="once", stream=True, max_tokens=1500, seed=3
        )
        chunk = await anext(aiter(stream))
        await tiny.suspend()
        assert chunk.choices[0].text
        assert chunk.choices[0].finish_reason is None
        assert (await tiny.stats()).running == 1
        await stream.close()
        tiny.resume()
        while (await tiny.stats()).running:
            continue


async def test_errors_are_openai_s(tiny: EngineClient, url: str) -> None:
    async with client(url, key="wrong") as openai:
        with pytest.raises(AuthenticationError, match="must carry this server's token"):
            await openai.chat.completions.create(**ASK)
    async with client(url) as openai:
        with pytest.raises(BadRequestError, match="audio must be null") as refused:
            await openai.chat.completions.create(**ASK, audio={"voice": "ash", "format": "wav"})
        assert refused.value.param == "audio"
        assert refused.value.type == "invalid_request_error"
        with pytest.raises(BadRequestError, match="maximum context length is") as refused:
            await openai.completions.create(model="any", prompt=[5] * CONTEXT)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(BadRequestError, match="tokens must be in"):
            await openai.completions.create(model="any", prompt=[10**6])
        with pytest.raises(BadRequestError, match="at least one token"):
            await openai.completions.create(model="any", prompt="")
        tiny.kill()
        with pytest.raises(APIStatusError, match="no engine could take the turn") as failed:
            await openai.chat.completions.create(**ASK)
        assert failed.value.status_code == 503


async def test_requests_in_flight_are_bounded_and_end_with_their_clients(
    tiny: EngineClient, url: str
) -> None:
    await tiny.suspend()
    async with client(url) as openai:
        asked = [
            asyncio.create_task(openai.chat.completions.create(**ASK, max_tokens=100))
            for _ in range(MOST)
        ]
        while (await tiny.stats()).waiting < MOST:
            continue
        with pytest.raises(RateLimitError):
            await openai.chat.completions.create(**ASK)
        for each in asked:
            each.cancel()
        while (await tiny.stats()).waiting:
            continue
        tiny.resume()
        assert (await openai.chat.completions.create(**ASK, max_tokens=2)).choices


async def test_metrics_are_histograms_of_what_clients_saw(url: str) -> None:
    async with client(url) as openai:
        await openai.chat.completions.create(**ASK, max_tokens=8)
        await openai.completions.create(model="any", prompt="a b", max_tokens=4)
        with pytest.raises(BadRequestError):
            await openai.chat.completions.create(**ASK, top_logprobs=2)
    head = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession() as http, http.get(url + "/metrics", headers=head) as got:
        text = await got.text()
    values = dict(re.findall(r"^(\S+) (\S+)$", text, re.MULTILINE))
    for name in ("ttft", "queue", "request"):
        assert values[f"rollweave_serving_{name}_seconds_count"] == "2"
        assert values[f'rollweave_serving_{name}_seconds_bucket{{le="+Inf"}}'] == "2"
    assert float(values["rollweave_serving_ttft_seconds_sum"]) > 0
    assert values['rollweave_serving_requests_total{outcome="answered"}'] == "2"
    assert values['rollweave_serving_requests_total{outcome="refused"}'] == "1"
    assert int(values['rollweave_serving_tokens_total{kind="output"}']) > 2
    assert values["rollweave_serving_in_flight"] == "0"


@pytest.mark.parametrize(("ids", "word"), [(True, "abort"), (False, "length")])
def test_an_aborted_turn_is_told_to_those_who_ask_for_token_ids(ids: bool, word: str) -> None:
    api = CompletionsApi(TextCodec(None))
    chat = api.parse(json.dumps({"prompt": [5], "return_token_ids": ids}).encode())
    result = GenerateResult(
        id="r", tokens=(), logprobs=(), versions=(), finish=FinishReason.ABORTED
    )
    reply = ChatReply(
        message=Message(role="assistant", content=""),
        deltas=(),
        finish_reason="length",
        prompt_tokens=1,
        result=result,
    )
    body = api.response(ReplyHead(id="a", created=0, model="m"), reply, chat)
    assert body["choices"][0]["finish_reason"] == word


@pytest.mark.parametrize("name", ["return_token_ids", "return_tokens_as_token_ids", "logprobs"])
def test_completions_of_a_session_are_refused_what_it_does_not_know(name: str) -> None:
    parse, body = CompletionsApi(TextCodec(None), served=False).parse, {"prompt": [5], name: 1}
    asked = body | ({} if name == "logprobs" else {name: True, "stream": True})
    check_refusal(parse, asked, name)
    assert parse(json.dumps(asked | {"stream": False, "temperature": 0}).encode()).prompt == (5,)


def test_prompts_of_a_million_token_ids_are_read_and_longer_ones_refused() -> None:
    api = CompletionsApi(TextCodec(None))
    chat = api.parse(json.dumps({"prompt": [5] * 2**20}).encode())
    assert chat.prompt is not None
    assert len(chat.prompt) == 2**20
    with pytest.raises(RequestError, match="must have at most"):
        api.parse(json.dumps({"prompt": [5] * (2**20 + 2000)}).encode())


def test_a_histogram_counts_each_value_once_and_in_order() -> None:
    histogram = Histogram()
    for value in (0.0, BUCKETS[0], BUCKETS[3] * 1.01, 1e9):
        histogram.add(value)
    counts = [sample.value for sample in histogram.samples("x") if sample.name == "x_bucket"]
    assert counts == sorted(counts)
    assert (counts[0], counts[3], counts[4], counts[-1]) == (2, 2, 3, 4)


async def test_all_apis_are_served(url: str) -> None:
    import anthropic  # seconds, and only here

    async with (
        AsyncOpenAI(base_url=url + "/v1", api_key=TOKEN, max_retries=0) as openai,
        anthropic.AsyncAnthropic(base_url=url, auth_token=TOKEN, max_retries=0) as api,
    ):
        answer = await openai.responses.create(model="any", input="hi", max_output_tokens=5)
        assert 1 <= answer.usage.output_tokens <= 5
        async with api.messages.stream(
            model="any", messages=[{"role": "user", "content": "hi"}], max_tokens=5
        ) as stream:
            message = await stream.get_final_message()
        assert 1 <= message.usage.output_tokens <= 5
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        raw = await api.messages.with_raw_response.create(**ASK, max_tokens=5, thinking=thinking)
        assert raw.headers["X-Rollweave-Ignored"] == "thinking.budget_tokens, thinking"
        counted = await api.messages.count_tokens(**ASK)
        assert counted.input_tokens == (await raw.parse()).usage.input_tokens
