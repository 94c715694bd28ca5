"""The loop of an agent with tools: it replies, its calls are validated and run, and it
receives the answers, until it calls nothing.

Invariants: calls run in their order, one at a time, and each gets one answer, up to the
first final answer; an invalid call is reported to the agent and raises nothing;
failures that the agent did not cause (a lost sandbox, `LimitError`, a bug of the tool)
are raised. The tools decide the length of answers: the built-in ones
(`envs/handlers/toolbox.py`) are bounded.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rollweave.envs.handlers.base import Agent, Tool
from rollweave.io.extras import from_extra
from rollweave.schema.base import DEPTH, is_deep
from rollweave.schema.chat import Message, ToolCall
from rollweave.schema.errors import SandboxRefusedError

with from_extra("tools"):
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.protocols import Validator
    from jsonschema.validators import validator_for
    from referencing import Registry

CallStyle = Literal["native", "text"]
"""Style in which the agent calls tools: as its chat template says, or in fenced blocks,
for models whose template shows no tools.
"""

MAX_CALLS = 16
"""Maximum calls in one message. More calls indicate a model that repeats itself."""

MAX_FAULTS = 3
"""Maximum faults of one call that are reported: the agent corrects the reported faults
first.
"""

FAULT_CHARS = 300
"""Maximum characters of one fault: it quotes the argument."""

ARGUMENT_BYTES = 1 << 20
"""Maximum bytes of a call's arguments: a sandbox accepts no more."""

_FENCE = "```"


class Final(str):
    """A tool's answer after which the loop ends."""

    __slots__ = ()


async def converse(
    agent: Agent,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    calls: CallStyle = "native",
) -> tuple[Message, ...]:
    """Let the agent continue from `messages` until it calls no tool, or a tool's answer
    is `Final`. Return all messages.

    With `calls = "text"`, a fenced block with a tool's name calls the tool. A message
    may have one such block, and the answer is a user's message. The first messages have
    to explain this (`text_call_instructions`). Raises LimitError, SandboxError;
    ValueError for tools that cannot be offered.
    """
    known = {tool.name: (tool, _checker(tool)) for tool in tools}
    if len(known) < len(tools):
        raise ValueError(
            f"tools must have distinct names, got {', '.join(tool.name for tool in tools)}"
        )
    fields = {tool.name: _text_field(tool) for tool in tools} if calls == "text" else {}
    history = list(messages)
    while True:
        reply = await agent.chat(history, tools=tools if calls == "native" else ())
        history.append(reply)
        done = True
        if calls == "text":
            text_call = _call_in_text(reply.content, fields)
            if text_call is not None:
                answer = (
                    text_call if isinstance(text_call, str) else await _answer(known, text_call)
                )
                history.append(Message(role="user", content=answer))
                done = isinstance(answer, Final)
        else:
            for number, call in enumerate(reply.tool_calls):
                if number < MAX_CALLS:
                    answer = await _answer(known, call)
                else:
                    answer = f"Not run: a message may have at most {MAX_CALLS} calls."
                history.append(
                    Message(role="tool", content=answer, tool_call_id=call.id, name=call.name)
                )
                done = isinstance(answer, Final)
                if done:
                    break
        if done:
            return tuple(history)


def text_call_instructions(tools: Sequence[Tool]) -> str:
    """Return the instructions that a prompt must have if calls are fenced blocks.

    Raises ValueError as `converse` does.
    """
    lines = [
        "To use a tool, write one block like this and end your message; its output is sent "
        f"to you:\n{_FENCE}TOOL"
    ]
    lines += [f"TEXT\n{_FENCE}", "Where TOOL is one of:"]
    for tool in tools:
        field = _text_field(tool)
        lines.append(
            f"- {tool.name}{f' (TEXT is the {field})' if field else ' (TEXT is empty)'}: "
            f"{tool.description}"
        )
    return "\n".join([*lines, "A message without such a block is your last."])


