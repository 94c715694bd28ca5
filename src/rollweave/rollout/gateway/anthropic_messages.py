"""Anthropic's Messages API: what its requests mean to the agent, and the form of its
answers and streams. Pure.

Invariant: what the template cannot show is refused by its name. A result that
`is_error` is shown with "Error: " before its text.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.blocks import BlockStream, typed_event
from rollweave.rollout.gateway.formats import checked, of_schema
from rollweave.rollout.gateway.refusals import RequestError, bad
from rollweave.rollout.gateway.requests import (
    MAX_STOPS,
    TOOL_NAME,
    ChatRequest,
    OpenModel,
    StopText,
    Strict,
    Temperature,
    check_free,
    check_others,
    forced_call,
    image_at,
    read,
    template_arguments,
    with_parts,
)
from rollweave.rollout.gateway.responses import ChatReply, Json, ReplyHead
from rollweave.schema.chat import Message, Role, ToolCall
from rollweave.schema.media import Image
from rollweave.schema.serving import Constraint

ERROR: Final = "Error: "
"""Beginning of the text of a tool's result that is an error, as the agent sees it."""

NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "mcp_servers": ([],),
    "thinking": ({"type": "disabled"},),
}
"""Field of a request → its values, other than null, that ask for nothing."""

WITHOUT_EFFECT: Final = frozenset(
    (
        "cache_control",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
        "workspace_id",
    )
)
"""Fields of a request that name, account for, store or schedule it."""

ECHOED: Final = frozenset(("cache_control", "citations"))
"""Fields of a block that clients add or echo and that no prompt shows."""

CALL_ECHOED: Final = frozenset(("cache_control", "caller"))
"""The same of a call."""

TOOL_ECHOED: Final = frozenset(("cache_control", "eager_input_streaming"))
"""Fields of a tool that the agent is not shown: they say how it is stored and sent."""

TOOL_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}
"""Field of a tool → its values that ask for nothing."""

ERRORS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Status → Anthropic's type of an error."""


class _Text(OpenModel):
    type: Literal["text"]
    text: str


class _Source(OpenModel):
    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class _Image(OpenModel):
    type: Literal["image"]
    source: _Source


class _Use(OpenModel):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]


class _Result(OpenModel):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: str | list[_Text | _Image] | None = None
    is_error: bool | None = None


class _Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[_Text | _Image | _Use | _Result], Field(fail_fast=True)]


class _Tool(OpenModel):
    type: Literal["custom"] | None = None
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class _Choice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Format(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class _Output(Strict):
    format: _Format | None = None
    effort: str | None = None


FORMAT_FIELD: Final = "output_config.format.schema"
"""The field that demands a form of the answer."""


class _Request(OpenModel):
    model: str
    max_tokens: int = Field(ge=1)
    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    system: str | list[_Text] | None = None
    tools: Annotated[list[_Tool], Field(fail_fast=True)] | None = None
    tool_choice: _Choice | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    temperature: Temperature | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31)
    stream: bool | None = None
    output_config: _Output | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesApi:
    """The API. `codec` decodes the text of a turn, in which a stop text is found."""

    prefix: Final = "msg"
    end: Final = b""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def parse(self, body: bytes) -> ChatRequest:
        asked = read(body, _Request)
        check_others("", asked, neutral=NEUTRAL, without_effect=WITHOUT_EFFECT)
        call, reads_calls = _choice(asked)
        constraint = _constraint(asked)
        check_free("tool_choice.type", call, constraint)
        effort = None if asked.output_config is None else asked.output_config.effort
        return ChatRequest(
            model=asked.model,
            messages=tuple(_messages(asked)),
            tools=tuple(_tools(asked)),
            template_arguments=template_arguments(
                asked.chat_template_kwargs, reasoning_effort=effort
            ),
            constraint=constraint,
            constraint_field=FORMAT_FIELD,
            call=call,
            reads_calls=reads_calls,
            one_call=asked.tool_choice is not None
            and bool(asked.tool_choice.disable_parallel_tool_use),
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            stop=tuple(asked.stop_sequences or ()),
            stream=bool(asked.stream),
        )

    def response(self, head: ReplyHead, reply: ChatReply, chat: ChatRequest) -> Json:
        message = reply.message
        content: list[Json] = []
        if message.content:
            content.append({"type": "text", "text": message.content})
        content += map(_use, message.tool_calls)
        return {
            **_head(head),
            "content": content,
            **self.stopped(reply, chat),
            "usage": _usage(reply),
        }

    def stopped(self, reply: ChatReply, chat: ChatRequest) -> Json:
        """Return why a turn ended."""
        reason = {"length": "max_tokens", "tool_calls": "tool_use"}.get(reply.finish_reason)
        stop = None
        if reason is None:
            text = self._codec.decode(reply.result.tokens)
            found = [(place, each) for each in chat.stop if (place := text.find(each)) >= 0]
            stop = min(found)[1] if found else None
            reason = "end_turn" if stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}

    def stream(self, head: ReplyHead, chat: ChatRequest, *, forced: str) -> "MessageStream":
        del forced  # it is part of the message's text
        return MessageStream(self, head, chat)

    def event(self, event: Json) -> bytes:
        return typed_event(event)

    def error(self, error: RequestError) -> Json:
        other = "invalid_request_error" if error.status < 500 else "api_error"
        kind = ERRORS.get(error.status, other)
        return {"type": "error", "error": {"type": kind, "message": str(error)}}


