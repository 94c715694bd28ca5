"""Requests outside of a run, by OpenAI's and Anthropic's clients, to a tiny engine: the
fields of vLLM's and OpenAI's APIs that no session of a run takes.
"""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from rollweave.engine.clients.server import EngineServer
from rollweave.io.http.guard import Guard
from rollweave.io.http.listening import listening
from rollweave.rollout.chat.codec import ChatCodec
from rollweave.rollout.gateway.fields import RequestError
from rollweave.rollout.gateway.front import ServingFront
from rollweave.rollout.gateway.requests import parse_chat
from rollweave.rollout.gateway.served import MAX_CHOICES, Served, parse_served_chat
from tests.support.chats import bpe, codec
from tests.support.real_gateway import CONTEXT, engine, load
from tests.support.scripted_gateway import ask

TOKEN = "secret-of-the-front"
USER: list[Any] = [{"role": "user", "content": "hi"}]
CODEC = codec("tools")


@pytest.fixture
async def url(directory: Path) -> AsyncIterator[str]:
    async with engine(directory) as tiny:
        server = EngineServer(tiny, model="tiny")
        app = server.application()
        shown = {"tokenizer_class": "T"}
        front = ServingFront(
            server, ChatCodec.from_directory(directory), context=CONTEXT, tokenizer=shown
        )
        front.add_to(app)
        guard = Guard(token=TOKEN)
        async with listening(app, "127.0.0.1", 0, guard=guard, shutdown_s=1.0) as address:
            yield address


@pytest.fixture
async def openai(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=url + "/v1", api_key=TOKEN, max_retries=0) as client:
        yield client


