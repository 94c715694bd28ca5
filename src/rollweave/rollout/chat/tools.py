"""Tool calls in the agent's own words: how a family of models writes them, and how they
are read.

Invariants: reading is a function of the text alone and never fails: whatever is not
wholly a well-formed call stays text, so nothing that the agent said is lost. What was
sampled is not touched by it: a call is a view of the tokens.
"""

import json
from collections.abc import Sequence
from typing import Any, Final, NoReturn, Protocol

from rollweave.schema.base import Struct
from rollweave.schema.chat import ToolCall


class Speech(Struct, frozen=True, kw_only=True):
    """A turn as read: the words outside of calls, and the calls (without ids) in order."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()


class ToolFormat(Protocol):
    """How a family of models calls tools."""

    def read(self, text: str) -> Speech:
        """The calls of a turn's text.

        All of it is content where one of them is malformed.
        """

    def opening(self, name: str = "") -> str:
        """The words with which a call begins, of tool `name` if given: put into the
        agent's mouth, it has to call.
        """

    @property
    def closing(self) -> str:
        """The words that end a call: a turn that stops there has a single one."""


class Hermes:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them:
    Hermes, Qwen 2.5 and 3, and others.

    The last call may lack its closing mark where its JSON is whole.
    """

    MARK: Final = "<tool_call>"
    closing: Final = "</tool_call>"

    def read(self, text: str) -> Speech:
        calls: list[ToolCall] = []
        outside, rest, more = text.partition(self.MARK)
        while rest:
            try:
                value, end = _JSON.raw_decode(more, len(more) - len(more.lstrip()))
                calls.append(_call(value))
            except (ValueError, RecursionError):
                return Speech(content=text)
            tail = more[end:].lstrip()
            if tail and not tail.startswith(self.closing):
                return Speech(content=text)
            between, rest, more = tail.removeprefix(self.closing).partition(self.MARK)
            outside += between
        return Speech(content=outside.strip() if calls else text, tool_calls=tuple(calls))

    def opening(self, name: str = "") -> str:
        return (
            f'{self.MARK}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments":'
            if name
            else f"{self.MARK}\n"
        )


def calls_of(template: str) -> ToolFormat | None:
    """The format that a chat template tells its model to write, by the marks in its
    source; None for one we do not know.
    """
    return Hermes() if Hermes.MARK in template else None


def call_gist(calls: Sequence[ToolCall]) -> tuple[tuple[str, str], ...]:
    """Equal for equal calls, however their JSON is spaced and ordered, whatever their
    ids.
    """
    return tuple((call.name, _canonical(call.arguments)) for call in calls)


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _call(value: Any) -> ToolCall:
    """Raises ValueError for what is no call."""
    if not isinstance(value, dict):
        raise ValueError(f"a call must be an object, got {value!r:.80}")
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError(f"a call must have a name and an object of arguments, got {value!r:.80}")
    source = json.dumps(arguments, ensure_ascii=False)
    # half a surrogate pair is a ValueError: no client could send it back
    f"{name}{source}".encode()
    return ToolCall(name=name, arguments=source)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


_JSON = json.JSONDecoder(parse_constant=_no_constant)