class MessageStream(BlockStream):
    """The events of one turn."""

    def __init__(self, api: MessagesApi, head: ReplyHead, chat: ChatRequest) -> None:
        super().__init__()
        self._api, self._head, self._chat = api, head, chat

    def _begin(self) -> Iterator[Json]:
        usage = {"input_tokens": 0, "output_tokens": 0}  # they come with the last event
        message = {"stop_reason": None, "stop_sequence": None, "usage": usage}
        yield {"type": "message_start", "message": {**_head(self._head), "content": [], **message}}

    def _open_text(self) -> Iterator[Json]:
        yield _start(0, {"type": "text", "text": ""})

    def _delta(self, text: str) -> Json:
        return _block_delta(0, {"type": "text_delta", "text": text})

    def _close_text(self, text: str) -> Iterator[Json]:
        yield _stop(0)

    def _call(self, index: int, call: ToolCall) -> Iterator[Json]:
        yield _start(index, {**_use(call), "input": {}})
        yield _block_delta(index, {"type": "input_json_delta", "partial_json": call.arguments})
        yield _stop(index)

    def _end(self, reply: ChatReply) -> Iterator[Json]:
        ended = self._api.stopped(reply, self._chat)
        yield {"type": "message_delta", "delta": ended, "usage": _usage(reply)}
        yield {"type": "message_stop"}


def _start(index: int, block: Json) -> Json:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _block_delta(index: int, delta: Json) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _stop(index: int) -> Json:
    return {"type": "content_block_stop", "index": index}


def _head(head: ReplyHead) -> Json:
    return {"id": head.id, "type": "message", "role": "assistant", "model": head.model}


def _use(call: ToolCall) -> Json:
    return {
        "type": "tool_use",
        "id": call.id,
        "name": call.name,
        "input": json.loads(call.arguments),
    }


