"""The gateway over real HTTP with a scripted agent: any request that clients may send,
and its effect.
"""

import asyncio
import contextlib
import io
import json
import re
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yarl
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import APIError, AsyncOpenAI
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParamsBase

from rollweave.engine.clients.base import OnTokens
from rollweave.io.http.fields import NEUTRAL, WITHOUT_EFFECT, shown
from rollweave.rollout.gateway import answering, fields
from rollweave.rollout.gateway.answering import MAX_BODY
from rollweave.rollout.gateway.fields import RequestError
from rollweave.rollout.gateway.requests import Chat, parse_chat
from rollweave.rollout.gateway.server import Gateway, SessionRecording
from rollweave.rollout.gateway.sessions import SessionLimits
from rollweave.schema import serving as s
from rollweave.schema.errors import EngineError, EngineLostError
from rollweave.schema.work import SegmentKind
from tests.support.chats import codec
from tests.support.engines import limit_compilation
from tests.support.properties import examples
from tests.support.scripted_gateway import (
    CALL,
    CHAT,
    CODEC,
    END,
    TOOL,
    Client,
    Script,
    ask,
    check_refusal,
    encode,
    engine_result,
    gateway,
    refusing,
)

USER = {"role": "user", "content": "hi"}
ARGUMENTS = {"a": 2, "b": 3}


async def events(client: Client, body: dict[str, Any]) -> tuple[list[Any], list[str]]:
    """Return the chunks of a stream, and its comments."""
    head = {"Authorization": f"Bearer {client.access.token}"}
    async with client.http.post(
        client.base_url + CHAT, json=body | {"stream": True}, headers=head
    ) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        blocks = (await response.text()).split("\n\n")
    assert blocks.pop() == ""
    comments = [block for block in blocks if block.startswith(":")]
    data = [block.removeprefix("data: ") for block in blocks if block not in comments]
    if data[-1] == "[DONE]":
        data.pop()
    return [json.loads(each) for each in data], comments


async def test_an_answer_is_recorded() -> None:
    script = Script(["hello"])
    async with gateway(script) as (server, client):
        status, body = await client.post(ask(logprobs=True))
        assert status == 200
        (choice,) = body["choices"]
        assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
        assert choice["finish_reason"] == "stop"
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
            CODEC.decode([t]) for t in encode("hello")
        ]
        assert choice["logprobs"]["content"][0]["logprob"] == -0.5
        prompt = CODEC.start([parse_chat(json.dumps(ask()).encode()).messages[0]])
        sampled = (*encode("hello"), END)
        assert body["usage"]["prompt_tokens"] == len(prompt)
        assert body["usage"]["completion_tokens"] == len(sampled)
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        assert body["model"] == "m"
        (sequence,) = server.close("s").sequences
        assert sequence.tokens == (*prompt, *sampled)
        expected = [SegmentKind.PROMPT, SegmentKind.OUTPUT]
        assert [segment.kind for segment in sequence.segments] == expected
        assert (await client.post(ask()))[0] == 404


async def test_a_tool_conversation_is_one_sequence_and_parallel_calls_have_unique_ids() -> None:
    script = Script([f"let me see {CALL}\n{CALL}", "5"])
    async with gateway(script) as (server, client):
        status, body = await client.post(ask(tools=[TOOL]))
        message = body["choices"][0]["message"]
        assert (status, body["choices"][0]["finish_reason"]) == (200, "tool_calls")
        assert message["content"] == "let me see"
        assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [
            ARGUMENTS,
            ARGUMENTS,
        ]
        ids = [call["id"] for call in message["tool_calls"]]
        assert len(set(ids)) == 2
        results = [{"role": "tool", "tool_call_id": id, "content": "5"} for id in ids]
        status, body = await client.post(
            {"model": "m", "messages": [USER, message, *results], "tools": [TOOL]}
        )
        assert body["choices"][0]["message"]["content"] == "5"
        (sequence,) = server.sequences("s")
        assert len(sequence.turns) == 2
        assert script.requests[1][1][: len(script.requests[0][1])] == script.requests[0][1]


async def test_tool_choice() -> None:
    script = Script([CALL])
    async with gateway(script) as (_, client):
        for choice in ("required", {"type": "function", "function": {"name": "add"}}):
            _, body = await client.post(ask(tools=[TOOL], tool_choice=choice))
            (call,) = body["choices"][0]["message"]["tool_calls"]
            expected = ("add", ARGUMENTS)
            assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == expected
            constraint = script.requests[-1][2].constraint
            assert constraint.text.startswith("start: call ")
            assert CODEC.decode(script.requests[-1][1]).endswith("assistant\n")
        _, body = await client.post(ask(tools=[TOOL], tool_choice="none"))
        assert body["choices"][0]["message"]["content"] == CALL
        assert script.requests[-1][2].constraint is None
        _, body = await client.post(ask(tools=[TOOL], parallel_tool_calls=False))
        assert script.requests[-1][2].stop == ("</tool_call>",)
        assert body["choices"][0]["finish_reason"] == "tool_calls"
        status, body = await client.post(
            ask(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "sub"}})
        )
        assert (status, body["error"]["param"]) == (400, "tool_choice.function.name")


