"""Messages in the form of OpenAI's chat API are read with all that a prompt shows, and
refused for whatever no prompt can show.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from rollweave.io.http.fields import UNKNOWN_FIELD
from rollweave.io.http.messages import read_messages
from rollweave.schema.chat import Message, ToolCall

ASKED = {"role": "user", "content": "ask"}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "annotations": [1]}]
THOUGHTS = [{"type": "thinking", "thinking": "2 "}, {"type": "reasoning", "reasoning": "3"}]


def agent(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "a", **fields}


def calling(*, call: Mapping[str, Any] = MappingProxyType({}), **made: Any) -> dict[str, Any]:
    return agent(tool_calls=[{"function": {"name": "go", **made}, **call}])


def said(arguments: str = "", *, id: str = "", **fields: Any) -> Message:
    """Return the agent's message, with a call if there are arguments."""
    calls = (ToolCall(id=id, name="go", arguments=arguments),) if arguments else ()
    return Message(**{"role": "assistant", "content": "a", "tool_calls": calls, **fields})


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (ASKED | {"reasoning": "hm", "refusal": "", "id": 3}, Message(role="user", content="ask")),
        ({"role": "developer", "content": "be"}, Message(role="system", content="be")),
        ({"role": "system", "content": PARTS}, Message(role="system", content="ab")),
        (
            {"role": "tool", "content": "1", "tool_call_id": "c", "name": "n"},
            Message(role="tool", content="1", tool_call_id="c", name="n"),
        ),
        ({"role": "assistant"}, said(content="")),
        (calling(arguments={"x": "é"}), said('{"x": "é"}')),
        (
            calling(call={"id": "c1", "type": None}) | {"content": None},
            said("{}", id="c1", content=""),
        ),
        (calling(arguments=None), said("{}")),
        (agent(reasoning_content="", reasoning="hm", thinking="other"), said(thoughts="hm")),
        (agent(thinking_blocks=[{"thinking": "h"}, {}, {"thinking": "m"}]), said(thoughts="hm")),
        (agent(reasoning="1 ", content=[*THOUGHTS, PARTS[1]]), said(content="b", thoughts="1 2 3")),
    ],
)
def test_a_message_is_read(message: dict[str, Any], expected: Message) -> None:
    assert read_messages([ASKED, message], "m") == (Message(role="user", content="ask"), expected)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (3, ": Input should be an object, got 3"),
        ({"role": "user"}, ".content must be text, got None"),
        ({"role": "judge"}, ".role: Input should be 'developer', 'system', 'user', 'assistant' or"),
        (ASKED | {"content": 3}, ".content: Input should be a valid string, got 3"),
        (ASKED | {"content": ["a"]}, ".content.0: Input should be an object, got 'a'"),
        (
            ASKED | {"content": [{"type": "image_url"}]},
            ".content.0.type must be text, got 'image_url'",
        ),
        (
            ASKED | {"content": [PARTS[0], PARTS[0] | {"text": 5}]},
            ".content.1.type: must have the fields of its type, got 'text'",
        ),
        (agent(content=[{"type": "thinking", "thinking": 3}]), ".content.0.type must be text, got"),
        (ASKED | {"content": [PARTS[0] | {"x": 1}]}, f".content.0.x {UNKNOWN_FIELD}, got 1"),
        (calling() | {"role": "user"}, ".tool_calls must be those of an assistant, got 'user'"),
        (calling(name=""), ".tool_calls.0.function.name: String should have at least 1 "),
        (calling(arguments=3), ".tool_calls.0.function.arguments: Input should be a valid string"),
        (calling(strict=True), f".tool_calls.0.function.strict {UNKNOWN_FIELD}, got True"),
        (calling(call={"kind": 1}), f".tool_calls.0.kind {UNKNOWN_FIELD}, got 1"),
        (ASKED | {"prefix": True}, ".prefix must be false or null: it is not supported, got True"),
        (ASKED | {"x": "x" * 100}, f".x {UNKNOWN_FIELD}, got '{'x' * 79}"),
    ],
)
def test_what_no_prompt_shows_is_refused(message: object, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^m\.1") as caught:
        read_messages([ASKED, message], "m")
    assert str(caught.value).startswith("m.1" + problem)


def test_messages_are_a_list() -> None:
    assert read_messages([], "m") == ()
    with pytest.raises(ValueError, match=r"^m: Input should be a valid list, got {'role'"):
        read_messages(ASKED, "m")