def _usage(reply: ChatReply) -> Json:
    cached = reply.result.cached_tokens
    return {
        "input_tokens": reply.prompt_tokens - cached,
        "output_tokens": len(reply.result.tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def _choice(asked: _Request) -> tuple[str | None, bool]:
    """Return the tool that must be called, in the form of `ChatRequest.call`, and
    whether the agent's text is parsed for calls.
    """
    choice, names = asked.tool_choice, [tool.name for tool in asked.tools or ()]
    if choice is None:
        return None, bool(names)
    if (choice.type == "tool") is (choice.name is None):
        raise bad("tool_choice.name", "must be given if, and only if, type is tool", choice.name)
    any_of = "any" if choice.type == "any" else ""
    forced = forced_call("tool_choice.name", choice.name, names, any_of=any_of)
    return forced, bool(names) and choice.type != "none"


def _constraint(asked: _Request) -> Constraint | None:
    if asked.output_config is None or asked.output_config.format is None:
        return None
    return checked(FORMAT_FIELD, of_schema(asked.output_config.format.schema_))


def _tools(asked: _Request) -> Iterator[str]:
    """Yield the declarations in OpenAI's form, which chat templates show."""
    for place, tool in enumerate(asked.tools or ()):
        check_others(f"tools.{place}.", tool, neutral=TOOL_NEUTRAL, without_effect=TOOL_ECHOED)
        shown = {
            "name": tool.name,
            "description": tool.description,
            "strict": tool.strict,
            "parameters": tool.input_schema,
        }
        function = {name: value for name, value in shown.items() if value is not None}
        yield json.dumps({"type": "function", "function": function}, ensure_ascii=False)


def _messages(asked: _Request) -> Iterator[Message]:
    if asked.system is not None:
        yield _shown(asked.system, "system", role="system")
    for place, message in enumerate(asked.messages):
        if isinstance(message.content, str):
            yield Message(role=message.role, content=message.content)
        elif message.role == "assistant":
            yield _assistant(message.content, f"messages.{place}.content")
        else:
            yield from _user(message, f"messages.{place}.content")


def _assistant(blocks: list[_Text | _Image | _Use | _Result], path: str) -> Message:
    text, calls = "", list[ToolCall]()
    for place, block in enumerate(blocks):
        if isinstance(block, _Result | _Image):
            raise bad(f"{path}.{place}.type", "must be text or tool_use", block.type)
        echoed = CALL_ECHOED if isinstance(block, _Use) else ECHOED
        check_others(f"{path}.{place}.", block, neutral={}, without_effect=echoed)
        if isinstance(block, _Text):
            text += block.text
        else:
            arguments = json.dumps(block.input, ensure_ascii=False)
            calls.append(ToolCall(id=block.id, name=block.name, arguments=arguments))
    return Message(role="assistant", content=text, tool_calls=tuple(calls))


def _user(message: _Message, path: str) -> Iterator[Message]:
    """Yield the tools' results one by one, and what the user says between them."""
    assert not isinstance(message.content, str), "text was handled"
    shown: list[_Text | _Image] = []
    for place, block in enumerate(message.content):
        if isinstance(block, _Use) or (isinstance(block, _Result) and message.role != "user"):
            raise bad(f"{path}.{place}.type", f"must be that of a {message.role}", block.type)
        if not isinstance(block, _Result):
            shown.append(block)
            continue
        check_others(f"{path}.{place}.", block, neutral={}, without_effect=ECHOED)
        if shown:
            yield _shown(shown, path, role=message.role, first=place - len(shown))
            shown = []
        yield _shown(
            block.content or "",
            f"{path}.{place}.content",
            role="tool",
            before=ERROR if block.is_error else "",
            tool_call_id=block.tool_use_id,
        )
    if shown or not message.content:
        first = len(message.content) - len(shown)
        yield _shown(shown, path, role=message.role, first=first)


def _shown(
    content: str | Sequence[_Text | _Image],
    path: str,
    *,
    role: Role,
    before: str = "",
    first: int = 0,
    **fields: Any,
) -> Message:
    """Return the message with this content, the blocks from number `first` on."""
    if isinstance(content, str):
        return Message(role=role, content=before + content, **fields)
    parts: list[str | Image] = [before]
    for place, block in enumerate(content, first):
        check_others(f"{path}.{place}.", block, neutral={}, without_effect=ECHOED)
        parts.append(
            block.text if isinstance(block, _Text) else _image(block, f"{path}.{place}.source")
        )
    return with_parts(path, parts, role=role, **fields)


def _image(block: _Image, path: str) -> Image:
    source = block.source
    check_others(f"{path}.", source, neutral={})
    if source.type != "base64":
        raise bad(f"{path}.type", "must be base64: an image is recorded as it was seen", "url")
    return image_at(f"{path}.data", source.data or "", of=Image.of_base64)