async def test_leaves_out_or_refuses_tools_that_the_template_does_not_show() -> None:
    plain = codec("chatml")
    for session, status in (({"unreadable": "refuse"}, 400), ({}, 200)):
        async with gateway(Script(codec=plain), of=plain, session=session) as (server, client):
            answer = await client.post(ask(tools=[TOOL]))
            assert answer[0] == status
            if status == 400:
                assert answer[1]["error"]["param"] == "tools"
                assert "chat template shows none" in answer[1]["error"]["message"]
            else:
                (ignored,) = server.session("s").ignored.entries()
                assert str(ignored) == "tools = 1: left out, in 1 request"
            forced = await client.post(ask(tools=[TOOL], tool_choice="required"))
            assert (forced[0], forced[1]["error"]["param"]) == (400, "tools")
            assert (await client.post(ask()))[0] == 200


async def test_a_stop_text_across_tokens_is_recorded_but_not_shown() -> None:
    sampled = (*encode("one user"), *encode(" tw"))
    async with gateway(Script([engine_result(sampled)])) as (server, client):
        body = ask(stop=["ser t", "zzz"])
        completion_chunks, _ = await events(client, body)
        assert (
            "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in completion_chunks)
            == "one u"
        )
        _, answer = await client.post(body)
        assert answer["choices"][0]["message"]["content"] == "one u"
        _, answer = await client.post(ask(stop="one"))
        assert answer["choices"][0]["message"]["content"] == ""
        (sequence, *_) = server.sequences("s")
        assert sequence.tokens[sequence.turns[0].start :] == sampled


@pytest.mark.parametrize("appended", ["", "\nCalling tools:\n[{'name': 'run'}]"])
async def test_an_answer_that_is_resent_with_its_stop_text_stays_one_sequence(
    appended: str,
) -> None:
    """As smolagents' CodeAgent does it, which appends its call of the tool, too: what
    it appends is an observation.
    """
    turns = ["<code>f(1)</code>", "<code>f(2)</code>", "done"]
    script = Script([engine_result(encode(text)) for text in turns])
    async with gateway(script) as (server, client):
        messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        for number in range(3):
            _, answer = await client.post({**ask(stop=["</code>", "zzz"]), "messages": messages})
            text = answer["choices"][0]["message"]["content"]
            assert text == turns[number].removesuffix("</code>")
            again = {"role": "assistant", "content": f"{text}</code>{appended}"}
            messages += [again, {"role": "user", "content": f"it is {number}"}]
        (sequence,) = server.sequences("s")
    assert len(sequence.turns) == 3
    whole = CODEC.decode(sequence.tokens)
    for number, turn in enumerate(sequence.turns):
        assert CODEC.decode(sequence.tokens[turn.start : turn.end]) == turns[number]
        assert sequence.tokens[: turn.start] == script.requests[number][1]
        assert number == 2 or turns[number] + appended in whole
    sampled = sum(turn.end - turn.start for turn in sequence.turns)
    assert sum(sequence.output_mask()) == sampled


@pytest.mark.parametrize(
    "again", ["<code>f(2)</code>", "<code>f(1)", "<code>f(1)</cod", "so: <code>f(1)</code>"]
)
async def test_only_an_answer_and_what_follows_its_stop_text_stay_one_sequence(again: str) -> None:
    """Without the stop text it is the answer as it was shown."""
    script = Script([engine_result(encode("<code>f(1)</code>")), "done"])
    async with gateway(script) as (server, client):
        body = ask(stop=["</code>"])
        await client.post(body)
        history = [{"role": "assistant", "content": again}, {"role": "user", "content": "and"}]
        await client.post({**body, "messages": [*body["messages"], *history]})
        assert len(server.sequences("s")) == (1 if again == "<code>f(1)" else 2)


async def test_finish_reasons_and_sampling_parameters() -> None:
    cut = engine_result(encode("hel"), finish=s.FinishReason.LENGTH)
    script = Script([cut, engine_result(encode("hel"), finish=s.FinishReason.TIME), "a"])
    limits = SessionLimits(turn_tokens=50)
    base = s.Sampling(temperature=0.7, top_k=9, seed=5)
    async with gateway(script, session={"limits": limits, "sampling": base}) as (_, client):
        for _ in range(2):
            assert (await client.post(ask()))[1]["choices"][0]["finish_reason"] == "length"
        more = {
            "temperature": 0,
            "top_p": 0.5,
            "seed": -7,
            "max_tokens": 1000,
            "max_completion_tokens": 12,
            "stop": "x",
        }
        await client.post(ask(**more))
        await client.post(ask(max_tokens=1000))
        await client.post(ask(max_tokens=7, max_completion_tokens=12))
    samplings = [sampling for _, _, sampling in script.requests]
    assert (samplings[0].temperature, samplings[0].top_k, samplings[0].max_tokens) == (0.7, 9, 50)
    assert samplings[0].seed != samplings[1].seed
    assert samplings[2] == s.Sampling(
        temperature=0,
        top_p=0.5,
        top_k=9,
        seed=-7,
        max_tokens=12,
        stop=("x",),
        stop_token_ids=CODEC.stop_token_ids,
    )
    assert [sampling.max_tokens for sampling in samplings[3:]] == [50, 7]


async def test_pinned_sampling_overrides_the_client() -> None:
    script = Script()
    async with gateway(
        script, session={"sampling": s.Sampling(temperature=1.0, top_k=5), "pinned": True}
    ) as (_, client):
        assert (await client.post(ask(temperature=0.1, top_p=0.2, top_k=1, seed=3)))[0] == 200
    sampling = script.requests[0][2]
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 5)
    assert sampling.seed != 3


