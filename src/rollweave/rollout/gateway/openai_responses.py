"""OpenAI's Responses API: what its requests mean to the agent, and the form of its
answers and streams. Pure.

Invariants: nothing is stored, so that a client resends its items, and
`previous_response_id` and `conversation` are refused. The items of one turn, its text
and its calls, are one message of the agent wherever a client sends them back.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from rollweave.rollout.gateway.blocks import BlockStream, typed_event
from rollweave.rollout.gateway.formats import ANY_OBJECT, Schema, checked, of_schema
from rollweave.rollout.gateway.refusals import RequestError, bad
from rollweave.rollout.gateway.requests import (
    TOOL_NAME,
    ChatRequest,
    OpenModel,
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

NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "include": ([], ["reasoning.encrypted_content"]),
    "max_tool_calls": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Field of a request → its values, other than null, that ask for nothing: no turn has a
reasoning item.
"""

WITHOUT_EFFECT: Final = frozenset(
    (
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    )
)
"""Fields of a request that name, account for, store or schedule it."""

IMAGE_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {"file_id": ()}
"""Field of an image → its values, other than null, that ask for nothing."""

ECHOED: Final = frozenset(("annotations", "id", "logprobs", "parsed", "phase", "status"))
"""Fields of an item, or of its parts, that clients echo and that no prompt shows."""

CALL_ECHOED: Final = frozenset(("caller", "id", "namespace", "parsed_arguments", "status"))
"""The same of a call."""


class _Part(OpenModel):
    type: Literal["input_text", "output_text", "text"]
    text: str


class _Image(OpenModel):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto"] | None = None


class _Message(OpenModel):
    type: Literal["message"] = "message"
    role: Literal["developer", "system", "user", "assistant"]
    content: str | Annotated[list[_Part | _Image], Field(fail_fast=True)]


class _Call(OpenModel):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    arguments: str


class _Output(OpenModel):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: str | Annotated[list[_Part | _Image], Field(fail_fast=True)]


Item = _Message | _Call | _Output


class _Tool(OpenModel):
    type: Literal["function"]
    name: str = Field(pattern=TOOL_NAME)


class _Named(Strict):
    type: Literal["function"]
    name: str = Field(min_length=1)


