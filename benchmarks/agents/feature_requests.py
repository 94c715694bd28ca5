"""Fields of requests that ask for features, in the terms of each API."""

from typing import Final

from benchmarks.agents.wire import BODIES, USER, Json

SCHEMA: Final[Json] = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}
FUNCTION: Final[Json] = {
    "name": "add",
    "description": "The sum of two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    },
}
TOOLS: Final[dict[str, list[Json]]] = {
    "chat": [{"type": "function", "function": FUNCTION}],
    "responses": [{"type": "function", **FUNCTION}],
    "messages": [
        {
            "name": FUNCTION["name"],
            "description": FUNCTION["description"],
            "input_schema": FUNCTION["parameters"],
        }
    ],
}
WITH_TOOLS: Final = {api: {"tools": tools} for api, tools in TOOLS.items()}
PIXEL: Final = "data:image/png;base64,iVBORw0KGgo="


def in_all(change: Json, *apis: str) -> dict[str, Json]:
    return dict.fromkeys(apis or tuple(BODIES), change)


def user(part: Json) -> Json:
    return {"role": "user", "content": [part]}


def with_surprise(api: str, field: str) -> Json:
    """Return the results of a call, of which the last item has an unknown field."""
    items = RESULTS[api][field]
    return {field: [*items[:2], {**items[2], "surprise": 1}]}


def with_tools(**changes: Json) -> dict[str, Json]:
    return {api: {**WITH_TOOLS[api], **change} for api, change in changes.items()}


ARGUMENTS: Final = '{"a": 2, "b": 3}'
FUNCTION_CALL: Final = {"name": "add", "arguments": ARGUMENTS}
RESULTS: Final[dict[str, Json]] = {
    "chat": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": FUNCTION_CALL}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "5"},
        ]
    },
    "responses": {
        "input": [
            USER,
            {"type": "function_call", "call_id": "c1", **FUNCTION_CALL},
            {"type": "function_call_output", "call_id": "c1", "output": "5"},
        ]
    },
    "messages": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 2, "b": 3}}
                ],
            },
            user({"type": "tool_result", "tool_use_id": "c1", "content": "5"}),
        ]
    },
}
SOURCE: Final = {"type": "base64", "media_type": "image/png", "data": PIXEL.partition(",")[2]}
IMAGES: Final[dict[str, Json]] = {
    "chat": {"messages": [user({"type": "image_url", "image_url": {"url": PIXEL}})]},
    "responses": {"input": [user({"type": "input_image", "image_url": PIXEL})]},
    "messages": {"messages": [user({"type": "image", "source": SOURCE})]},
}


def formats(schema: Json) -> dict[str, Json]:
    """Return the request of an answer in the form of a schema."""
    named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return {
        "chat": {"response_format": named},
        "responses": {
            "text": {"format": {"type": "json_schema", "name": "answer", "schema": schema}}
        },
        "messages": {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        **({"completions": {"response_format": named}} if schema == SCHEMA else {}),
    }