# Access.


async def test_a_session_requires_its_token() -> None:
    async with gateway(Script()) as (server, client):
        other = Client(client.http, client.url, server.open("other"))
        crossed = Client(
            client.http,
            client.url,
            type(other.access)(path=client.access.path, token=other.access.token),
        )
        for request, status in ((client, 200), (other, 200), (crossed, 401)):
            assert (await request.post(ask()))[0] == status
        head = {"Authorization": "Bearer " + client.access.token}
        async with client.http.get(client.base_url + "/models", headers=head) as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["tiny"]
        for header in ({}, {"Authorization": "Basic x"}, {"Authorization": "Bearer é"}):
            async with client.http.get(client.base_url + "/models", headers=header) as response:
                assert response.status == 401
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        unknown = Client(client.http, client.url, type(client.access)(path="/s/none/v1", token="x"))
        status, body = await unknown.post(ask())
        assert (status, body["error"]["code"]) == (404, "session_not_found")
        assert len(server.sequences("s")) == len(server.sequences("other")) == 1
        status, body = await client.post(ask(), path="/embeddings")
        assert (status, list(body)) == (404, ["error"])


@pytest.mark.parametrize("id", ["", "a/b", "é", "x" * 129, "s"])
async def test_refuses_a_session_id_that_is_taken_or_no_path(id: str) -> None:
    server = Gateway(CODEC, Script(), model="tiny")
    server.open("s")
    with pytest.raises(ValueError, match=r"session\.id must"):
        server.open(id)


@pytest.mark.parametrize(
    "field",
    [
        '"guided_json": {"minimum": 1e400}',
        f'"guided_json": {{"minimum": 1{"0" * 400}}}',
        '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": -2E+999}}}]',
        '"metadata": {"a": [1.5e0400]}',
    ],
)
async def test_numbers_that_are_infinite_are_refused_in_one_line(field: str) -> None:
    """In a temperature, they are refused by the name of the field."""
    async with gateway(Script()) as (_, client):
        head = {
            "Authorization": "Bearer " + client.access.token,
            "Content-Type": "application/json",
        }
        for text in (field, field.replace("E+999", "E-999")):
            body = json.dumps(ask())[:-1] + f", {text}}}"
            url = client.base_url + "/chat/completions"
            async with client.http.post(url, data=body, headers=head) as response:
                if "E-999" in text:
                    assert response.status == 200
                    continue
                assert response.status == 400
                message = (await response.json())["error"]["message"]
                assert message.startswith("numbers must be at most 1.8e308, got ")
                assert len(message) < 200


async def test_engines_that_cannot_constrain_answers_are_named() -> None:
    script = Script()
    async with gateway(script, unconstrained="SGLang engines cannot constrain answers") as (
        _,
        client,
    ):
        status, body = await client.post(ask(response_format={"type": "json_object"}))
        assert (status, body["error"]["message"], body["error"]["param"]) == (
            400,
            "response_format must be null: SGLang engines cannot constrain answers",
            "response_format",
        )
        assert not script.requests
        assert (await client.post(ask()))[0] == 200


async def test_limits() -> None:
    script = Script(hold=True)
    limits = SessionLimits(calls=2, concurrent=1, context=60, tokens=1000)
    async with gateway(script, session={"limits": limits}) as (_, client):
        first = asyncio.create_task(client.post(ask()))
        await script.started.get()
        status, body = await client.post(ask("other"))
        expected = (429, "rate_limit_error", "rate_limit_exceeded")
        assert (status, body["error"]["type"], body["error"]["code"]) == expected
        script.free.set()
        assert (await first)[0] == 200
        status, body = await client.post(ask("a" * 100))
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        status, body = await client.post(ask("a" * 1000))  # not even read
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 60 tokens" in body["error"]["message"]
        assert (await client.post(ask("second")))[0] == 200
        status, body = await client.post(ask("third"))
        assert (status, body["error"]["code"]) == (429, "insufficient_quota")
    with pytest.raises(ValueError, match=r"limits\.calls must be positive, got 0"):
        SessionLimits(calls=0)


async def test_a_session_without_quota_reads_no_further_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = SessionLimits(calls=1)
    async with gateway(Script(["a"]), session={"limits": limits}) as (made, client):
        assert (await client.post(ask("first")))[0] == 200
        assert (await client.post(ask("second")))[0] == 429
        recorder = next(iter(made._sessions.values())).recorder
        monkeypatch.setattr(recorder, "begin", None)
        for text in ("second", "third"):
            status, body = await client.post(ask(text))
            assert (status, body["error"]["code"]) == (429, "insufficient_quota")
        assert len(recorder._calls_by_key) == 1  # refused requests are forgotten


async def test_bounds_the_tokens_of_a_session() -> None:
    script = Script(["hello"])
    enough = len(encode("hello")) + 2
    async with gateway(script, session={"limits": SessionLimits(tokens=enough)}) as (_, client):
        assert [(await client.post(ask(text)))[0] for text in "abc"] == [200, 200, 429]
    assert [sampling.max_tokens for _, _, sampling in script.requests] == [enough, 1]