async def test_several_prompts_and_choices_are_one_answer(openai: AsyncOpenAI) -> None:
    same: dict[str, Any] = {"model": "any", "max_tokens": 6, "seed": 4}
    prompts = ["once upon", list(bpe().encode("a time").ids)]
    alone = [await openai.completions.create(prompt=prompt, **same) for prompt in prompts]
    both = await openai.completions.create(prompt=prompts, n=2, logprobs=0, **same)  # type: ignore[arg-type]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [both.choices[at].text for at in (0, 2)] == [each.choices[0].text for each in alone]
    assert both.choices[0].text != both.choices[1].text, "each choice has its own randomness"
    usages = [each.usage for each in alone if each.usage is not None]
    assert both.usage.prompt_tokens == sum(usage.prompt_tokens for usage in usages)
    again = await openai.completions.create(prompt=prompts, n=2, **same)  # type: ignore[arg-type]
    assert [choice.text for choice in again.choices] == [choice.text for choice in both.choices]
    texts, usage = ["", "", "", ""], None
    stream = await openai.completions.create(
        prompt=prompts,  # type: ignore[arg-type]
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        **same,
    )
    async for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in both.choices]
    assert usage == again.usage
    chatted = await openai.chat.completions.create(
        model="any", messages=USER, n=3, max_tokens=6, temperature=1.0
    )
    assert len({choice.message.content for choice in chatted.choices}) == 3


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_echoed_prompt_is_scored_as_evaluation_harnesses_ask(
    directory: Path, openai: AsyncOpenAI, streamed: bool
) -> None:
    tokens = bpe().encode("once upon a time").ids
    wanted: dict[str, Any] = {"model": "any", "prompt": tokens, "echo": True, "logprobs": 2}
    wanted["extra_body"] = {"return_tokens_as_token_ids": True}
    if streamed:
        stream = await openai.completions.create(**wanted, max_tokens=0, stream=True)
        (choice,) = [choice async for chunk in stream for choice in chunk.choices]
    else:
        (choice,) = (await openai.completions.create(**wanted, max_tokens=0)).choices
    assert (choice.text, choice.finish_reason) == ("once upon a time", "length")
    scores = choice.logprobs
    whole = torch.log_softmax(load(directory)(torch.tensor([tokens])).logits[0].detach(), dim=-1)
    expected = whole[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert scores.token_logprobs[0] is None
    assert scores.token_logprobs[1:] == pytest.approx(expected.tolist(), abs=1e-4)
    assert all(2 <= len(top) <= 3 for top in scores.top_logprobs[1:])
    assert [max(top.values()) for top in scores.top_logprobs[1:]] == pytest.approx(
        whole[:-1].amax(dim=1).tolist(), abs=1e-4
    )
    assert scores.tokens == [f"token_id:{token}" for token in tokens]


async def test_token_ids_and_likeliest_tokens_are_shown(openai: AsyncOpenAI) -> None:
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    wanted: dict[str, Any] = {"model": "any", "messages": USER, "max_tokens": 5, "seed": 3}
    wanted |= {"logprobs": True, "top_logprobs": 3}
    body = (
        await openai.chat.completions.create(**wanted, extra_body={**ids, "prompt_logprobs": 1})
    ).model_dump()
    (choice,) = body["choices"]
    assert body["prompt_token_ids"] == list(
        CODEC.start(parse_chat(json.dumps(ask()).encode()).messages)
    )
    assert len(body["prompt_logprobs"]) == len(body["prompt_token_ids"])
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{x}" for x in choice["token_ids"]]
    assert {len(entry["top_logprobs"]) for entry in entries} == {3}
    seen, prompt = list[int](), []
    counted = {"include_usage": True, "continuous_usage_stats": True}
    stream = await openai.chat.completions.create(
        **wanted,
        stream=True,
        stream_options=counted,  # type: ignore[arg-type]
        extra_body=ids,
    )
    async for chunk in stream:
        dumped = chunk.model_dump()
        prompt += dumped.get("prompt_token_ids", [])
        for part in dumped["choices"]:
            seen += part.get("token_ids") or []
        assert dumped["usage"]["completion_tokens"] == len(seen)
    assert (prompt, seen) == (body["prompt_token_ids"], choice["token_ids"])
    named = {"logprob_token_ids": [7, 9], "allowed_token_ids": [11], **ids}
    chosen = await openai.chat.completions.create(
        model="any", messages=USER, max_tokens=1, logprobs=True, extra_body=named
    )
    (entry,) = chosen.choices[0].logprobs.content or ()
    assert {top.token for top in entry.top_logprobs} == {f"token_id:{x}" for x in (7, 9, 11)}


async def test_stops_and_prompts_are_shaped(openai: AsyncOpenAI) -> None:
    same: dict[str, Any] = {
        "model": "any",
        "prompt": "once upon",
        "temperature": 0,
        "max_tokens": 8,
    }
    plain = (
        await openai.completions.create(**same, extra_body={"return_token_ids": True})
    ).choices[0]
    tokens = plain.model_dump()["token_ids"]
    second = {"stop_token_ids": [tokens[1]]}
    stopped = (await openai.completions.create(**same, extra_body=second)).choices[0]
    assert (stopped.text, stopped.finish_reason) == (bpe().decode(tokens[:1]), "stop")
    shown = second | {"include_stop_str_in_output": True}
    assert (await openai.completions.create(**same, extra_body=shown)).choices[
        0
    ].text == bpe().decode(tokens[:2])
    text = plain.text[1:3]
    kept = await openai.completions.create(
        **same, stop=text, extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == plain.text[: plain.text.index(text) + len(text)]
    late = await openai.completions.create(**same, extra_body=second | {"min_tokens": 4})
    assert late.usage.completion_tokens >= 4
    end = bpe().token_to_id("<|im_end|>")
    forced = {"logit_bias": {str(end): 100}, "max_tokens": 4}
    for ignored, count in ((False, 1), (True, 4)):
        said = await openai.chat.completions.create(
            model="any",
            messages=USER,
            **forced,
            extra_body={"ignore_eos": ignored},  # type: ignore[arg-type]
        )
        assert said.usage.completion_tokens == count
    for side, prompt in (("right", [5, 6]), ("left", [8, 9])):
        cut = {"return_token_ids": True, "truncate_prompt_tokens": 2, "truncation_side": side}
        body = await openai.completions.create(
            model="any", prompt=[5, 6, 7, 8, 9], max_tokens=1, extra_body=cut
        )
        assert body.choices[0].model_dump()["prompt_token_ids"] == prompt
    begun: list[Any] = [*USER, {"role": "assistant", "content": "I am"}]
    form = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    on = await openai.chat.completions.create(
        model="any", messages=begun, max_tokens=3, extra_body=form | {"return_token_ids": True}
    )
    assert (on.choices[0].message.content or "").startswith("I am")
    assert (
        bpe()
        .decode(on.model_dump()["prompt_token_ids"], skip_special_tokens=False)
        .endswith("assistant\nI am")
    )


async def test_the_routes_of_vllm_and_the_vendors(url: str) -> None:
    async with (
        aiohttp.ClientSession(headers={"X-Api-Key": TOKEN}) as http,
        AsyncAnthropic(base_url=url, api_key=TOKEN, max_retries=0) as api,
    ):

        async def get(path: str, **body: Any) -> Any:
            call = http.post(url + path, json=body) if body else http.get(url + path)
            async with call as response:
                assert response.status == 200, await response.text()
                return await response.json()

        assert (await get("/v1/models/org/any-name"))["root"] == "tiny"
        assert (await get("/v1/models"))["data"][0]["max_model_len"] == CONTEXT
        assert (await get("/load")) == {"server_load": 0}
        assert (await get("/version"))["version"]
        assert (await get("/ping")) == {"status": "ok"}
        assert (await get("/tokenizer_info")) == {"tokenizer_class": "T"}
        text = await get("/tokenize", prompt="once", return_token_strs=True)
        assert text["tokens"] == bpe().encode("once").ids
        assert (len(text["token_strs"]), text["max_model_len"]) == (text["count"], CONTEXT)
        assert (await get("/detokenize", tokens=text["tokens"])) == {"prompt": "once"}
        shown = await get("/tokenize", messages=USER, add_generation_prompt=False)
        whole = await get("/tokenize", messages=USER)
        assert whole["tokens"][: shown["count"]] == shown["tokens"]
        pair = await get("/v1/chat/completions/batch", messages=[USER, USER], max_tokens=2)
        assert [choice["index"] for choice in pair["choices"]] == [0, 1]
        assert pair["usage"]["prompt_tokens"] == 2 * whole["count"]
        counted = await api.messages.count_tokens(model="m", messages=USER)
        assert counted.input_tokens == whole["count"]
        said = await api.messages.create(model="m", messages=USER, max_tokens=2)
        assert said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0) == whole["count"]
        stream = await api.messages.create(model="m", messages=USER, max_tokens=2, stream=True)
        first, *_ = [event async for event in stream]
        assert first.message.usage.input_tokens == whole["count"]  # type: ignore[union-attr]
    async with aiohttp.ClientSession(headers={"X-Api-Key": "wrong"}) as http:
        assert (await http.get(url + "/v1/models")).status == 401


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"logit_bias": {"a": 1, "b": 2}},
            r"logit_bias must have token ids as its keys, got \['a', 'b'\]",
        ),
        ({"bad_words": [" "]}, "bad_words must have texts that are not blank"),
        ({"min_tokens": 9, "max_tokens": 4}, r"min_tokens must be at most max_tokens \(4\), got 9"),
        ({"n": MAX_CHOICES + 1}, "n: Input should be less than or equal to 1024"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs: Input should be less than"),
        ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs must be null where stream"),
        ({"stream_options": {}}, "stream_options must be null unless stream is true"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt must",
        ),
        ({"best_of": 2}, "best_of must be 1 or null"),
    ],
)
async def test_what_cannot_be_honored_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        parse_served_chat(json.dumps(ask(**fields)).encode(), CODEC)


def test_sessions_of_a_run_refuse_these_fields_unless_they_ask_for_nothing() -> None:
    asking: dict[str, Any] = {"logit_bias": {"5": 1}, "bad_words": ["x"], "truncation_side": "left"}
    for name, field in Served.model_fields.items():
        value = asking.get(name, 2)
        with pytest.raises(RequestError) as refused:
            parse_chat(json.dumps(ask(**{name: value})).encode())
        assert refused.value.param == name, field
    neutral = {"n": 1, "min_p": 0, "logit_bias": {}, "repetition_penalty": 1.0, "ignore_eos": False}
    chat = parse_served_chat(json.dumps(ask(**neutral)).encode(), CODEC)
    assert chat.adjustments is None
    words = parse_served_chat(json.dumps(ask(bad_words=["two"])).encode(), CODEC)
    banned = [bpe().decode(list(word)) for word in words.adjustments.banned]
    assert {word.strip() for word in banned} == {"two"}
