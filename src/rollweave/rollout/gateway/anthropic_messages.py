"""Anthropic's Messages API: what its requests mean to the agent, and the form of its
answers and streams. Pure.

Invariant: a result that `is_error` is shown with "Error: " before its text.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from rollweave.io.http.messages import OpenModel, other_than
from rollweave.rollout.chat.replies import seal, unseal
from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.fields import (
    Reading,
    RequestError,
    Strict,
    TooLongError,
    bad,
    checked,
    of_schema,
    template_asks,
)
from rollweave.rollout.gateway.requests import (
    MAX_STOPS,
    TOOL_NAME,
    ChatRequest,
    StopText,
    Temperature,
    check_free,
    forced_call,
    leave_tool,
    read,
    shown_text,
)
from rollweave.rollout.gateway.responses import (
    TEXT,
    THOUGHTS,
    BlockApi,
    BlockStream,
    ChatReply,
    Json,
    PlainErrors,
    ReplyHead,
)
from rollweave.schema.chat import Message, Role, ToolCall
from rollweave.schema.serving import Constraint

ERROR: Final = "Error: "
"""Beginning of the text of a tool's result that is an error, as the agent sees it."""

TOOL_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}
"""Field of a tool → its values that ask for nothing."""

BILLING: Final = "x-anthropic-billing-header:"
"""Beginning of a block of the system prompt that is really a header: the API's own
servers remove the block, and it differs from request to request.
"""

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


class _Use(OpenModel):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]


class _Thinking(OpenModel):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class _Other(OpenModel):
    """A block that no chat template shows."""

    type: other_than("text", "tool_use", "tool_result", "thinking")  # type: ignore[valid-type]


_Shown = _Text | _Other


class _Result(OpenModel):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: str | list[_Shown] | None = None
    is_error: bool | None = None


_Block = _Text | _Use | _Result | _Thinking | _Other


class _Message(OpenModel):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[_Block], Field(fail_fast=True)]


class _Tool(OpenModel):
    type: Literal["custom", "function"] | None = None
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class _OtherTool(OpenModel):
    """A tool that Anthropic's servers run, or whose schema only they have."""

    type: other_than("custom", "function")  # type: ignore[valid-type]


