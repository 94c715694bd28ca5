"""OpenAI's Responses API: what its requests mean to the agent, and the form of its
answers and streams. Pure.

Invariants: nothing is stored, so that a client resends its items, and
`previous_response_id` and `conversation` are refused. The items of one turn, its text
and its calls, are one message of the agent wherever a client sends them back.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from pydantic import Field

from rollweave.io.http.messages import OpenModel, other_than
from rollweave.rollout.chat.replies import seal, unseal
from rollweave.rollout.gateway.fields import (
    ANY_OBJECT,
    Reading,
    RequestError,
    Schema,
    Strict,
    TooLongError,
    bad,
    checked,
    of_schema,
    template_asks,
)
from rollweave.rollout.gateway.requests import (
    ChatRequest,
    OtherChoice,
    Temperature,
    ToolKind,
    check_free,
    forced_call,
    read,
    shown_text,
)
from rollweave.rollout.gateway.responses import (
    THOUGHTS,
    BlockApi,
    BlockStream,
    ChatReply,
    Json,
    ReplyHead,
)
from rollweave.rollout.gateway.responses_tools import (
    CALLS,
    OUTPUTS,
    CallItem,
    Tool,
    call_of,
    item_of,
    read_tools,
)
from rollweave.schema.chat import Message, Role, ToolCall
from rollweave.schema.serving import Constraint

TOO_LONG: Final = (
    "Your input exceeds the context window of this model. Please adjust your input and try again."
)
"""OpenAI's words for a prompt that does not fit into the context."""


class _Part(OpenModel):
    type: Literal["input_text", "output_text", "text"]
    text: str


class _OtherPart(OpenModel):
    type: other_than("input_text", "output_text", "text")  # type: ignore[valid-type]


class _Message(OpenModel):
    type: Literal["message"] = "message"
    role: Literal["developer", "system", "user", "assistant"]
    content: str | Annotated[list[_Part | _OtherPart], Field(fail_fast=True)]


class _Output(OpenModel):
    type: Literal[
        "function_call_output",
        "custom_tool_call_output",
        "local_shell_call_output",
        "shell_call_output",
        "apply_patch_call_output",
    ]
    call_id: str | None = None
    id: str | None = None
    name: str | None = None
    output: (
        str | Annotated[list[_Part | _OtherPart | dict[str, Any]], Field(fail_fast=True)] | None
    ) = None


class _Thoughts(OpenModel):
    type: Literal["reasoning"]
    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None

    def thoughts(self) -> str | None:
        """Return the thoughts; None if they cannot be read."""
        told = [_texts(self.content), unseal(self.encrypted_content or ""), _texts(self.summary)]
        if any(told):
            return next(text for text in told if text)
        return None if self.encrypted_content else ""


class _OtherItem(OpenModel):
    """An item that is not a message, a call or a result, but an action of OpenAI's
    servers.
    """

    type: other_than("message", "reasoning", *CALLS, *OUTPUTS)  # type: ignore[valid-type]


Item = _Message | CallItem | _Output | _Thoughts | _OtherItem


class _Named(Strict):
    type: Literal["function", "custom"]
    name: str = Field(min_length=1)


