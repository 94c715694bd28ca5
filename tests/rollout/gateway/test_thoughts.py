"""A model that thinks: its thoughts are apart from its answer in each API, come back as
the tokens that were sampled, and follow the rule of the chat template.
"""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.rollout.chat.replies import SEAL, Thinking, seal, unseal
from rollweave.rollout.gateway.deltas import DeltaReader
from rollweave.rollout.gateway.responses import read_turn
from rollweave.schema.work import SequenceCause
from tests.support.chats import codec
from tests.support.properties import examples
from tests.support.scripted_gateway import (
    CALL,
    TOOL,
    Client,
    Script,
    encode,
    engine_result,
    gateway,
)

THOUGHT = "I add them.\n\nFive?"
CALLS = f"<think>\n{THOUGHT}\n</think>\n\n{CALL}"
SAYS = "<think>\nFive.\n</think>\n\nIt is 5."
QUESTION = "What is 2 + 3?"
Json = dict[str, Any]
Events = list[Json]


async def events(client: Client, path: str, body: Json) -> Events:
    """Return the events of a stream."""
    head = {"Authorization": f"Bearer {client.access.token}"}
    asked = {**body, "stream": True}
    async with client.http.post(client.base_url + path, json=asked, headers=head) as response:
        assert response.status == 200, await response.text()
        lines = (await response.text()).splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(line) for line in data if line != "[DONE]"]


def of_chat(found: Events) -> Json:
    deltas = [each["choices"][0]["delta"] for each in found if each["choices"]]
    message: Json = {"role": "assistant", "content": "", "reasoning_content": ""}
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if len(calls) <= call["index"]:
                calls.append({**call})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message


def of_messages(found: Events) -> list[Json]:
    blocks: list[Json] = []
    for each in found:
        if each["type"] == "content_block_start":
            blocks.append(dict(each["content_block"]))
        elif each["type"] == "content_block_delta":
            delta = dict(each["delta"])
            kind = delta.pop("type")
            for name, text in delta.items():
                if kind == "input_json_delta":
                    blocks[-1]["input"] = json.loads(text)
                else:
                    blocks[-1][name] += text
    return blocks


async def chat(
    client: Client, history: list[Json], *, keeps: bool, streamed: bool, tools: bool
) -> list[Json]:
    """Ask by OpenAI's chat API; return the messages to send back."""
    asked = {"model": "m", "messages": history, "tools": [TOOL] if tools else []}
    if streamed:
        message = of_chat(await events(client, "/chat/completions", asked))
    else:
        _, body = await client.post(asked)
        message = body["choices"][0]["message"]
    if not keeps:
        del message["reasoning_content"]
    calls = message.get("tool_calls", ())
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in calls]
    return [message, *results]


