"""Requests and answers of the gateway's four APIs as their bytes go over the wire."""

import json
from collections.abc import Iterator
from typing import Any, Final

import aiohttp
import msgspec

from benchmarks.agents.scripted import Scripted
from rollweave.schema.base import Struct

Json = dict[str, Any]

PATHS: Final = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "responses": "/responses",
    "messages": "/messages",
}
USER: Final[Json] = {"role": "user", "content": "2 + 3?"}
BODIES: Final[dict[str, Json]] = {
    "chat": {"model": "any", "messages": [USER]},
    "completions": {"model": "any", "prompt": "2 + 3?", "max_tokens": 400},
    "responses": {"model": "any", "input": [USER]},
    "messages": {"model": "any", "messages": [USER], "max_tokens": 400},
}
"""API → the smallest request."""


class Answer(Struct, frozen=True, kw_only=True):
    """An answer, complete or streamed: its text, its calls (name, arguments), and the
    tokens of usage, -1 if it has none. `error` is that of a refusal.
    """

    status: int
    body: Json
    text: str = ""
    calls: tuple[tuple[str, Json], ...] = ()
    output_tokens: int = -1
    ignored: str = ""
    """The fields that the server has ignored, and recorded."""
    parts: int = 0
    """Number of parts of the text of a stream."""

    @property
    def error(self) -> str:
        """The error of a refusal."""
        error: Any = self.body.get("error")
        return str(error["message"]) if isinstance(error, dict) else ""


async def post(gateway: Scripted, api: str, body: Json) -> Answer:
    """Send a request, and read its answer."""
    head = {"Authorization": f"Bearer {gateway.access.token}"}
    url = gateway.base_url + PATHS[api]
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json=body, headers=head) as response,
    ):
        data = await response.read()
        ignored = response.headers.get("X-Rollweave-Ignored", "")
        if response.content_type == "text/event-stream":
            streamed = _streamed(api, list(_events(data)))
            return msgspec.structs.replace(streamed, ignored=ignored)
        answer: Json = json.loads(data)
        if response.status != 200:
            return Answer(status=response.status, body=answer)
        return msgspec.structs.replace(_complete(api, answer), ignored=ignored)


def _events(data: bytes) -> Iterator[Json]:
    for line in data.decode().splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _complete(api: str, body: Json) -> Answer:
    text, calls = "", list[tuple[str, Json]]()
    match api:
        case "chat":
            message = body["choices"][0]["message"]
            text = message["content"] or ""
            functions = [call["function"] for call in message.get("tool_calls", ())]
            calls = [(each["name"], json.loads(each["arguments"])) for each in functions]
        case "completions":
            text = body["choices"][0]["text"]
        case "responses":
            for item in body["output"]:
                if item["type"] == "message":
                    text += item["content"][0]["text"]
                elif item["type"] == "function_call":
                    calls.append((item["name"], json.loads(item["arguments"])))
        case "messages":
            for block in body["content"]:
                if block["type"] == "text":
                    text += block["text"]
                elif block["type"] == "tool_use":
                    calls.append((block["name"], block["input"]))
    usage = body["usage"]
    count = usage.get("completion_tokens", usage.get("output_tokens", -1))
    return Answer(status=200, body=body, text=text, calls=tuple(calls), output_tokens=count)


def _streamed(api: str, events: list[Json]) -> Answer:
    """Return the answer that the events of a stream add up to."""
    match api:
        case "responses":
            whole = _complete(api, events[-1]["response"])
            texts = [each["delta"] for each in events if each["type"].endswith("text.delta")]
            assert "".join(texts) == whole.text, "a stream adds up to its last event"
            return Answer(
                status=200,
                body=whole.body,
                text=whole.text,
                calls=whole.calls,
                output_tokens=whole.output_tokens,
                parts=len(texts),
            )
        case "messages":
            return _message_stream(events)
    choices = [each["choices"][0] for each in events if each["choices"]]
    deltas = [choice.get("delta") or {"content": choice.get("text")} for choice in choices]
    texts = [delta["content"] for delta in deltas if delta.get("content")]
    calls: dict[int, list[str]] = {}
    for part in (part for delta in deltas for part in delta.get("tool_calls", ())):
        name, arguments = calls.setdefault(part["index"], ["", ""])
        function = part["function"]
        arguments += function.get("arguments", "")
        calls[part["index"]] = [name + function.get("name", ""), arguments]
    usage: Json = next((each["usage"] for each in events[::-1] if each.get("usage")), {})
    return Answer(
        status=200,
        body={"choices": choices},
        text="".join(texts),
        calls=tuple((name, json.loads(arguments)) for name, arguments in calls.values()),
        output_tokens=usage.get("completion_tokens", -1),
        parts=len(texts),
    )


def _message_stream(events: list[Json]) -> Answer:
    deltas = [each["delta"] for each in events if each["type"] == "content_block_delta"]
    texts = [each["text"] for each in deltas if each["type"] == "text_delta"]
    starts = [each["content_block"] for each in events if each["type"] == "content_block_start"]
    names = [each["name"] for each in starts if each["type"] == "tool_use"]
    inputs = [each["partial_json"] for each in deltas if each["type"] == "input_json_delta"]
    usage = next(each["usage"] for each in events if each["type"] == "message_delta")
    return Answer(
        status=200,
        body={"events": events},
        text="".join(texts),
        calls=tuple((name, json.loads(text)) for name, text in zip(names, inputs, strict=True)),
        output_tokens=usage["output_tokens"],
        parts=len(texts),
    )