class _Choice(OpenModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Format(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class _Output(OpenModel):
    format: _Format | None = None
    effort: str | None = None


FORMAT_FIELD: Final = "output_config.format.schema"
"""The field that demands a form of the answer."""


class _Request(OpenModel):
    model: str
    max_tokens: int | None = Field(None, ge=1)
    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    system: str | list[_Text] | None = None
    tools: Annotated[list[_Tool | _OtherTool], Field(fail_fast=True)] | None = None
    tool_choice: _Choice | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    temperature: Temperature | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31)
    stream: bool | None = None
    thinking: dict[str, Any] | None = None
    context_management: dict[str, Any] | list[Any] | None = None
    output_config: _Output | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesApi(BlockApi, PlainErrors):
    """The API. `codec` decodes the text of a turn, to find the stop text in it."""

    prefix: Final = "msg"

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def parse(self, body: bytes, *, counts: bool = False) -> ChatRequest:
        asked, reading = read(body, _Request), Reading()
        if asked.max_tokens is None and not counts:
            raise bad("max_tokens", "must be a positive integer", None)
        reading.request(asked)
        _ask(reading, asked)
        tools = list(_tools(asked, reading))
        call, reads_calls = _choice(asked, [name for name, _ in tools], reading)
        constraint = _constraint(asked)
        check_free("tool_choice.type", call, constraint)
        messages = tuple(_messages(asked, reading))
        display = (asked.thinking or {}).get("display")
        return ChatRequest(
            model=asked.model,
            messages=messages,
            tools=tuple(declaration for _, declaration in tools),
            asks=tuple(reading.asks),
            unread=tuple(reading.unread),
            thoughts_as="sealed" if display == "omitted" else "text",
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
        if message.thoughts:
            content.append(_thought(message.thoughts, chat))
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
            found = [(place, stop) for stop in chat.stop if (place := text.find(stop)) >= 0]
            stop = min(found)[1] if found else None
            reason = "end_turn" if stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}

    def stream(self, head: ReplyHead, chat: ChatRequest) -> "MessageStream":
        return MessageStream(self, head, chat)

    def count(self, tokens: int) -> Json:
        return {"input_tokens": tokens}

    def error(self, error: RequestError) -> Json:
        other = "invalid_request_error" if error.status < 500 else "api_error"
        kind = ERRORS.get(error.status, other)
        text = str(error)
        if isinstance(error, TooLongError):
            text = f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
        return {"type": "error", "error": {"type": kind, "message": text}}


class MessageStream(BlockStream):
    """The events of one turn."""

    def __init__(self, api: MessagesApi, head: ReplyHead, chat: ChatRequest) -> None:
        super().__init__()
        self._api, self._head, self._chat = api, head, chat

    def _begin(self) -> Iterator[Json]:
        # The tokens from the cache are counted with the last event.
        usage = {"input_tokens": self._head.prompt_tokens, "output_tokens": 0}
        message = {"stop_reason": None, "stop_sequence": None, "usage": usage}
        yield {"type": "message_start", "message": {**_head(self._head), "content": [], **message}}

    def _open_block(self, kind: str) -> Iterator[Json]:
        empty = {"type": "text", "text": ""}
        if kind == THOUGHTS:
            empty = {"type": "thinking", "thinking": "", "signature": ""}
        yield _start(self._blocks, empty)

    def _delta(self, kind: str, text: str) -> Iterator[Json]:
        if kind == TEXT:
            yield _block_delta(self._blocks, {"type": "text_delta", "text": text})
        elif self._chat.thoughts_as == "text":
            yield _block_delta(self._blocks, {"type": "thinking_delta", "thinking": text})

    def _close_block(self, kind: str, text: str) -> Iterator[Json]:
        if kind == THOUGHTS:
            delta = {"type": "signature_delta", "signature": seal(text)}
            yield _block_delta(self._blocks, delta)
        yield _stop(self._blocks)

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


def _thought(thoughts: str, chat: ChatRequest) -> Json:
    shown = thoughts if chat.thoughts_as == "text" else ""
    return {"type": "thinking", "thinking": shown, "signature": seal(thoughts)}


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


def _ask(reading: Reading, asked: _Request) -> None:
    """Read the wishes for the chat template, and the edits of the context, which are
    unread unless they keep the whole context.
    """
    reading.asks += template_asks(asked.chat_template_kwargs)
    reading.thinking("thinking", asked.thinking)
    if (output := asked.output_config) is not None:
        reading.effort("output_config.effort", output.effort)
        reading.others("output_config.", output)
    management = asked.context_management
    edits = management.get("edits") if isinstance(management, dict) else management
    for place, edit in enumerate(edits if isinstance(edits, list) else ()):
        if not isinstance(edit, dict) or edit.get("keep") != "all":
            reading.leave(f"context_management.edits.{place}", edit, "must keep all")


def _choice(asked: _Request, names: list[str], reading: Reading) -> tuple[str | None, bool]:
    """Return the tool that must be called, in the form of `ChatRequest.call`, and
    whether the agent's text is parsed for calls.
    """
    choice = asked.tool_choice
    if choice is None:
        return None, bool(names)
    reading.others("tool_choice.", choice)
    if choice.name in {(tool.model_extra or {}).get("name") for tool in _left_out(asked)}:
        reading.leave("tool_choice.name", choice.name, f"must be one of the tools {names}")
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


def _left_out(asked: _Request) -> list[_OtherTool]:
    return [tool for tool in asked.tools or () if isinstance(tool, _OtherTool)]


def _tools(asked: _Request, reading: Reading) -> Iterator[tuple[str, str]]:
    """Yield the names of tools, and their declarations in OpenAI's form, which chat
    templates show.
    """
    for place, tool in enumerate(asked.tools or ()):
        if isinstance(tool, _OtherTool):
            leave_tool(reading, place, tool.type)
            continue
        reading.others(f"tools.{place}.", tool, neutral=TOOL_NEUTRAL)
        shown = {
            "name": tool.name,
            "description": tool.description,
            "strict": tool.strict,
            "parameters": tool.input_schema,
        }
        function = {name: value for name, value in shown.items() if value is not None}
        declaration = {"type": "function", "function": function}
        yield tool.name, json.dumps(declaration, ensure_ascii=False)


def _messages(asked: _Request, reading: Reading) -> Iterator[Message]:
    if asked.system is not None:
        yield _system(asked.system, reading)
    for place, message in enumerate(asked.messages):
        reading.others(f"messages.{place}.", message)
        if isinstance(message.content, str):
            yield Message(role=message.role, content=message.content)
        elif message.role == "assistant":
            yield _assistant(message.content, f"messages.{place}.content", reading)
        else:
            yield from _user(message, f"messages.{place}.content", reading)


def _system(system: str | list[_Text], reading: Reading) -> Message:
    if not isinstance(system, str):
        headers = [block for block in system if block.text.startswith(BILLING)]
        for block in headers:
            rule = "must be part of the system prompt"
            reading.leave("system.0.text", block.text, rule, action="left out")
        system = [block for block in system if block not in headers]
    return _shown(system, "system", reading, role="system")


def _assistant(blocks: list[_Block], path: str, reading: Reading) -> Message:
    text, thoughts, calls = "", "", list[ToolCall]()
    for place, block in enumerate(blocks):
        if isinstance(block, _Result):
            raise bad(f"{path}.{place}.type", "must be text, thinking or tool_use", block.type)
        if isinstance(block, _Other):
            reading.leave(f"{path}.{place}.type", block.type, "must be text, thinking or tool_use")
            continue
        reading.others(f"{path}.{place}.", block)
        if isinstance(block, _Text):
            text += block.text
        elif isinstance(block, _Thinking):
            thought = block.thinking or unseal(block.signature) or ""
            thoughts += reading.thoughts(f"{path}.{place}", thought)
        else:
            arguments = json.dumps(block.input, ensure_ascii=False)
            calls.append(ToolCall(id=block.id, name=block.name, arguments=arguments))
    return Message(role="assistant", content=text, tool_calls=tuple(calls), thoughts=thoughts)


def _user(message: _Message, path: str, reading: Reading) -> Iterator[Message]:
    """Yield the tools' results one by one, and the user's text between them."""
    assert not isinstance(message.content, str), "text was handled"
    shown: list[_Shown] = []
    for place, block in enumerate(message.content):
        if isinstance(block, _Use | _Thinking) or (
            isinstance(block, _Result) and message.role != "user"
        ):
            raise bad(f"{path}.{place}.type", f"must be that of a {message.role}", block.type)
        if not isinstance(block, _Result):
            shown.append(block)
            continue
        reading.others(f"{path}.{place}.", block)
        if shown:
            yield _shown(shown, path, reading, role=message.role, first=place - len(shown))
            shown = []
        yield _shown(
            block.content or "",
            f"{path}.{place}.content",
            reading,
            role="tool",
            before=ERROR if block.is_error else "",
            tool_call_id=block.tool_use_id,
        )
    if shown or not message.content:
        first = len(message.content) - len(shown)
        yield _shown(shown, path, reading, role=message.role, first=first)


def _shown(
    content: str | Sequence[_Shown],
    path: str,
    reading: Reading,
    *,
    role: Role,
    before: str = "",
    first: int = 0,
    **fields: Any,
) -> Message:
    """Return the message with this content, the blocks from number `first` on."""
    text = shown_text(content, path, reading, other=_Other, text_of=_document, first=first)
    return Message(role=role, content=before + text, **fields)


def _document(block: Json) -> object:
    """Return the text of a plain document."""
    source = block.get("source")
    if isinstance(source, dict) and source.get("type") == "text":
        return source.get("data")
    return None
