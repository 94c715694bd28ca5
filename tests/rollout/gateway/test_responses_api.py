"""OpenAI's client, unchanged, with the Responses API of the gateway: whole answers and
streams, tools, structured output, and one sequence where it resends its items.
"""

import json
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from rollweave.rollout.gateway.openai_responses import ResponsesApi
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
)

TOOL: Any = {
    "type": "function",
    "name": "add",
    "description": "The sum of two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": True,
}
ASK: dict[str, Any] = {"model": "any", "max_output_tokens": 400}


def openai_client(client: Client) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=client.base_url, api_key=client.access.token, max_retries=0, timeout=60.0
    )


async def answer(api: AsyncOpenAI, streamed: bool, **asked: Any) -> Any:
    if not streamed:
        return await api.responses.create(**ASK, **asked)
    async with api.responses.stream(**ASK, **asked) as stream:
        events = [event async for event in stream]
        response = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))  # type: ignore[union-attr]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == response.output_text
    return response


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_with_a_tool_is_one_sequence(streamed: bool) -> None:
    script = Script([f"I add. {CALL}", "It is 5.", "Bye."])
    async with gateway(script) as (server, client), openai_client(client) as api:
        items: list[Any] = [{"role": "user", "content": "2 + 3?"}]
        fixed: Any = {"instructions": "Add with the tool.", "tools": [TOOL]}
        first = await answer(api, streamed, input=items, **fixed)
        assert first.status == "completed"
        message, call = first.output
        assert (message.content[0].text, call.name) == ("I add.", "add")
        assert json.loads(call.arguments) == {"a": 2, "b": 3}
        assert first.usage.output_tokens == sum(server.sequences("s")[0].output_mask())
        items += [item.model_dump(exclude_unset=True) for item in first.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "5"}]
        second = await answer(api, streamed, input=items, **fixed)
        assert second.output_text == "It is 5."
        items += [item.model_dump(exclude_unset=True) for item in second.output]
        part = [{"type": "input_text", "text": "Thanks."}]
        items += [{"role": "user", "content": part, "type": "message"}]
        assert (await answer(api, streamed, input=items, **fixed)).output_text == "Bye."
        (sequence,) = server.close("s").sequences
    shown = CODEC.decode(sequence.tokens)
    assert "Add with the tool." in shown
    assert "<tool_response>\n5\n</tool_response>" in shown
    assert "<|im_start|>user\nThanks.<|im_end|>" in shown
    assert len(sequence.turns) == 3


async def test_limits_and_forced_calls() -> None:
    script = Script(
        [
            engine_result(encode("cut"), finish=FinishReason.LENGTH),
            engine_result(CODEC.encode_turn(CALL)),
        ]
    )
    session = {"unreadable": "refuse"}
    async with gateway(script, session=session) as (_, client), openai_client(client) as api:
        cut = await api.responses.create(**ASK, input="go")
        assert (cut.status, cut.output_text) == ("incomplete", "cut")
        assert cut.incomplete_details.reason == "max_output_tokens"
        choice: Any = {"type": "function", "name": "add"}
        called = await api.responses.create(
            **ASK, input="go", tools=[TOOL], tool_choice=choice, parallel_tool_calls=False
        )
        assert called.output[0].type == "function_call"
        assert "</tool_call>" in script.requests[1][2].stop
        with pytest.raises(BadRequestError, match="previous_response_id must be null"):
            await api.responses.create(**ASK, input="go", previous_response_id=cut.id)
        with pytest.raises(BadRequestError, match=r"reasoning\.effort must be null"):
            await api.responses.create(**ASK, input="go", reasoning={"effort": "low"})


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": [{"type": "web_search_call", "id": "a"}]}, "input.0.type"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "a"}]}, "input.0.type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
    ({"input": [{"role": "user", "content": "x", "weight": 1}]}, "input.0.weight"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0.type"),
    ({"conversation": "c"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"background": True}, "background"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tool_choice": "required"}, "tools"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"surprise": 1}, "surprise"),
]


@pytest.mark.parametrize(("change", "param"), WRONG)
def test_refusals_name_field_rule_and_value(change: dict[str, Any], param: str) -> None:
    check_refusal(ResponsesApi().parse, {**ASK, "input": "go", **change}, param)
