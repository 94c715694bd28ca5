"""Tools of OpenAI's Responses API, which the agent sees as functions: groups of
functions (`namespace`), tools that take free text (`custom`), and tools that clients
know without a declaration (`local_shell`, `shell`, `apply_patch`). Pure.

Invariant: an item that a client sends back is the call from which it was made:
`item_of` and `call_of` are inverse to each other up to the spacing of JSON.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from rollweave.io.http.messages import OpenModel, other_than
from rollweave.rollout.gateway.fields import Reading, bad
from rollweave.rollout.gateway.requests import TOOL_NAME, ToolKind, leave_tool
from rollweave.rollout.gateway.responses import Json
from rollweave.schema.chat import ToolCall

TEXT: Final[Json] = {"type": "string"}
TEXTS: Final[Json] = {"type": "array", "items": TEXT}
NUMBER: Final[Json] = {"type": "number"}


def _function(name: str, description: str, required: Json, **optional: Json) -> Json:
    parameters = {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
    }
    return {"name": name, "description": description, "parameters": parameters}


BUILT_IN: Final[Mapping[str, Json]] = {
    "local_shell": _function(
        "local_shell",
        "Run a command, given as a list of its words, and return its output.",
        {"command": TEXTS},
        working_directory=TEXT,
        timeout_ms=NUMBER,
    ),
    "shell": _function(
        "shell",
        "Run commands in a shell, and return their output.",
        {"commands": TEXTS},
        timeout_ms=NUMBER,
        max_output_length=NUMBER,
    ),
    "apply_patch": _function(
        "apply_patch",
        "Create, update or delete a file; `diff` is a V4A diff, which a deletion lacks.",
        {"type": {"enum": ["create_file", "update_file", "delete_file"]}, "path": TEXT},
        diff=TEXT,
    ),
}
"""Type of a tool that the client runs → its declaration, which requests lack."""

WITHIN: Final = {"local_shell": "action", "shell": "action", "apply_patch": "operation"}
"""Type of a tool without a declaration → the field of its call that has the arguments.
"""

CALLS: Final = {
    "function_call": "function",
    "custom_tool_call": "custom",
    **{f"{kind}_call": kind for kind in BUILT_IN},
}
"""Type of an item that is a call → the kind of its tool."""

OUTPUTS: Final = frozenset(f"{kind}_output" for kind in CALLS)
"""Types of the items that are results of calls."""

SEPARATOR: Final = "."
"""Stands between a namespace and the name of a function in it."""


class CallItem(OpenModel):
    type: Literal[
        "function_call",
        "custom_tool_call",
        "local_shell_call",
        "shell_call",
        "apply_patch_call",
    ]
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None


class _Member(OpenModel):
    type: str = Field(max_length=64)
    name: str | None = Field(None, pattern=TOOL_NAME)


class _Function(OpenModel):
    type: Literal["function"]
    name: str = Field(pattern=TOOL_NAME)


class _Custom(OpenModel):
    type: Literal["custom"]
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    format: dict[str, Any] | None = None


class _Namespace(OpenModel):
    type: Literal["namespace"]
    name: str = Field(pattern=TOOL_NAME)
    tools: Annotated[list[_Member], Field(fail_fast=True)]


class _OtherTool(OpenModel):
    type: other_than("function", "custom", "namespace")  # type: ignore[valid-type]


Tool = _Function | _Custom | _Namespace | _OtherTool


class Tools:
    """The tools of one request: `declarations` in OpenAI's form of functions, as JSON,
    and their `kinds`, by the names that the agent knows.
    """

    def __init__(self) -> None:
        self.declarations: list[str] = []
        self.names: list[str] = []
        self.kinds: dict[str, ToolKind] = {}

    def add(self, function: Mapping[str, Any], kind: ToolKind) -> None:
        """Add a tool that the agent knows as this function."""
        name = function["name"]
        self.names.append(name)
        if kind.kind != "function" or kind.namespace:
            self.kinds[name] = kind
        declaration = {"type": "function", "function": dict(function)}
        self.declarations.append(json.dumps(declaration, ensure_ascii=False))


def read_tools(tools: Sequence[Any], reading: Reading) -> Tools:
    """Return the tools that the agent can call; tools that OpenAI's servers run are
    left out. Raises RequestError.
    """
    found = Tools()
    for place, tool in enumerate(tools):
        fields = tool.model_dump(exclude_unset=True)
        kind = fields.pop("type")
        if kind == "function":
            found.add(fields, ToolKind(name=tool.name))
        elif kind == "custom":
            found.add(_free_text(tool), ToolKind(kind="custom", name=tool.name))
        elif kind == "namespace":
            for function, name in _grouped(tool, f"tools.{place}", reading):
                found.add(function, ToolKind(name=name, namespace=tool.name))
        elif kind in BUILT_IN:
            environment = (tool.model_extra or {}).get("environment")
            if isinstance(environment, dict) and environment.get("type") != "local":
                leave_tool(reading, place, f"{kind} in {environment.get('type')}")
                continue
            found.add(BUILT_IN[kind], ToolKind(kind=kind, name=kind))
        else:
            leave_tool(reading, place, kind)
    return found


def _free_text(tool: Any) -> Json:
    """Return the function that takes the text of a tool as its `input`."""
    description = str(tool.description or "")
    form = tool.format or {}
    if form.get("type") == "grammar":
        grammar = f"The input must match this {form.get('syntax')} grammar:"
        description = f"{description}\n\n{grammar}\n{form.get('definition')}".strip()
    return _function(tool.name, description, {"input": TEXT})


def _grouped(tool: Any, path: str, reading: Reading) -> Iterator[tuple[Json, str]]:
    """Yield the functions of a namespace, and their names in it."""
    for place, member in enumerate(tool.tools):
        if member.type != "function":
            field = f"{path}.tools.{place}.type"
            reading.leave(field, member.type, "must be function", action="left out")
            continue
        if member.name is None:
            raise bad(f"{path}.tools.{place}.name", "must be given", None)
        fields = member.model_dump(exclude_unset=True)
        del fields["type"]
        yield {**fields, "name": f"{tool.name}{SEPARATOR}{member.name}"}, member.name


def item_of(call: ToolCall, kinds: Mapping[str, ToolKind]) -> Json:
    """Return a call of the agent as an item of the API."""
    kind = kinds.get(call.name, ToolKind(name=call.name))
    item = {"call_id": call.id, "status": "completed"}
    match kind.kind:
        case "function":
            item |= {"id": f"fc_{call.id}", "type": "function_call", "name": kind.name}
            item |= {"arguments": call.arguments}
            return {**item, "namespace": kind.namespace} if kind.namespace else item
        case "custom":
            item |= {"id": f"ctc_{call.id}", "type": "custom_tool_call", "name": kind.name}
            return {**item, "input": _input_of(call.arguments)}
    arguments = json.loads(call.arguments)
    if kind.kind == "local_shell":
        arguments = {"type": "exec", "env": {}, **arguments}
    item |= {"id": f"{kind.kind}_{call.id}", "type": f"{kind.kind}_call"}
    return {**item, WITHIN[kind.kind]: arguments}


def call_of(item: Mapping[str, Any], kinds: Mapping[str, ToolKind]) -> ToolCall:
    """Return the call of the agent from which an item was made."""
    kind, id = CALLS[item["type"]], str(item.get("call_id") or item.get("id") or "")
    name, namespace = str(item.get("name") or kind), item.get("namespace")
    if kind == "function":
        full = f"{namespace}{SEPARATOR}{name}"
        name = full if namespace and full in kinds else name
        return ToolCall(id=id, name=name, arguments=str(item.get("arguments", "{}")))
    if kind == "custom":
        arguments: Any = {"input": item.get("input", "")}
    else:
        arguments = item.get(WITHIN[kind]) or {}
        if kind == "local_shell":
            neutral: Json = {"type": "exec", "env": {}, "user": None}
            arguments = {
                name: value
                for name, value in arguments.items()
                if value is not None and neutral.get(name, ...) != value
            }
    return ToolCall(id=id, name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def _input_of(arguments: str) -> str:
    """Return the text of a call of a custom tool: its `input`, or the agent's whole
    text if there is no `input`.
    """
    value = json.loads(arguments)
    text = value.get("input") if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else arguments
