"""The grammar of a turn that must call a tool, or whose calls must have the form of
their tools' parameters. Pure.

Calls are written as the model's template tells it to, with arguments in the spelling of
`json.dumps`. Everything that a constrained turn samples is its output, as in an answer
of a given form (docs/GATEWAY.md#calls-of-a-given-form).
"""

import json
from collections.abc import Iterator
from typing import Any, Final

from rollweave.engine.matchers import rule_of
from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.chat.tools import ToolFormat
from rollweave.rollout.gateway.formats import of_schema
from rollweave.rollout.gateway.refusals import bad
from rollweave.rollout.gateway.requests import ChatRequest
from rollweave.schema.serving import Constraint

NO_ARGUMENTS: Final[dict[str, Any]] = {"type": "object", "additionalProperties": False}
"""The schema of a tool that declares no parameters."""

SPELLING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""llguidance's spelling of arguments: with no other white space than `json.dumps`, so
that a call cannot end in a run of blanks.
"""

CLOSED_BY: Final = ("additionalProperties", "patternProperties")
COMBINED_BY: Final = ("allOf", "if", "dependentSchemas", "unevaluatedProperties")
"""Keywords that decide which further properties an object may have, and keywords that
combine the properties of several schemas in one object.
"""


VALUES: Final = ("const", "default", "enum", "examples")
"""Keywords whose values are not schemas."""


def call_constraint(chat: ChatRequest, tools: ToolFormat, codec: TextCodec) -> Constraint | None:
    """Return the constraint of a turn that may call tools; None for a free turn. A turn
    that must call a tool consists of calls alone. Otherwise it is free up to its first
    call, if the form of its answer is free. Raises RequestError for parameters that are
    not a schema.
    """
    functions = _functions(chat)
    strict = any(function.get("strict") is True for function in functions)
    if chat.call is None and chat.constraint is None and not strict:
        return None
    rules, names = list[str](), list[str]()
    begins = chat.call is None and chat.constraint is None
    for number, function in enumerate(functions):
        if chat.call and function["name"] != chat.call:
            continue
        schema = _schema(function, chat.call is not None, f"tools.{number}")
        before, after = tools.call_around(function["name"])
        before = before.removeprefix(tools.call_start) if begins else before
        names.append(f"call_{number}")
        rules.append(
            f"call_{number}: {_literal(codec, before)} args_{number} {_literal(codec, after)}\n"
            f"args_{number}: %json {schema}"
        )
    start = _free(codec, tools.call_start) if begins else _bound(chat)
    text = "\n".join((*start, f"call: {' | '.join(names)}", *rules))
    return Constraint(kind="lark", text=text)


def parts_of(chat: ChatRequest) -> Iterator[tuple[str, Constraint]]:
    """Yield the constraint of each tool's calls, with the field that declares it."""
    for number, function in enumerate(_functions(chat)):
        if not chat.call or function["name"] == chat.call:
            schema = _schema(function, chat.call is not None, f"tools.{number}")
            yield f"tools.{number}.function.parameters", of_schema(schema)


def _functions(chat: ChatRequest) -> list[dict[str, Any]]:
    return [json.loads(tool)["function"] for tool in chat.tools]


def _free(codec: TextCodec, mark: str) -> Iterator[str]:
    """Yield the first rules of a free turn, in which `mark` begins a call: the rule
    `call` follows the mark.
    """
    match codec.pieces(mark):
        case [int(token)]:
            yield f"start: (text <[{token}]> call)* text"
            yield f"text: <[^{token}]>*"
        case _:
            yield "start: (begun call)* text"
            yield "text: /(?s:.*)/"
            yield f"begun[lazy]: /(?s:.*)/ {json.dumps(mark)}"


def _bound(chat: ChatRequest) -> Iterator[str]:
    """Yield the first rules of a turn that consists of calls, or of an answer that must
    have a form.
    """
    calls = 'call ("\\n"? call)*'
    if chat.call is not None or chat.constraint is None:
        yield f"start: {calls}"
        return
    yield "start: calls | answer"
    yield f"calls: {calls}"
    yield f"answer: {rule_of(chat.constraint)}"


def _schema(function: dict[str, Any], must_call: bool, path: str) -> str:
    """Return the schema of a tool's arguments: the tool's parameters if a call is
    forced or the tool is strict, else any object.
    """
    if not must_call and function.get("strict") is not True:
        return json.dumps({"type": "object", "x-guidance": SPELLING})
    given = function.get("parameters")
    schema = NO_ARGUMENTS if given is None else given
    if not isinstance(schema, dict):
        raise bad(f"{path}.function.parameters", "must be a JSON schema of an object", given)
    return json.dumps({"type": "object", **_closed(schema), "x-guidance": SPELLING})


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects have only the named properties, unless the schema
    says otherwise: a model that invents more properties may never come to an end.
    """
    if any(f'"{keyword}"' in json.dumps(schema) for keyword in COMBINED_BY):
        return schema

    def close(part: Any) -> Any:
        if isinstance(part, list):
            return [close(item) for item in part]
        if not isinstance(part, dict):
            return part
        inner = {name: value if name in VALUES else close(value) for name, value in part.items()}
        named = isinstance(part.get("properties"), dict) and part.get("type") == "object"
        if named and not any(keyword in part for keyword in CLOSED_BY):
            inner["additionalProperties"] = False
        return inner

    closed: dict[str, Any] = close(schema)
    return closed


def _literal(codec: TextCodec, text: str) -> str:
    """Return a text in the grammar's form. Its added tokens are named by their ids: a
    grammar's letters never match them.
    """
    return " ".join(
        f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece, ensure_ascii=False)
        for piece in codec.pieces(text)
    )