# What clients send.

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": "hi"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "messages.0.content.0.type",
    ),
    ({"messages": [{"role": "tool", "content": "5"}]}, "messages.0.tool_call_id"),
    (
        {
            "messages": [
                {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "a"}}]}
            ]
        },
        "messages.0.tool_calls",
    ),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
        "messages.1.tool_calls.0.function.name",
    ),
    ({"model": 3}, "model"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
    ({"seed": 2**70}, "seed"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "<|im_end|>"}}]},
        "tools.0.function.name",
    ),
    ({"tool_choice": "required"}, "tools"),
    ({"top_logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 1}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 5, "temperature": 0}, "top_logprobs"),
    ({"top_k": -2}, "top_k"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"stop_token_ids": [1] * 17}, "stop_token_ids"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    (
        {
            "response_format": {"type": "json_object"},
            "tools": [TOOL],
            "tool_choice": "required",
        },
        "tool_choice",
    ),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
    ({"chat_template_kwargs": {"a": 1}, "enable_thinking": 3}, "enable_thinking"),
    (
        {"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True},
        "enable_thinking",
    ),
    ({"reasoning_effort": 7}, "reasoning_effort"),
    ({"stream_options": {"include_more": True}}, "stream_options.include_more"),
    (
        {
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "add"}, "mode": "auto"},
        },
        "tool_choice.mode",
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": "x", "reasoning_content": "y"}]},
        "messages.1.reasoning_content",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "weight": 2}]}]},
        "messages.0.content.0.weight",
    ),
    ({"messages": [{"role": "user", "content": "x", "images": ["y"]}]}, "messages.0.images"),
    (
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [{"function": {"name": "a"}, "priority": 1}]},
            ]
        },
        "messages.1.tool_calls.0.priority",
    ),
    ({"temperature": 1e-40}, "temperature"),  # logits would overflow
]


@pytest.mark.parametrize(("change", "param"), WRONG)
def test_refusals_name_field_rule_and_value(change: dict[str, Any], param: str) -> None:
    check_refusal(parse_chat, ask() | change, param)


@pytest.mark.parametrize("name", ["two\nlines", "", "x" * 5000])
def test_the_name_of_an_unknown_field_is_shown_in_one_short_line(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        refusing(parse_chat(json.dumps(ask() | {name: 1}).encode()))
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert len(text) < 250
    assert text[0] != " "


SCHEMA = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}}
JSON = s.Constraint(kind="json", text=json.dumps(SCHEMA))
AB = s.Constraint(kind="regex", text="a|b")


FORMS: list[tuple[dict[str, Any], s.Constraint | None]] = [
    ({"response_format": {"type": "text"}}, None),
    (
        {"response_format": {"type": "json_object"}},
        s.Constraint(kind="json", text='{"type": "object"}'),
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            }
        },
        JSON,
    ),
    ({"structured_outputs": {"json": SCHEMA}}, JSON),
    ({"structured_outputs": {"choice": ["a", "b"]}}, AB),
    ({"structured_outputs": {"regex": "a|b"}}, AB),
    ({"guided_json": SCHEMA}, JSON),
    ({"guided_regex": "a|b"}, AB),
    ({"guided_choice": ["a", "b"]}, AB),
    ({"regex": "a|b"}, AB),
    ({"json_schema": json.dumps(SCHEMA)}, JSON),
]


async def test_the_form_of_an_answer_is_a_constraint_of_its_sampling() -> None:
    """Except that a turn may call a tool instead, if there are any."""
    script = Script()
    async with gateway(script) as (_, client):
        for fields, constraint in FORMS:
            for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
                assert (await client.post(ask(**fields, **more)))[0] == 200
                assert script.requests[-1][2].constraint == constraint
            assert (await client.post(ask(**fields, tools=[TOOL])))[0] == 200
            either = script.requests[-1][2].constraint
            assert (either is None) is (constraint is None)
            assert either is None or either.text.startswith("start: calls | answer")
            body = {"model": "m", "prompt": "a", **fields}
            assert (await client.post(body, path="/completions"))[0] == 200
            assert script.requests[-1][2].constraint == constraint


UNCONSTRAINABLE: list[tuple[str, dict[str, Any], str, str]] = [
    (
        CHAT,
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"not": {"type": "string"}}},
            }
        },
        "response_format.json_schema.schema",
        'that can be constrained: Unimplemented keys: ["not"]',
    ),
    (CHAT, {"regex": "a(?=b)"}, "regex", "look-around"),
    (CHAT, {"json_schema": "{"}, "json_schema", "must be a JSON schema that can be constrained"),
    (CHAT, {"guided_json": {"type": "thing"}}, "guided_json", "Invalid type"),
    (CHAT, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
    (
        "/responses",
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
        "text.format.schema",
        "Unimplemented keys",
    ),
    (
        "/messages",
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        "output_config.format.schema",
        "Unimplemented keys",
    ),
    (CHAT, {"guided_regex": "a?" * 40_000}, "guided_regex", "must have at most 32768 characters"),
    (CHAT, {"guided_regex": "a?" * 16_000}, "guided_regex", "it takes too much CPU time"),
    ("/completions", {"guided_regex": "("}, "guided_regex", "unclosed group"),
    (CHAT, {"guided_choice": ["a" * 50_000]}, "guided_choice", "must have at most 32768"),
]


