"""Anthropic's client, unchanged, against the gateway: whole answers and streams, tools,
structured output, and one sequence where it resends its history.
"""

import json
from typing import TYPE_CHECKING, Any

import pytest

from rollweave.rollout.gateway.anthropic_messages import MessagesApi
from rollweave.schema.serving import FinishReason
from tests.support.scripted_gateway import (
    CALL,
    CODEC,
    Client,
    Script,
    check_refusal,
    encode,
    engine_result,
    gateway,
    refusing,
)

if TYPE_CHECKING:  # seconds, and in the tests alone
    from anthropic import AsyncAnthropic

TOOL: Any = {
    "name": "add",
    "description": "The sum of two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    },
    "cache_control": {"type": "ephemeral"},
}
USER: Any = {"role": "user", "content": "hi"}
ASK: dict[str, Any] = {"model": "any", "max_tokens": 400}


def anthropic_client(client: Client) -> "AsyncAnthropic":
    from anthropic import AsyncAnthropic

    return AsyncAnthropic(
        base_url=client.url + client.access.path.removesuffix("/v1"),
        api_key=client.access.token,
        max_retries=0,
        timeout=60.0,
    )


async def answer(api: "AsyncAnthropic", streamed: bool, **asked: Any) -> Any:
    if not streamed:
        return await api.messages.create(**ASK, **asked)
    async with api.messages.stream(**ASK, **asked) as stream:
        text = "".join([part async for part in stream.text_stream])
        message = await stream.get_final_message()
    assert text == "".join(block.text for block in message.content if block.type == "text")
    return message


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_with_a_tool_is_one_sequence(streamed: bool) -> None:
    script = Script([f"I add. {CALL}", "It is 5.", "Bye."])
    async with gateway(script) as (server, client), anthropic_client(client) as api:
        history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "2 + 3?"}]}]
        first = await answer(
            api, streamed, system="Add with the tool.", messages=history, tools=[TOOL]
        )
        assert (first.stop_reason, first.role) == ("tool_use", "assistant")
        text, use = first.content
        assert (text.text, use.name, use.input) == ("I add.", "add", {"a": 2, "b": 3})
        assert first.usage.output_tokens == sum(server.sequences("s")[0].output_mask())
        assert first.usage.input_tokens + first.usage.cache_read_input_tokens == len(
            script.requests[0][1]
        )
        history += [
            {"role": "assistant", "content": first.content},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": use.id, "content": "5"},
                    {"type": "text", "text": "So?"},
                ],
            },
        ]
        second = await answer(
            api,
            streamed,
            system=[{"type": "text", "text": "Add with the tool."}],
            messages=history,
            tools=[TOOL],
        )
        assert (second.stop_reason, second.content[0].text) == ("end_turn", "It is 5.")
        history += [
            {"role": "assistant", "content": second.content},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": use.id,
                        "is_error": True,
                        "content": [{"type": "text", "text": "no"}],
                    }
                ],
            },
        ]
        await answer(api, streamed, system="Add with the tool.", messages=history, tools=[TOOL])
        (sequence,) = server.close("s").sequences
    shown = CODEC.decode(sequence.tokens)
    assert "Add with the tool." in shown
    assert '"parameters": {"type": "object"' in shown
    assert "cache_control" not in shown
    assert "<tool_response>\n5\n</tool_response>" in shown
    assert "<|im_start|>user\nSo?<|im_end|>" in shown
    assert "<tool_response>\nError: no\n</tool_response>" in shown
    assert len(sequence.turns) == 3


async def test_why_a_turn_ended() -> None:
    script = Script(
        [
            "one two three",
            engine_result(encode("cut"), finish=FinishReason.LENGTH),
            engine_result(CODEC.encode_turn("")),
        ]
    )
    async with gateway(script) as (_, client), anthropic_client(client) as api:
        stopped = await api.messages.create(**ASK, messages=[USER], stop_sequences=["x", " three"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " three")
        assert stopped.content[0].text == "one two"  # type: ignore[union-attr]
        cut = await api.messages.create(**ASK, messages=[USER])
        assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
        empty = await api.messages.create(**ASK, messages=[USER])
        assert (empty.content, empty.stop_reason) == ([], "end_turn")
        said = [USER, {"role": "assistant", "content": []}, USER]
        await api.messages.create(**ASK, messages=said)  # type: ignore[arg-type]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "weight": 1}]}]},
        "messages.0.content.0.weight",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}],
                }
            ]
        },
        "messages.0.content.0.type",
    ),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools.0.defer_loading"),
    ({"tool_choice": {"type": "any"}}, "tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"top_k": -1}, "top_k"),
    ({"surprise": 1}, "surprise"),
]


@pytest.mark.parametrize(("change", "param"), WRONG)
def test_refusals_name_field_rule_and_value(change: dict[str, Any], param: str) -> None:
    check_refusal(MessagesApi(CODEC).parse, {**ASK, "messages": [USER], **change}, param)


def test_fields_without_effect_have_none() -> None:
    api = MessagesApi(CODEC)
    plain = {**ASK, "messages": [USER]}
    more = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "thinking": {"type": "disabled"},
        "cache_control": {"type": "ephemeral"},
    }
    assert refusing(api.parse(json.dumps(plain | more).encode())) == refusing(
        api.parse(json.dumps(plain).encode())
    )


async def test_a_tool_must_be_called_and_errors_have_anthropics_form() -> None:
    from anthropic import AuthenticationError, BadRequestError

    script = Script([engine_result(CODEC.encode_turn(CALL))])
    session = {"unreadable": "refuse"}
    async with gateway(script, session=session) as (_, client), anthropic_client(client) as api:
        choice: Any = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
        called = await api.messages.create(**ASK, messages=[USER], tools=[TOOL], tool_choice=choice)
        assert called.content[0].input == {"a": 2, "b": 3}  # type: ignore[union-attr]
        assert "</tool_call>" in script.requests[0][2].stop
        with pytest.raises(BadRequestError, match=r"output_config\.effort must be null"):
            await api.messages.create(**ASK, messages=[USER], output_config={"effort": "high"})
        other = api.with_options(api_key="wrong")
        with pytest.raises(AuthenticationError, match="token must be that of"):
            await other.messages.create(**ASK, messages=[USER])
        status, body = await client.post({}, path="/messages")
        assert (status, body["type"]) == (400, "error")
        assert body["error"]["type"] == "invalid_request_error"