class _Format(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class _TextConfig(OpenModel):
    format: _Format | None = None
    verbosity: str | None = None


class _Reasoning(OpenModel):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


FORMAT_FIELD: Final = "text.format.schema"
"""The field that demands a form of the answer."""


class _Request(OpenModel):
    model: str = ""
    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | _Named | OtherChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: Temperature | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    text: _TextConfig | None = None
    reasoning: _Reasoning | None = None
    stream: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesApi(BlockApi):
    """The API."""

    prefix: Final = "resp"

    def parse(self, body: bytes, *, counts: bool = False) -> ChatRequest:
        del counts  # a request to count has the same required fields
        asked, reading = read(body, _Request), Reading()
        reading.request(asked)
        _ask(reading, asked)
        tools = read_tools(asked.tools or [], reading)
        choice, constraint = asked.tool_choice, _constraint(asked)
        if isinstance(choice, OtherChoice):
            reading.leave("tool_choice.type", choice.type, "must be function or custom")
        call = forced_call(
            "tool_choice.name",
            choice.name if isinstance(choice, _Named) else None,
            tools.names,
            any_of="'required'" if choice == "required" else "",
        )
        check_free("tool_choice", call, constraint)
        messages = tuple(_messages(asked, tools.kinds, reading))
        wishes = asked.reasoning or _Reasoning()
        return ChatRequest(
            model=asked.model,
            messages=messages,
            source="input",
            tools=tuple(tools.declarations),
            tool_kinds=tools.kinds,
            asks=tuple(reading.asks),
            unread=tuple(reading.unread),
            thoughts_as="summary" if wishes.summary or wishes.generate_summary else "text",
            constraint=constraint,
            constraint_field=FORMAT_FIELD,
            call=call,
            reads_calls=bool(tools.names) and asked.tool_choice != "none",
            one_call=asked.parallel_tool_calls is False,
            max_tokens=asked.max_output_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            stream=bool(asked.stream),
        )

    def response(self, head: ReplyHead, reply: ChatReply, chat: ChatRequest) -> Json:
        output = list[Json]()
        if reply.message.thoughts:
            output.append(_reasoning(head, reply.message.thoughts, chat))
        if reply.message.content:
            output.append(_message(head, reply.message.content))
        output += (item_of(call, chat.tool_kinds) for call in reply.message.tool_calls)
        cut = reply.finish_reason == "length"
        return {
            **_response(head, chat, status="incomplete" if cut else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": reply.result.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": len(reply.result.tokens),
                "output_tokens_details": {"reasoning_tokens": reply.thought_tokens},
                "total_tokens": reply.prompt_tokens + len(reply.result.tokens),
            },
        }

    def stream(self, head: ReplyHead, chat: ChatRequest) -> "ResponseStream":
        return ResponseStream(self, head, chat)

    def count(self, tokens: int) -> Json:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def error(self, error: RequestError) -> Json:
        text = TOO_LONG if isinstance(error, TooLongError) else str(error)
        body: Json = error.body()
        body["error"]["message"] = text
        return {**body, "type": "error", "code": error.code, "message": text}

    def failed(self, head: ReplyHead, error: RequestError, chat: ChatRequest) -> Iterator[Json]:
        """Yield the events of a stream that begins with this error: only there do
        clients read the code of a prompt that is too long.
        """
        why = {"code": error.code, "message": self.error(error)["message"]}
        begun = _response(head, chat, status="in_progress")
        failed = {**_response(head, chat, status="failed"), "error": why}
        yield {"type": "response.created", "sequence_number": 0, "response": begun}
        yield {"type": "response.failed", "sequence_number": 1, "response": failed}


class ResponseStream(BlockStream):
    """The events of one turn, which are numbered."""

    def __init__(self, api: ResponsesApi, head: ReplyHead, chat: ChatRequest) -> None:
        super().__init__()
        self._api, self._head, self._chat = api, head, chat
        self._number = 0

    def _event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def _begin(self) -> Iterator[Json]:
        begun = _response(self._head, self._chat, status="in_progress")
        yield self._event("created", response=begun)
        yield self._event("in_progress", response=begun)

    def _open_block(self, kind: str) -> Iterator[Json]:
        if kind == THOUGHTS:
            item = {"id": f"rs_{self._head.id}", "type": "reasoning", "summary": []}
            yield self._event("output_item.added", output_index=self._blocks, item=item)
            part = {"part": self._thought("")}
            yield self._event(self._named("part.added"), **self._place(kind), **part)
            return
        item = {**_message(self._head, ""), "status": "in_progress", "content": []}
        yield self._event("output_item.added", output_index=self._blocks, item=item)
        yield self._event("content_part.added", **self._place(kind), part=_text(""))

    def _delta(self, kind: str, text: str) -> Iterator[Json]:
        if kind == THOUGHTS:
            yield self._event(self._named("text.delta"), **self._place(kind), delta=text)
        else:
            yield self._event("output_text.delta", **self._place(kind), delta=text, logprobs=[])

    def _close_block(self, kind: str, text: str) -> Iterator[Json]:
        if kind == THOUGHTS:
            yield self._event(self._named("text.done"), **self._place(kind), text=text)
            part = {"part": self._thought(text)}
            yield self._event(self._named("part.done"), **self._place(kind), **part)
            item = _reasoning(self._head, text, self._chat)
        else:
            yield self._event("output_text.done", **self._place(kind), text=text, logprobs=[])
            yield self._event("content_part.done", **self._place(kind), part=_text(text))
            item = _message(self._head, text)
        yield self._event("output_item.done", output_index=self._blocks, item=item)

    def _call(self, index: int, call: ToolCall) -> Iterator[Json]:
        item = item_of(call, self._chat.tool_kinds)
        of = {"item_id": item["id"], "output_index": index}
        empty: Json = {name: "" for name in ("arguments", "input") if name in item}
        begun = {**item, **empty, "status": "in_progress"}
        yield self._event("output_item.added", output_index=index, item=begun)
        if item["type"] == "function_call":
            text = {"arguments": item["arguments"]}
            yield self._event("function_call_arguments.delta", **of, delta=item["arguments"])
            yield self._event("function_call_arguments.done", **of, name=item["name"], **text)
        elif item["type"] == "custom_tool_call":
            yield self._event("custom_tool_call_input.delta", **of, delta=item["input"])
            yield self._event("custom_tool_call_input.done", **of, input=item["input"])
        yield self._event("output_item.done", output_index=index, item=item)

    def _named(self, event: str) -> str:
        """Return the name of an event of thoughts."""
        if self._chat.thoughts_as == "summary":
            return f"reasoning_summary_{event}"
        return f"content_{event}" if event.startswith("part") else f"reasoning_{event}"

    def _thought(self, text: str) -> Json:
        kind = "summary_text" if self._chat.thoughts_as == "summary" else "reasoning_text"
        return {"type": kind, "text": text}

    def _place(self, kind: str) -> Json:
        prefix = "rs" if kind == THOUGHTS else "msg"
        summary = kind == THOUGHTS and self._chat.thoughts_as == "summary"
        index = "summary_index" if summary else "content_index"
        place: Json = {"item_id": f"{prefix}_{self._head.id}", "output_index": self._blocks}
        return {**place, index: 0}

    def _end(self, reply: ChatReply) -> Iterator[Json]:
        response = self._api.response(self._head, reply, self._chat)
        yield self._event(response["status"], response=response)


def _response(head: ReplyHead, chat: ChatRequest, *, status: str) -> Json:
    """Return a response without its output."""
    tools = [json.loads(tool) for tool in chat.tools]
    choice: Any = "auto" if chat.reads_calls or not tools else "none"
    if chat.call is not None:
        choice = {"type": "function", "name": chat.call} if chat.call else "required"
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": chat.max_tokens,
        "metadata": {},
        "model": head.model,
        "output": [],
        "parallel_tool_calls": not chat.one_call,
        "previous_response_id": None,
        "store": False,
        "temperature": chat.temperature,
        "tool_choice": choice,
        "tools": [{"type": "function", **tool["function"]} for tool in tools],
        "top_p": chat.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _message(head: ReplyHead, text: str) -> Json:
    return {
        "id": f"msg_{head.id}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [_text(text)],
    }


def _text(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _reasoning(head: ReplyHead, thoughts: str, chat: ChatRequest) -> Json:
    """Return the item of thoughts: as its content, or as their own summary."""
    item = {"id": f"rs_{head.id}", "type": "reasoning", "encrypted_content": seal(thoughts)}
    if chat.thoughts_as == "summary":
        return {**item, "summary": [{"type": "summary_text", "text": thoughts}]}
    content = [{"type": "reasoning_text", "text": thoughts}]
    return {**item, "summary": [], "content": content}


def _texts(parts: list[dict[str, Any]] | None) -> str:
    return "".join(text for part in parts or () if isinstance(text := part.get("text"), str))


def _ask(reading: Reading, asked: _Request) -> None:
    """Read the wishes for the chat template."""
    reading.asks += template_asks(asked.chat_template_kwargs)
    if asked.reasoning is not None:
        reading.effort("reasoning.effort", asked.reasoning.effort)
        reading.others("reasoning.", asked.reasoning)
    if asked.text is not None:
        if asked.text.verbosity not in (None, "medium"):
            reading.leave("text.verbosity", asked.text.verbosity, "must be medium")
        reading.others("text.", asked.text)


def _constraint(asked: _Request) -> Constraint | None:
    wanted = None if asked.text is None else asked.text.format
    if wanted is None or wanted.type == "text":
        return None
    if (wanted.type == "json_schema") is (wanted.schema_ is None):
        rule = "must be given if, and only if, type is json_schema"
        raise bad("text.format.schema", rule, wanted.schema_)
    schema = ANY_OBJECT if wanted.schema_ is None else wanted.schema_
    return checked(FORMAT_FIELD, of_schema(schema))


def _messages(
    asked: _Request, kinds: Mapping[str, ToolKind], reading: Reading
) -> Iterator[Message]:
    if asked.instructions is not None:
        yield Message(role="system", content=asked.instructions)
    if isinstance(asked.input, str):
        yield Message(role="user", content=asked.input)
        return
    turn: Message | None = None
    for place, item in enumerate(asked.input):
        path = f"input.{place}."
        reading.others(path, item)
        part = _of_agent(item, path, kinds, reading)
        if part is not None:
            after = part.thoughts and turn is not None and (turn.content or turn.tool_calls)
            if turn is None or after:
                if turn is not None:
                    yield turn
                turn = part
            else:
                turn = msgspec.structs.replace(
                    turn,
                    content=turn.content + part.content,
                    tool_calls=turn.tool_calls + part.tool_calls,
                    thoughts=turn.thoughts + part.thoughts,
                )
            continue
        if item.type == "item_reference":
            raise bad(path + "type", "must be an item itself: nothing is stored", item.type)
        if isinstance(item, _OtherItem | _Thoughts):
            reading.leave(path + "type", item.type, "must be a message, a call or its output")
            continue
        if turn is not None:
            yield turn
            turn = None
        yield _of_others(item, path, reading)
    if turn is not None:
        yield turn


def _of_agent(
    item: Item, path: str, kinds: Mapping[str, ToolKind], reading: Reading
) -> Message | None:
    """Return the item as a part of the agent's turn; None if the item is not the
    agent's.
    """
    if isinstance(item, CallItem):
        call = call_of(item.model_dump(exclude_none=True), kinds)
        return Message(role="assistant", content="", tool_calls=(call,))
    if isinstance(item, _Thoughts):
        thoughts = item.thoughts()
        reading.thoughts(path + "type", thoughts or "")
        return (
            None if thoughts is None else Message(role="assistant", content="", thoughts=thoughts)
        )
    if isinstance(item, _Message) and item.role == "assistant":
        return _shown(item.content, path + "content", reading, role="assistant")
    return None


def _of_others(item: Item, path: str, reading: Reading) -> Message:
    """Return the message of an item that is not the agent's."""
    if isinstance(item, _Output):
        id = item.call_id or item.id or ""
        output = item.output
        if isinstance(output, list) and any(isinstance(part, dict) for part in output):
            output = json.dumps(item.model_dump()["output"], ensure_ascii=False)
        return _shown(output or "", path + "output", reading, role="tool", tool_call_id=id)
    assert isinstance(item, _Message), "all others were handled"
    role: Literal["system", "user"] = "user" if item.role == "user" else "system"
    return _shown(item.content, path + "content", reading, role=role)


def _shown(
    content: str | Sequence[Any], path: str, reading: Reading, *, role: Role, **fields: Any
) -> Message:
    text = shown_text(content, path, reading, other=_OtherPart, text_of=_refusal)
    return Message(role=role, content=text, **fields)


def _refusal(part: Json) -> object:
    """Return the text of an agent's refusal."""
    return part.get("refusal")