async def test_a_form_that_cannot_be_constrained_is_refused_by_its_field(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one whose compilation takes too long, and the turns of other sessions go on
    meanwhile.
    """
    limit_compilation(monkeypatch)
    script = Script()
    bodies: dict[str, dict[str, Any]] = {
        CHAT: ask(),
        "/messages": ask(max_tokens=9),
        "/responses": {"model": "m", "input": "a"},
        "/completions": {"model": "m", "prompt": "a"},
    }
    async with gateway(script) as (server, client):
        for path, fields, param, reason in UNCONSTRAINABLE:
            asked = asyncio.create_task(client.post(bodies[path] | fields, path=path))
            other = Client(client.http, client.url, server.open("beside"))
            assert (await other.post(ask()))[0] == 200
            server.close("beside")
            status, answer = await asked
            message = answer["error"]["message"]
            assert (status, message.startswith(param), reason in message) == (400, True, True), (
                answer
            )
            assert "\n" not in message
            assert path == "/messages" or answer["error"]["param"] == param
        assert all(sampling.constraint is None for _, _, sampling in script.requests)


async def test_template_arguments_change_the_prompt_or_are_refused() -> None:
    """A change of them in the middle of a conversation is a new context."""
    script = Script(["yes"])
    session = {"unreadable": "refuse"}
    async with gateway(script, of=codec("switched"), session=session) as (server, client):
        _, first = await client.post(ask())
        answer = first["choices"][0]["message"]
        again = [*ask()["messages"], answer, USER]
        assert (await client.post(ask(messages=again)))[0] == 200
        quiet = {"chat_template_kwargs": {"enable_thinking": False}}
        assert (await client.post(ask(messages=again, **quiet)))[0] == 200
        assert (await client.post(ask(messages=again, enable_thinking=False)))[0] == 200
        prompts = [prompt for _, prompt, _ in script.requests]
        assert prompts[1][: len(prompts[0])] == prompts[0]
        assert prompts[2] == prompts[3]
        assert prompts[2][-len(THOUGHT) :] == THOUGHT
        assert prompts[2][: len(prompts[0]) + len(THOUGHT)] == prompts[0] + THOUGHT
        assert [len(each.turns) for each in server.sequences("s")] == [2, 1, 1]
        for unknown in ({"chat_template_kwargs": {"depth": 3}}, {"reasoning_effort": "low"}):
            status, refusal = await client.post(ask(**unknown))
            assert status == 400
            assert re.fullmatch(
                r"(chat_template_kwargs\.depth|reasoning_effort) must be null: this model's chat template reads "
                r"enable_thinking, got (3|'low')",
                refusal["error"]["message"],
            )


THOUGHT = encode("<think>\n\n</think>\n\n")


HONORED = set(Chat.model_fields)
"""Fields of a request that the gateway reads; the run decides `PINNED_FIELDS` of them
where the session is pinned.
"""

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=examples(500))
@given(st.data())
def test_refuses_unsupported_fields_with_an_effect(data: st.DataObject) -> None:
    name = data.draw(
        st.sampled_from(sorted(set(fields.NEUTRAL) - HONORED))
        | st.text(min_size=1).filter(lambda name: name not in HONORED)
    )
    value = data.draw(st.sampled_from([*fields.NEUTRAL.get(name, ()), None]) | json_values)
    body = json.dumps(ask() | {name: value}).encode(errors="ignore")
    same = [value is None, name in fields.WITHOUT_EFFECT]
    same += [
        value == each and isinstance(value, bool) is isinstance(each, bool)
        for each in fields.NEUTRAL.get(name, ())
    ]
    if any(same):
        assert parse_chat(body) == parse_chat(json.dumps(ask()).encode())
    else:
        with pytest.raises(RequestError) as caught:
            refusing(parse_chat(body))
        assert (caught.value.status, caught.value.param) == (400, name)
        assert str(caught.value).startswith(f"{shown(name)} must ")
        assert str(caught.value).endswith(f", got {value!r:.80}")


def test_each_request_field_is_in_one_table_and_documented() -> None:
    assert (
        set(CompletionCreateParamsBase.__annotations__) <= HONORED | set(NEUTRAL) | WITHOUT_EFFECT
    )
    assert (
        set(CompletionParamsBase.__annotations__) - {"prompt"}
        <= HONORED | set(NEUTRAL) | WITHOUT_EFFECT
    )
    assert not set(NEUTRAL) & WITHOUT_EFFECT
    assert not HONORED & WITHOUT_EFFECT
    words = set(
        re.findall(r"[a-z_]+", (Path(__file__).parents[3] / "docs" / "GATEWAY.md").read_text())
    )
    assert (HONORED | (set(NEUTRAL) - HONORED) | WITHOUT_EFFECT) - words == set()


async def test_a_stop_token_ends_the_turn_and_is_recorded_but_not_shown() -> None:
    sampled = encode("one two")
    script = Script([engine_result(sampled), engine_result(encode("é")[:2])])
    async with gateway(script) as (server, client):
        _, answer = await client.post(ask(stop_token_ids=[sampled[-1]], top_k=7))
        assert answer["choices"][0]["message"]["content"] == CODEC.decode(sampled[:-1])
        assert script.requests[0][2].stop_token_ids == (*CODEC.stop_token_ids, sampled[-1])
        assert script.requests[0][2].top_k == 7
        (sequence,) = server.sequences("s")
        assert sequence.tokens[sequence.turns[0].start :] == sampled
        await client.post(ask("again", top_k=-1))
        assert script.requests[1][2].top_k == 0


def test_accepts_messages_with_fields_without_effect() -> None:
    echoed = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
    }
    sent = {
        "role": "developer",
        "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}],
    }
    parsed = parse_chat(json.dumps(ask(messages=[sent, USER, echoed, USER])).encode())
    expected = [("system", "be kind"), ("assistant", "")]
    assert [(message.role, message.content) for message in parsed.messages][:3:2] == expected


BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "m", "messages": ' + b"[" * 90_000,
    b'{"model": "m", "temperature": NaN, "messages": [{"role": "user", "content": "x"}]}',
    b'{"model": "m", "tools": [{"type": "function", "function": {"name": "a", "x": "\\udc00"}}], '
    b'"messages": []}',
]


async def test_refuses_bytes_that_are_neither_text_nor_gzip() -> None:
    async with gateway(Script()) as (_, client):
        status, answer = await client.post(
            io.BytesIO(b"not zipped"), **{"Content-Encoding": "gzip"}
        )
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        url = yarl.URL(client.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(
            b"GET /s/s/v1/models HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n"
            % url.authority.encode()
        )
        writer.write(b"Authorization: Bearer \xff\xfe\r\n\r\n")
        assert b"401" in await reader.readline()
        await reader.read()
        writer.close()
        await writer.wait_closed()


async def test_malformed_requests_get_a_plain_error_and_the_gateway_survives() -> None:
    async with gateway(Script()) as (server, client):
        for body in BODIES:
            status, answer = await client.post(body)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        status, answer = await client.post(io.BytesIO(b" " * (MAX_BODY + 1)))
        assert (status, answer["error"]["type"]) == (413, "invalid_request_error")
        assert server.sequences("s") == ()
        assert (await client.post(ask()))[0] == 200


@settings(max_examples=examples(200))
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "messages",
                "tools",
                "tool_choice",
                "stop",
                "n",
                "stream",
                "logprobs",
                "seed",
                "response_format",
            ]
        ),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats()
            | st.text(max_size=5)
            | st.just("function"),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["role", "content", "type", "function", "name", "text"]),
                    inner,
                    max_size=4,
                )
            ),
            max_leaves=8,
        ),
        max_size=4,
    )
)
def test_any_json_is_parsed_or_refused(change: dict[str, Any]) -> None:
    try:
        assert parse_chat(json.dumps(ask() | change).encode()).messages
    except RequestError as error:
        refused = error.status
        assert refused == 400


def test_a_body_of_too_many_parts_is_refused_before_it_is_parsed() -> None:
    for part in ('{"role":"user","content":""}', "1", '""', "[", '"', '",'):
        body = ('{"model":"m","messages":[' + ",".join([part] * 400_000)).encode()
        began = time.process_time()
        with pytest.raises(RequestError, match="at most 100000 strings, commas") as refused:
            parse_chat(body)
        assert refused.value.status == 413
        assert time.process_time() - began < 5.0
    text = '",[{\\' * 200_000
    assert parse_chat(json.dumps(ask(text)).encode()).messages[0].content == text


def test_numbers_are_checked_in_linear_time() -> None:
    """Each has a digit less than the shortest that may be infinite."""
    numbers = ",".join(["9" * 308] * 3000)
    body = json.dumps(ask(metadata={"a": []})).replace("[]", f"[{numbers}]").encode()
    began = time.process_time()
    parse_chat(body)
    assert time.process_time() - began < 0.5


def test_an_error_ends_the_validation() -> None:
    began = time.process_time()
    with pytest.raises(RequestError, match=r"messages\.0\.content\.0: .* got 1"):
        parse_chat(
            json.dumps(ask() | {"messages": [{"role": "user", "content": [1] * 99_000}]}).encode()
        )
    assert time.process_time() - began < 0.5


# What goes wrong.


@pytest.mark.parametrize(
    ("what", "status"),
    [
        (EngineLostError("gone"), 503),
        (EngineError("refused"), 503),
        (ZeroDivisionError("oops"), 500),
        (engine_result((), finish=s.FinishReason.ERROR), 503),
        (engine_result(encode("a"), finish=s.FinishReason.ABORTED), 503),
        (engine_result(()), 503),
    ],
)
async def test_a_failed_turn_is_an_error_and_counts_as_no_call(what: Any, status: int) -> None:
    async with gateway(Script([what, what, "a"])) as (server, client):
        for body in (ask(), ask(stream=True)):
            got, answer = await client.post(body)
            assert (got, answer["error"]["type"]) == (status, "server_error")
        assert server.sequences("s") == ()
        assert (await client.post(ask()))[0] == 200


async def test_a_slow_stream_is_kept_alive_and_sends_errors_as_events() -> None:
    script = Script([EngineError("gone")], hold=True)
    async with gateway(script, keep_alive_s=0.001) as (server, client):
        head = {"Authorization": f"Bearer {client.access.token}"}
        async with client.http.post(
            client.base_url + CHAT, json=ask(stream=True), headers=head
        ) as response:
            assert response.status == 200
            for _ in range(3):
                assert (await response.content.readuntil(b"\n\n")).startswith(b":")
            script.free.set()
            last = (await response.text()).strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
        assert server.sequences("s") == ()


@dataclass
class Sampler:
    """`generate` of a gateway whose turns a test samples token by token."""

    turns: asyncio.Queue[tuple[OnTokens | None, asyncio.Future[s.GenerateResult]]] = field(
        default_factory=asyncio.Queue
    )

    async def __call__(
        self,
        session: str,
        tokens: tuple[int, ...],
        sampling: s.Sampling,
        on_tokens: OnTokens | None,
    ) -> s.GenerateResult:
        result: asyncio.Future[s.GenerateResult] = asyncio.get_running_loop().create_future()
        self.turns.put_nowait((on_tokens, result))
        return await result


def report(on_tokens: OnTokens | None, sampled: tuple[int, ...], start: int = 0) -> None:
    """Report the tokens of a turn from `start` on."""
    assert on_tokens is not None, "a stream is read while it is sampled"
    logprobs = engine_result(sampled).logprobs
    on_tokens(
        s.TokenDelta(
            id="x", start=start, tokens=sampled[start:], logprobs=logprobs[start:], versions=()
        )
    )


def openai_of(client: Client) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=client.base_url, api_key=client.access.token, max_retries=0, timeout=60.0
    )


async def test_text_arrives_while_the_turn_is_sampled() -> None:
    """The turn goes on only after the client has what was sampled."""
    sampler, sampled = Sampler(), (*encode("né 🙂 stop it"), END)
    async with gateway(sampler) as (server, client), openai_of(client) as openai:
        stream = await _started(openai, sampler, sampled[:2], logprobs=True, stop=["stop it"])
        text, entries = "", []
        for end in range(2, len(sampled)):
            report(stream.on_tokens, sampled[:end], end - 1)
            while text != "né 🙂 "[: len(CODEC.decode(sampled[:end]).rstrip("\ufffd"))]:
                choice = await stream.next_choice()
                text += choice.delta.content
                entries += choice.logprobs.content
            assert not stream.result.done()
        stream.result.set_result(engine_result(sampled))
        assert await stream.next_choice() is not None
        expected = ("né 🙂 ", [CODEC.decode([token]) for token in encode("né 🙂 ")])
        assert (text, [entry.token for entry in entries]) == expected
        (sequence,) = server.sequences("s")
        assert sequence.tokens[sequence.turns[0].start :] == sampled


@dataclass
class _Stream:
    """A stream that OpenAI's client reads, and the turn behind it."""

    chunks: AsyncIterator[Any]
    on_tokens: OnTokens | None
    result: asyncio.Future[s.GenerateResult]

    async def next_choice(self) -> Any:
        """Return the next choice with text or a finish reason."""
        async with asyncio.timeout(30):
            while True:
                (choice,) = (await anext(self.chunks)).choices
                if choice.delta.content or choice.finish_reason:
                    return choice

    async def drain(self) -> None:
        """Read to the end."""
        async with asyncio.timeout(30):
            async for _ in self.chunks:
                pass


async def _started(
    openai: AsyncOpenAI, sampler: Sampler, sampled: tuple[int, ...], **more: Any
) -> _Stream:
    """Begin a stream, of whose turn these tokens are sampled."""
    asked = asyncio.create_task(
        openai.chat.completions.create(**ask(stream=True, **more))  # type: ignore[call-overload]
    )
    on_tokens, result = await sampler.turns.get()
    report(on_tokens, sampled)
    return _Stream(aiter(await asked), on_tokens, result)


async def test_a_turn_that_begins_anew_alike_goes_on() -> None:
    sampler, sampled = Sampler(), (*encode("one two three"), END)
    async with gateway(sampler) as (server, client), openai_of(client) as openai:
        stream = await _started(openai, sampler, sampled[:4])
        first = (await stream.next_choice()).delta.content
        for end in range(1, len(sampled)):
            report(stream.on_tokens, sampled[:end], 0 if end == 1 else end - 1)
            await asyncio.sleep(0)
        stream.result.set_result(engine_result(sampled))
        rest = ""
        while not (choice := await stream.next_choice()).finish_reason:
            rest += choice.delta.content
        assert first + rest == "one two three"
        assert len(server.sequences("s")) == 1


@pytest.mark.parametrize("noticed", ["while it is sampled", "at its end"])
async def test_a_stream_never_contradicts_itself(noticed: str) -> None:
    """It breaks off with an error; nothing of the turn is recorded, and the session
    continues.
    """
    sampler, other = Sampler(), (*encode("six seven"), END)
    async with gateway(sampler) as (server, client), openai_of(client) as openai:
        stream = await _started(openai, sampler, encode("one two"))
        assert (await stream.next_choice()).delta.content
        if noticed == "at its end":
            stream.result.set_result(engine_result(other))
        else:
            report(stream.on_tokens, other[:3])
        with pytest.raises(APIError, match="the stream is broken off: the turn"):
            await stream.drain()
        assert server.sequences("s") == ()
        if noticed == "while it is sampled":
            async with asyncio.timeout(30):
                await asyncio.wait({stream.result})
            assert stream.result.cancelled(), "the turn has no reader left"
        again = asyncio.create_task(client.post(ask("again")))
        _, result = await sampler.turns.get()
        result.set_result(engine_result(other))
        assert (await again)[0] == 200


async def test_an_engine_that_fails_in_mid_stream_is_an_error_of_the_client() -> None:
    sampler = Sampler()
    async with gateway(sampler) as (server, client), openai_of(client) as openai:
        stream = await _started(openai, sampler, encode("one two"))
        assert (await stream.next_choice()).delta.content
        stream.result.set_exception(EngineLostError("killed"))
        with pytest.raises(APIError, match="no engine could take the turn"):
            await stream.drain()
        assert server.sequences("s") == ()


async def test_a_client_that_does_not_read_is_disconnected_and_delays_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Far more is sampled than the connection holds."""
    monkeypatch.setattr(answering, "WRITE_S", 0.05)
    sampler, tokens = Sampler(), (*encode("a\n") * 10_000, END)
    body = json.dumps(ask(stream=True, logprobs=True)).encode()
    async with gateway(sampler) as (server, client):
        reader, writer = await _narrow_connection(client, body)
        on_tokens, result = await sampler.turns.get()
        for end in range(1000, len(tokens), 1000):
            report(on_tokens, tokens[:end], end - 1000)
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            await asyncio.wait({result})
        assert result.cancelled(), "nobody reads the turn"
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionError):
                while await reader.read(1 << 20):
                    pass
        writer.close()
        assert server.sequences("s") == ()


async def test_a_turn_times_out() -> None:
    async with gateway(Script(hold=True), session={"limits": SessionLimits(turn_s=0.01)}) as (
        _,
        client,
    ):
        assert (await client.post(ask()))[0] == 504


@pytest.mark.parametrize("stream", [False, True])
async def test_a_disconnected_client_stops_the_generation(stream: bool) -> None:
    script = Script(hold=True)
    async with gateway(script, keep_alive_s=0.001) as (server, client):
        head = {"Authorization": f"Bearer {client.access.token}"}
        async with aiohttp.ClientSession() as leaver:
            if stream:
                response = await leaver.post(
                    client.base_url + CHAT, json=ask(stream=True), headers=head
                )
                assert (await response.content.readline()).startswith(b":")
                response.close()
            else:
                post = asyncio.create_task(
                    leaver.post(client.base_url + CHAT, json=ask(), headers=head)
                )
                await script.started.get()
                post.cancel()
        await script.cancelled.get()
        script.free.set()
        assert (await client.post(ask()))[0] == 200
        assert len(server.sequences("s")[0].turns) == 1


async def _narrow_connection(
    client: Client, body: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request over a connection that holds little."""
    url, narrow = yarl.URL(client.url), socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    narrow.setblocking(False)
    await asyncio.get_running_loop().sock_connect(narrow, (url.host, url.port))
    reader, writer = await asyncio.open_connection(sock=narrow)
    head = f"POST {client.access.path}{CHAT} HTTP/1.1\r\nHost: {url.authority}\r\n"
    head += f"Authorization: Bearer {client.access.token}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


async def test_an_interrupted_answer_is_sent_again_and_counts_once() -> None:
    tokens = encode("a\n") * 10_000
    script = Script([engine_result((*tokens, END)), "other"])
    body = json.dumps(ask(stream=True, logprobs=True)).encode()
    async with gateway(script) as (server, client):
        # Some 6 MB, which is more than both ends of this connection hold: the gateway
        # still writes when the client goes.
        reader, writer = await _narrow_connection(client, body)
        assert b"200" in await reader.readline()
        writer.transport.abort()
        assert server.sequences("s") == ()
        again = {"Authorization": f"Bearer {client.access.token}", "X-Stainless-Retry-Count": "1"}
        again |= {"Content-Type": "application/json"}
        async with client.http.post(client.base_url + CHAT, data=body, headers=again) as response:
            assert (await response.text()).endswith("data: [DONE]\n\n")
        (sequence,) = server.sequences("s")
        assert sequence.tokens[sequence.turns[0].start :] == (*tokens, END)
        assert len(script.requests) == 1


async def test_a_retry_joins_the_turn_in_progress_and_counts_once() -> None:
    script = Script(["hello", "other"], hold=True)
    async with gateway(script) as (server, client):
        first = asyncio.create_task(client.post(ask()))
        await script.started.get()
        again = asyncio.create_task(client.post(ask(), **{"X-Stainless-Retry-Count": "1"}))
        named = [
            asyncio.create_task(client.post(ask(), **{"Idempotency-Key": "k"})) for _ in range(2)
        ]
        await script.started.get()
        script.free.set()
        bodies = [(await task)[1] for task in (first, again, *named)]
        assert bodies[0]["id"] == bodies[1]["id"] != bodies[2]["id"] == bodies[3]["id"]
        assert len(script.requests) == 2
        retried = (await client.post(ask(), **{"X-Stainless-Retry-Count": "2"}))[1]
        assert retried["id"] == bodies[0]["id"]
        assert sum(len(sequence.turns) for sequence in server.sequences("s")) == 2
        fresh = (await client.post(ask()))[1]
        assert fresh["id"] not in {body["id"] for body in bodies}
        assert sum(len(sequence.turns) for sequence in server.sequences("s")) == 3


async def test_closing_a_session_cancels_its_turns() -> None:
    script = Script(hold=True)
    async with gateway(script) as (server, client):
        task = asyncio.create_task(client.post(ask()))
        await script.started.get()
        assert server.close("s") == SessionRecording(sequences=())
        status, body = await task
        assert (status, body["error"]["code"]) == (503, "cancelled")
        await script.cancelled.get()
        with pytest.raises(KeyError):
            server.close("s")