def fenced_blocks(text: str) -> tuple[list[tuple[str, str]], str]:
    """Return fenced blocks as `(language, body)`, and the language of a block that is
    not closed ("" if all are closed).

    A fence is a line that begins with three backquotes. Only a fence without a language
    closes a block, so that a body may show other fences.
    """
    blocks: list[tuple[str, str]] = []
    language, body = "", [""]
    for line in text.split("\n"):
        mark = line.strip()
        if not language:
            name = mark.removeprefix(_FENCE).strip()
            if mark.startswith(_FENCE) and name and "`" not in name:
                language, body = name, []
        elif mark == _FENCE:
            blocks.append((language, "\n".join(body)))
            language = ""
        else:
            body.append(line)
    return blocks, language


def _call_in_text(text: str, fields: Mapping[str, str]) -> ToolCall | str | None:
    """Return the call in a message, or what is wrong with it; None without a call."""
    blocks, unclosed = fenced_blocks(text)
    calls = [(name, body) for name, body in blocks if name in fields]
    if unclosed in fields:
        return f"Nothing was run: the block {unclosed} does not end with a line of {_FENCE}."
    if len(calls) > 1:
        return (
            "Nothing was run: a message may have one block that calls a tool, and this has "
            f"{len(calls)}."
        )
    if not calls:
        return None
    name, body = calls[0]
    return ToolCall(name=name, arguments=json.dumps({fields[name]: body} if fields[name] else {}))


async def _answer(known: Mapping[str, tuple[Tool, Validator]], call: ToolCall) -> str:
    if call.name not in known:
        return f"There is no tool {call.name!r:.100}. The tools are: {', '.join(known) or 'none'}."
    tool, checker = known[call.name]
    if (size := len(call.arguments.encode(errors="replace"))) > ARGUMENT_BYTES:
        return (
            f"The arguments of {tool.name} must have at most {ARGUMENT_BYTES} bytes, and have "
            f"{size}."
        )
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError) as error:
        return f"The arguments of {tool.name} are not JSON: {error!s:.{FAULT_CHARS}}"
    if is_deep(arguments):
        return f"The arguments of {tool.name} must be at most {DEPTH} levels deep."
    errors = itertools.islice(checker.iter_errors(arguments), MAX_FAULTS + 1)
    faults = [f"{error.json_path}: {error.message:.{FAULT_CHARS}}" for error in errors]
    if not isinstance(arguments, dict):
        faults = [f"$: must be an object, got {arguments!r:.{FAULT_CHARS}}"]
    elif not faults and (
        wrong := [name for name, value in arguments.items() if not _can_be_sent(value)]
    ):
        faults = [f"$.{wrong[0]}: is no Unicode text"]
    if faults:
        more = ["and more"] if len(faults) > MAX_FAULTS else []
        return "\n".join([f"The arguments of {tool.name} do not fit:", *faults[:MAX_FAULTS], *more])
    try:
        return await tool.call(arguments)
    except SandboxRefusedError as error:
        return f"Refused: {error}"


def _can_be_sent(value: object) -> bool:
    """Return whether all text in the value is valid. Half of a surrogate pair, which
    JSON can escape, is invalid.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except ValueError:
        return False
    return True


def _checker(tool: Tool) -> Validator:
    kind: type[Validator] = validator_for(tool.parameters, default=Draft202012Validator)
    try:
        kind.check_schema(tool.parameters)
    except SchemaError as error:
        raise ValueError(
            f"tool {tool.name!r} must have a JSON schema of its parameters: {error.message}"
        ) from error
    registry: Registry[Any] = Registry()  # empty, so that no reference is fetched
    return kind(tool.parameters, registry=registry)


def _text_field(tool: Tool) -> str:
    """Return the parameter whose value is a block's body; "" if the tool takes none."""
    needed = list(tool.parameters.get("required", ()))
    kinds = [tool.parameters["properties"][name].get("type") for name in needed]
    if kinds not in ([], ["string"]):
        raise ValueError(
            f"tool {tool.name!r} must need one text at most to be called by a block, "
            f"needs {', '.join(needed)}"
        )
    return needed[0] if needed else ""