async def messages(
    client: Client, history: list[Json], *, keeps: bool, streamed: bool, tools: bool
) -> list[Json]:
    """Ask by Anthropic's API, which sends thoughts with a signature, or without
    `keeps` the signature alone.
    """
    function = TOOL["function"]
    tool = {"name": function["name"], "input_schema": function["parameters"]}  # type: ignore[index]
    body: Json = {"model": "m", "max_tokens": 400, "messages": history}
    body["tools"] = [tool] if tools else []
    body["thinking"] = {"type": "adaptive"} if keeps else {"type": "adaptive", "display": "omitted"}
    if streamed:
        blocks = of_messages(await events(client, "/messages", body))
    else:
        blocks = (await client.post(body, path="/messages"))[1]["content"]
    thought = blocks[0]
    assert (thought["type"], bool(thought["thinking"])) == ("thinking", keeps)
    uses = [block for block in blocks if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": use["id"], "content": "5"} for use in uses]
    answer = {"role": "assistant", "content": blocks}
    return [answer, *([{"role": "user", "content": results}] if results else [])]


async def responses(
    client: Client, history: list[Json], *, keeps: bool, streamed: bool, tools: bool
) -> list[Json]:
    """Ask by OpenAI's Responses API; without `keeps`, its encrypted content is all that
    comes back of thoughts.
    """
    tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    body: Json = {"model": "m", "input": history, "tools": [tool] if tools else []}
    body["reasoning"] = {"summary": "auto"} if keeps else {}
    if streamed:
        found = await events(client, "/responses", body)
        kind = "reasoning_summary_text" if keeps else "reasoning_text"
        deltas = [each["delta"] for each in found if each["type"] == f"response.{kind}.delta"]
        output = found[-1]["response"]["output"]
        told = output[0]["summary" if keeps else "content"][0]["text"]
        assert "".join(deltas) == told
        assert [
            each["item"] for each in found if each["type"] == "response.output_item.done"
        ] == output
    else:
        output = (await client.post(body, path="/responses"))[1]["output"]
    assert output[0]["type"] == "reasoning"
    if not keeps:
        output[0] = {**output[0], "content": None}
    calls = [item for item in output if item["type"] == "function_call"]
    return output + [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
        for call in calls
    ]


@pytest.mark.parametrize("template", ["qwen", "thinking"])
@pytest.mark.parametrize("ask", [chat, messages, responses])
async def test_thoughts_come_back_as_they_were_sampled(ask: Any, template: str) -> None:
    """Two calls and an answer in each form of sending thoughts back; then a question,
    for which the template leaves out the earlier thoughts.
    """
    of, tools = codec(template), codec(template).shows_tools
    opened = "" if tools else "<think>\n"
    texts = [CALLS, CALLS.replace("Five?", "Six?"), SAYS] if tools else [SAYS]
    for keeps, streamed in ((True, False), (True, True), (False, False), (False, True)):
        script = Script([text.removeprefix(opened) for text in (*texts, SAYS)], codec=of)
        form = {"keeps": keeps, "streamed": streamed, "tools": tools}
        async with gateway(script, of=of) as (server, client):
            history: list[Json] = [{"role": "user", "content": QUESTION}]
            for _ in texts:
                history += await ask(client, history, **form)
            (first,) = server.sequences("s")
            assert len(first.turns) == len(texts)
            prompts = [prompt for _, prompt, _ in script.requests]
            assert [first.tokens[: turn.start] for turn in first.turns] == prompts
            assert THOUGHT in of.decode(first.tokens) or not tools
            await ask(client, [*history, {"role": "user", "content": "And now?"}], **form)
            second = server.sequences("s")[1]
            assert second.origin.cause is SequenceCause.THOUGHTS_DROPPED
            prompt = of.decode(script.requests[-1][1])
            assert ("Five" in prompt, "It is 5." in prompt) == (False, True)


async def test_thoughts_that_are_edited_are_another_history() -> None:
    of = codec("qwen")
    async with gateway(Script([CALLS, SAYS], codec=of), of=of) as (server, client):
        history: list[Json] = [{"role": "user", "content": QUESTION}]
        answer = await chat(client, history, keeps=True, streamed=False, tools=True)
        answer[0]["reasoning_content"] = "I refuse."
        await chat(client, [*history, *answer], keeps=True, streamed=False, tools=True)
        edited = server.sequences("s")[1]
        assert edited.origin.cause is SequenceCause.HISTORY_EDITED
        assert "I refuse." in of.decode(edited.tokens)


async def test_a_constrained_answer_has_no_thoughts() -> None:
    of = codec("thinking")
    async with gateway(Script(['{"a": 1}'], codec=of), of=of) as (_, client):
        asked = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
        _, body = await client.post({**asked, "response_format": {"type": "json_object"}})
        assert body["choices"][0]["message"]["content"] == '{"a": 1}'


async def test_wishes_to_think_reach_the_template_or_are_recorded() -> None:
    """Each form of asking for thoughts, or for none, by a model that may think, and by
    one that cannot.
    """
    ask = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
    off, kwargs = "<think>\n\n</think>\n\n", "chat_template_kwargs"
    wishes: list[tuple[str, Json, bool, str]] = [
        ("", {"enable_thinking": False}, True, ""),
        ("", {"reasoning_effort": "none"}, True, ""),
        ("", {"reasoning_effort": "high"}, False, "reasoning_effort"),
        ("", {kwargs: {"depth": 1}}, False, f"{kwargs}.depth"),
        ("", {"reasoning": {"effort": "high"}}, False, "reasoning.effort"),
        ("", {"thinking": {"type": "disabled"}}, True, ""),
        ("/messages", {"thinking": {"type": "disabled"}}, True, ""),
        ("/messages", {"thinking": {"type": "adaptive"}}, False, ""),
        (
            "/messages",
            {"thinking": {"type": "enabled", "budget_tokens": 9}},
            False,
            "thinking.budget_tokens",
        ),
        ("/messages", {"output_config": {"effort": "low"}}, False, "output_config.effort"),
    ]
    of, plain = Script([SAYS], codec=codec("qwen")), Script(["It is 5."], codec=codec("tools"))
    async with (
        gateway(of, of=codec("qwen")) as (server, client),
        gateway(plain) as (other, without),
    ):
        for path, wish, is_off, unread in wishes:
            body = {**ask, **wish, "max_tokens": 400}
            status, answer = await client.post(body, path=path or "/chat/completions")
            assert status == 200, answer
            assert codec("qwen").decode(of.requests[-1][1]).endswith(off) is is_off
            assert (
                unread in [each.field for each in server.session("s").ignored.entries()]
                or not unread
            )
            assert (await without.post(body, path=path or "/chat/completions"))[0] == 200
        recorded = {each.field: each.requests for each in other.session("s").ignored.entries()}
        assert recorded["thinking"] == 2  # adaptive and enabled: a model that cannot think
        assert "thoughts" not in recorded


@settings(max_examples=examples(200))
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "\n", "a", " b", CALL, "é"]), max_size=8),
    st.booleans(),
    st.data(),
)
def test_a_stream_adds_up_to_the_message(
    parts: list[str], opened: bool, data: st.DataObject
) -> None:
    of = codec("tools")
    thinking = Thinking(first="<think>", last="</think>", opened=opened)
    tokens = encode("".join(parts))
    result = engine_result(tokens)
    message, shown = read_turn(of, of.tool_format, result, number=0, stop=(), thinking=thinking)
    reader = DeltaReader(of, call_start="<tool_call>", thinking=thinking)
    deltas = []
    for end in sorted(data.draw(st.sets(st.integers(0, len(tokens))))):
        deltas += reader.read(tokens[:end], result.logprobs[:end])
    sent = "".join(each.thoughts for each in deltas), "".join(each.text for each in deltas)
    assert message.thoughts.startswith(sent[0])
    assert message.content.startswith(sent[1])
    deltas += reader.finish(result, shown)
    assert "".join(each.thoughts for each in deltas) == message.thoughts
    if not message.tool_calls:
        assert "".join(each.text for each in deltas) == message.content


def test_no_part_of_the_first_mark_is_shown_while_it_is_sampled() -> None:
    of, tokens = codec("tools"), encode("<think>")
    reader = DeltaReader(of, thinking=Thinking(first="<think>", last="</think>"))
    for end in range(len(tokens) + 1):
        assert [each.text for each in reader.read(tokens[:end], [-1.0] * end)] == []


@given(st.text())
def test_sealed_thoughts_are_unsealed_and_nothing_else_is(text: str) -> None:
    assert unseal(seal(text)) == text
    assert unseal(text) is None or text.startswith(SEAL)
    assert unseal(seal(text)[:-3]) is None
