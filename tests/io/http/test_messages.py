"""Messages in the form of OpenAI's chat API are read with all that a prompt shows, and
refused for whatever no prompt can show.
"""

from typing import Any

import pytest

from rollweave.io.http.fields import UNKNOWN_FIELD
from rollweave.io.http.messages import read_messages
from rollweave.schema.chat import Message, ToolCall

ASKED = {"role": "user", "content": "ask"}


def agent(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "a", **fields}


def called(**fields: Any) -> dict[str, Any]:
    return agent(tool_calls=[{"function": {"name": "look", **fields}}])


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (ASKED, Message(role="user", content="ask")),
        ({"role": "developer", "content": "be"}, Message(role="system", content="be")),
        ({"role": "system", "content": ""}, Message(role="system", content="")),
        ({"role": "assistant"}, Message(role="assistant", content="")),
        (
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
            Message(role="user", content="ab"),
        ),
        (
            {"role": "tool", "content": "12", "tool_call_id": "c1", "name": "look"},
            Message(role="tool", content="12", tool_call_id="c1", name="look"),
        ),
        (
            called(arguments={"x": "é"}) | {"content": None},
            Message(
                role="assistant",
                content="",
                tool_calls=(ToolCall(id="", name="look", arguments='{"x": "é"}'),),
            ),
        ),
        (
            agent(tool_calls=[{"id": "c1", "type": None, "function": {"name": "go"}}]),
            Message(
                role="assistant",
                content="a",
                tool_calls=(ToolCall(id="c1", name="go", arguments="{}"),),
            ),
        ),
        (
            called(arguments=None),
            Message(
                role="assistant",
                content="a",
                tool_calls=(ToolCall(id="", name="look", arguments="{}"),),
            ),
        ),
        (
            agent(reasoning_content="", reasoning="hm", thinking="other"),
            Message(role="assistant", content="a", thoughts="hm"),
        ),
        (
            agent(thinking_blocks=[{"thinking": "h"}, {"type": "x"}, {"thinking": "m"}]),
            Message(role="assistant", content="a", thoughts="hm"),
        ),
        (
            agent(
                reasoning="one, ",
                content=[
                    {"type": "thinking", "thinking": "two, "},
                    {"type": "reasoning", "reasoning": "three"},
                    {"type": "text", "text": "a", "annotations": [1]},
                ],
            ),
            Message(role="assistant", content="a", thoughts="one, two, three"),
        ),
        (ASKED | {"reasoning": "hm", "refusal": "", "id": 3}, Message(role="user", content="ask")),
    ],
)
def test_a_message_is_read(message: dict[str, Any], expected: Message) -> None:
    assert read_messages([ASKED, message], "m") == (Message(role="user", content="ask"), expected)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (3, "m.1: Input should be an object, got 3"),
        ({"role": "user"}, "m.1.content must be text, got None"),
        (
            {"role": "judge", "content": ""},
            "m.1.role: Input should be 'developer', 'system', 'user', 'assistant' or 'tool', "
            "got 'judge'",
        ),
        (ASKED | {"content": 3}, "m.1.content: Input should be a valid string, got 3"),
        (ASKED | {"content": ["a"]}, "m.1.content.0: Input should be an object, got 'a'"),
        (
            ASKED | {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": 5}]},
            "m.1.content.1.type: must have the fields of its type, got 'text'",
        ),
        (
            ASKED | {"content": [{"type": "image_url", "image_url": {}}]},
            "m.1.content.0.type must be text, got 'image_url'",
        ),
        (
            agent(content=[{"type": "thinking", "thinking": 3}]),
            "m.1.content.0.type must be text, got 'thinking'",
        ),
        (
            ASKED | {"content": [{"type": "text", "text": "a", "colour": 1}]},
            f"m.1.content.0.colour {UNKNOWN_FIELD}, got 1",
        ),
        (
            ASKED | {"tool_calls": [{"function": {"name": "go"}}]},
            "m.1.tool_calls must be those of an assistant, got 'user'",
        ),
        (called(name=""), "m.1.tool_calls.0.function.name: String should have at least 1 "),
        (
            called(arguments=3),
            "m.1.tool_calls.0.function.arguments: Input should be a valid string, got 3",
        ),
        (called(strict=True), f"m.1.tool_calls.0.function.strict {UNKNOWN_FIELD}, got True"),
        (
            agent(tool_calls=[{"kind": 1, "function": {"name": "go"}}]),
            f"m.1.tool_calls.0.kind {UNKNOWN_FIELD}, got 1",
        ),
        (ASKED | {"prefix": True}, "m.1.prefix must be false or null: it is not supported, got "),
        (ASKED | {"colour": "x" * 100}, f"m.1.colour {UNKNOWN_FIELD}, got '{'x' * 79}"),
    ],
)
def test_what_no_prompt_shows_is_refused(message: object, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^m") as caught:
        read_messages([ASKED, message], "m")
    assert str(caught.value).startswith(problem)


def test_messages_are_a_list() -> None:
    assert read_messages([], "m") == ()
    with pytest.raises(ValueError, match=r"^m: Input should be a valid list, got {'role'"):
        read_messages(ASKED, "m")