class _Format(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class _TextConfig(Strict):
    format: _Format | None = None
    verbosity: Literal["medium"] | None = None


class _Reasoning(Strict):
    effort: str | None = None
    summary: None = None


FORMAT_FIELD: Final = "text.format.schema"
"""The field that demands a form of the answer."""


class _Request(OpenModel):
    model: str
    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    tools: Annotated[list[_Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | _Named | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: Temperature | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    text: _TextConfig | None = None
    reasoning: _Reasoning | None = None
    stream: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ResponsesApi:
    """The API."""

    prefix: Final = "resp"
    end: Final = b""

    def parse(self, body: bytes) -> ChatRequest:
        asked = read(body, _Request)
        check_others("", asked, neutral=NEUTRAL, without_effect=WITHOUT_EFFECT)
        choice, constraint = asked.tool_choice, _constraint(asked)
        call = forced_call(
            "tool_choice.name",
            choice.name if isinstance(choice, _Named) else None,
            [tool.name for tool in asked.tools or ()],
            any_of="'required'" if choice == "required" else "",
        )
        check_free("tool_choice", call, constraint)
        effort = None if asked.reasoning is None else asked.reasoning.effort
        return ChatRequest(
            model=asked.model,
            messages=tuple(_messages(asked)),
            source="input",
            tools=tuple(
                json.dumps({"type": "function", "function": _function(tool)}, ensure_ascii=False)
                for tool in asked.tools or ()
            ),
            template_arguments=template_arguments(
                asked.chat_template_kwargs, reasoning_effort=effort
            ),
            constraint=constraint,
            constraint_field=FORMAT_FIELD,
            call=call,
            reads_calls=bool(asked.tools) and asked.tool_choice != "none",
            one_call=asked.parallel_tool_calls is False,
            max_tokens=asked.max_output_tokens,
            temperature=asked.temperature,
            top_p=asked.top_p,
            stream=bool(asked.stream),
        )

    def response(self, head: ReplyHead, reply: ChatReply, chat: ChatRequest) -> Json:
        output = list[Json]()
        if reply.message.content:
            output.append(_message(head, reply.message.content))
        output += map(_call, reply.message.tool_calls)
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
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.prompt_tokens + len(reply.result.tokens),
            },
        }

    def stream(self, head: ReplyHead, chat: ChatRequest, *, forced: str) -> "ResponseStream":
        del forced  # it is part of the message's text
        return ResponseStream(self, head, chat)

    def event(self, event: Json) -> bytes:
        return typed_event(event)

    def error(self, error: RequestError) -> Json:
        body = error.body()
        return {**body, "type": "error", "code": error.code, "message": str(error)}


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

    def _open_text(self) -> Iterator[Json]:
        item = {**_message(self._head, ""), "status": "in_progress", "content": []}
        yield self._event("output_item.added", output_index=0, item=item)
        yield self._event("content_part.added", **self._part(), part=_text(""))

    def _delta(self, text: str) -> Json:
        return self._event("output_text.delta", **self._part(), delta=text, logprobs=[])

    def _close_text(self, text: str) -> Iterator[Json]:
        yield self._event("output_text.done", **self._part(), text=text, logprobs=[])
        yield self._event("content_part.done", **self._part(), part=_text(text))
        item = _message(self._head, text)
        yield self._event("output_item.done", output_index=0, item=item)

    def _call(self, index: int, call: ToolCall) -> Iterator[Json]:
        item = _call(call)
        begun = {**item, "arguments": "", "status": "in_progress"}
        of = {"item_id": item["id"], "output_index": index}
        yield self._event("output_item.added", output_index=index, item=begun)
        yield self._event("function_call_arguments.delta", **of, delta=call.arguments)
        yield self._event(
            "function_call_arguments.done", **of, name=call.name, arguments=call.arguments
        )
        yield self._event("output_item.done", output_index=index, item=item)

    def _end(self, reply: ChatReply) -> Iterator[Json]:
        response = self._api.response(self._head, reply, self._chat)
        yield self._event(response["status"], response=response)

    def _part(self) -> Json:
        return {"item_id": f"msg_{self._head.id}", "output_index": 0, "content_index": 0}


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


def _call(call: ToolCall) -> Json:
    return {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _function(tool: _Tool) -> Json:
    fields = tool.model_dump(exclude_unset=True)
    return {name: value for name, value in fields.items() if name != "type"}


def _constraint(asked: _Request) -> Constraint | None:
    wanted = None if asked.text is None else asked.text.format
    if wanted is None or wanted.type == "text":
        return None
    if (wanted.type == "json_schema") is (wanted.schema_ is None):
        rule = "must be given if, and only if, type is json_schema"
        raise bad("text.format.schema", rule, wanted.schema_)
    schema = ANY_OBJECT if wanted.schema_ is None else wanted.schema_
    return checked(FORMAT_FIELD, of_schema(schema))


def _messages(asked: _Request) -> Iterator[Message]:
    if asked.instructions is not None:
        yield Message(role="system", content=asked.instructions)
    if isinstance(asked.input, str):
        yield Message(role="user", content=asked.input)
        return
    turn: Message | None = None
    for place, item in enumerate(asked.input):
        path = f"input.{place}."
        echoed = CALL_ECHOED if isinstance(item, _Call) else ECHOED
        check_others(path, item, neutral={}, without_effect=echoed)
        if isinstance(item, _Call):
            call = ToolCall(id=item.call_id, name=item.name, arguments=item.arguments)
            calls = (*turn.tool_calls, call) if turn is not None else (call,)
            text = turn.content if turn is not None else ""
            turn = Message(role="assistant", content=text, tool_calls=calls)
            continue
        if turn is not None:
            yield turn
            turn = None
        if isinstance(item, _Output):
            yield _shown(item.output, path + "output", role="tool", tool_call_id=item.call_id)
        elif item.role == "assistant":
            turn = _shown(item.content, path + "content", role="assistant")
        else:
            role: Literal["system", "user"] = "user" if item.role == "user" else "system"
            yield _shown(item.content, path + "content", role=role)
    if turn is not None:
        yield turn


def _shown(
    content: str | Sequence[_Part | _Image], path: str, *, role: Role, **fields: Any
) -> Message:
    if isinstance(content, str):
        return Message(role=role, content=content, **fields)
    parts = list[str | Image]()
    for place, part in enumerate(content):
        check_others(f"{path}.{place}.", part, neutral=IMAGE_NEUTRAL, without_effect=ECHOED)
        if isinstance(part, _Image):
            parts.append(image_at(f"{path}.{place}.image_url", part.image_url))
        else:
            parts.append(part.text)
    return with_parts(path, parts, role=role, **fields)
