"""Parse and validate requests of OpenAI's chat API. Every refusal names field, rule and
value.

Invariant: each field of a request falls into one of five classes, and `docs/GATEWAY.md`
lists them all. It is honored (the fields of the models below); it is overridden by the
run where the session is pinned (`PINNED_FIELDS`); it has a value without effect; it is
unread, so that the session ignores and records it, or refuses it (`fields.py`); or the
request is refused.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, Field, ValidationError
from pydantic_core import PydanticCustomError

from rollweave.io.http.fields import UNKNOWN_FIELD
from rollweave.io.http.messages import (
    ChatMessage,
    OpenModel,
    first_problem,
    other_than,
    read_message,
)
from rollweave.rollout.gateway.fields import (
    Ask,
    Formats,
    Reading,
    RequestError,
    Strict,
    Unread,
    bad,
    template_asks,
    thinking_ask,
)
from rollweave.schema.base import Struct
from rollweave.schema.chat import Message
from rollweave.schema.serving import COLDEST, Adjustments, Constraint


class PromptForm(Struct, frozen=True, kw_only=True):
    """The form of a prompt's tokens: with or without the special tokens that the
    tokenizer adds; with the opening of the agent's turn, or with the last message left
    open, or neither. The last `most` tokens are kept, or with `keeps_first` the first
    `most` tokens; -1 keeps as many tokens as fit into the context.
    """

    adds_special: bool = False
    opens_turn: bool = True
    continues_last: bool = False
    most: int | None = None
    keeps_first: bool = False


class ToolKind(Struct, frozen=True, kw_only=True):
    """A tool that a client knows under another form than the agent, which calls
    functions only: `kind` is its type in the client's API, `name` and `namespace` are
    its names there.
    """

    kind: str = "function"
    name: str
    namespace: str = ""


class ChatRequest(Struct, frozen=True, kw_only=True):
    """A parsed request. None means that the client leaves the value to the gateway.
    `tools` are JSON, one declaration each.

    `call` is the tool that the agent must call, "" for any tool, None if it need not
    call one. The agent's text is parsed for calls if `reads_calls`.

    A completion has a `prompt`, text or tokens, in place of messages. `allowed`
    restricts sampling to these tokens. With `prompt_logprobs`, its answer has the
    log-probs of the prompt; with `token_ids`, the ids of the answer's tokens; with
    `token_names`, tokens are named by their ids. `source` is the field with the
    conversation. `asks` are wishes for the chat template, and `unread` are fields that
    nothing here can read. `Session.readable` turns the wishes into
    `template_arguments`, a JSON object or "". `tool_kinds` are the forms of tools, by
    the names that the agent knows. With `divides`, thoughts are separated from the
    text; `thoughts_as` is how the answer shows them: "text", "summary", or "sealed".
    `constraint` applies to the agent's text, unless the agent calls a tool;
    `constraint_field` is the field that demands it.

    The other fields belong to requests outside of a run (`served.py`): `others` are the
    further choices of the same request, and `repeats` is true for a choice that has the
    same prompt as the choice before. `top_logprobs` is the number of alternatives shown
    for each sampled token, and `prompt_top` for each token of the prompt. With
    `only_prompt`, sampled tokens are not shown; with `usage_always`, each part of a
    stream has the usage so far.
    """

    model: str
    messages: tuple[Message, ...] = ()
    source: str = "messages"
    tools: tuple[str, ...] = ()
    template_arguments: str = ""
    asks: tuple[Ask, ...] = ()
    unread: tuple[Unread, ...] = ()
    tool_kinds: dict[str, ToolKind] = msgspec.field(default_factory=dict)
    divides: bool = True
    thoughts_as: Literal["text", "summary", "sealed"] = "text"
    constraint: Constraint | None = None
    constraint_field: str = ""
    call: str | None = None
    reads_calls: bool = False
    one_call: bool = False
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    stream: bool = False
    include_usage: bool = False
    prompt: str | tuple[int, ...] | None = None
    allowed: tuple[int, ...] = ()
    prompt_logprobs: bool = False
    token_ids: bool = False
    token_names: bool = False
    others: tuple["ChatRequest", ...] = ()
    repeats: bool = False
    adjustments: Adjustments | None = None
    logprob_ids: tuple[int, ...] = ()
    prompt_top: int = 0
    prompt_form: PromptForm = PromptForm()
    hides_special: bool = False
    shows_stop: bool = False
    echo: bool = False
    only_prompt: bool = False
    usage_always: bool = False

    @property
    def chars(self) -> int:
        """The number of characters that a chat template may show."""
        prompt = len(self.prompt) if isinstance(self.prompt, str) else 0
        return prompt + sum(map(len, self.tools)) + sum(message.chars for message in self.messages)


PINNED_FIELDS = ("temperature", "top_p", "top_k", "seed")
"""Fields that a pinned session accepts but ignores: the run decides how its turns are
sampled.
"""


TOOL_NAME = r"^[A-Za-z0-9_.:/-]{1,128}$"
"""Names of tools."""


class _Declared(OpenModel):
    """A tool's declaration.

    The chat template shows all of it, so further fields are honored.
    """

    # The name becomes part of a grammar of calls, so it must not be able to spell a
    # special token.
    name: str = Field(pattern=TOOL_NAME)


class _Tool(OpenModel):
    type: Literal["function"]
    function: _Declared


class OtherTool(OpenModel):
    """A tool of a type that no agent here can call."""

    type: other_than("function")  # type: ignore[valid-type]


class _Named(Strict):
    name: str = Field(min_length=1)


class _Choice(Strict):
    type: Literal["function"]
    function: _Named


class OtherChoice(OpenModel):
    """A choice among tools of a type that is not honored."""

    type: other_than("function")  # type: ignore[valid-type]


class _StreamOptions(OpenModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


Model = TypeVar("Model", bound=BaseModel)

MAX_TOKENS = 100_000
"""Maximum number of JSON strings, commas and opening brackets in one request, enough
for ten thousand messages. Validating that many takes some tenths of a second, on a
thread.
"""


def _warm(temperature: float) -> float:
    if 0 < temperature < COLDEST:
        raise PydanticCustomError("rule", "must be 0, or at least {coldest}", {"coldest": COLDEST})
    return temperature


Temperature = Annotated[float, Field(ge=0, le=2), AfterValidator(_warm)]

StopText = Annotated[str, Field(min_length=1, max_length=1000)]
"""A text that ends a turn. Each token's text is compared with it."""

MAX_STOPS = 16
"""Maximum number of stop strings, and of stop tokens, in one request."""


class Common(OpenModel, Formats):
    """The fields that requests of several APIs share."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: Temperature | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = Field(
        None, max_length=MAX_STOPS
    )
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    def stops(self) -> tuple[str, ...]:
        """Return the stop texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def given(self) -> dict[str, Any]:
        """Return these fields as fields of `ChatRequest`. Raises RequestError."""
        options, (constraint, field) = self.stream_options, self.constraint()
        return {
            "model": self.model,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "seed": self.seed,
            "stop": self.stops(),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
            "stream": bool(self.stream),
            "include_usage": options is not None and bool(options.include_usage),
            "usage_always": options is not None
            and bool(options.include_usage and options.continuous_usage_stats),
            "constraint": constraint,
            "constraint_field": field,
        }


class Chat(Common):
    """The fields of a chat request."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(min_length=1)
    tools: Annotated[list[_Tool | OtherTool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | _Choice | OtherChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=1)

    def check_top(self) -> None:
        """Raise RequestError for log-probs of tokens that are not known."""
        if self.top_logprobs and self.temperature != 0:
            rule = "must be 0 unless temperature is 0: only the sampled token's is known"
            raise bad("top_logprobs", rule, self.top_logprobs)


def parse_chat(body: bytes) -> ChatRequest:
    """Parse the body of a chat request. Raises RequestError."""
    return chat_request(read(body, Chat))


def chat_request(chat: Chat) -> ChatRequest:
    """Return the request that has these fields. Raises RequestError."""
    reading = reading_of(chat)
    _ask(reading, chat)
    declared = list(_declared(reading, chat.tools))
    tools = tuple(
        json.dumps(tool.model_dump(exclude_unset=True), ensure_ascii=False) for tool in declared
    )
    names = [tool.function.name for tool in declared]
    choice, shared = chat.tool_choice, chat.given()
    call = forced_call(
        "tool_choice.function.name",
        choice.function.name if isinstance(choice, _Choice) else None,
        names,
        any_of="'required'" if choice == "required" else "",
    )
    check_free("tool_choice", call, shared["constraint"])
    if chat.top_logprobs and not chat.logprobs:
        raise bad("logprobs", "must be true where top_logprobs is more than 0", chat.logprobs)
    chat.check_top()
    if isinstance(choice, OtherChoice):
        reading.leave("tool_choice.type", choice.type, "must be function")
    messages = tuple(
        _message(message, place, reading) for place, message in enumerate(chat.messages)
    )
    return ChatRequest(
        **shared,
        messages=messages,
        tools=tools,
        asks=tuple(reading.asks),
        unread=tuple(reading.unread),
        call=call,
        reads_calls=bool(tools) and chat.tool_choice != "none",
        one_call=chat.parallel_tool_calls is False,
        max_tokens=min(
            (most for most in (chat.max_tokens, chat.max_completion_tokens) if most is not None),
            default=None,
        ),
        logprobs=bool(chat.logprobs),
        top_logprobs=chat.top_logprobs or 0,
    )


def reading_of(asked: Common) -> Reading:
    """Return a reading that has sorted the further fields of a request."""
    reading = Reading()
    reading.request(asked)
    if asked.stream_options is not None:
        reading.others("stream_options.", asked.stream_options)
    return reading


def _ask(reading: Reading, chat: Chat) -> None:
    """Read the wishes for the chat template."""
    reading.asks += template_asks(chat.chat_template_kwargs)
    if chat.enable_thinking is not None:
        reading.asks.append(
            thinking_ask("enable_thinking", chat.enable_thinking, thinks=chat.enable_thinking)
        )
    reading.effort("reasoning_effort", chat.reasoning_effort)
    reading.thinking("thinking", chat.thinking)
    for name, value in (chat.reasoning or {}).items():
        if name == "effort" and isinstance(value, str):
            reading.effort("reasoning.effort", value)
        elif name == "enabled" and isinstance(value, bool):
            reading.asks.append(thinking_ask("reasoning.enabled", value, thinks=value))
        elif value is not None:
            reading.leave(f"reasoning.{name}", value, "must be null: no template reads it")


def _declared(reading: Reading, tools: Iterable[_Tool | OtherTool] | None) -> Iterator[_Tool]:
    """Yield the tools that the agent can call; other tools are left out."""
    for place, tool in enumerate(tools or ()):
        if isinstance(tool, _Tool):
            yield tool
        else:
            leave_tool(reading, place, tool.type)


def leave_tool(reading: Reading, place: int, kind: str) -> None:
    """Leave out a tool of a type that no agent here can call."""
    reading.leave(f"tools.{place}.type", kind, "must be function", action="left out")


def shown_text(
    content: str | Sequence[Any],
    path: str,
    reading: Reading,
    *,
    other: type[Any],
    text_of: Callable[[dict[str, Any]], object],
    first: int = 0,
) -> str:
    """Return the text of a message, whose parts are counted from `first` on. A part of
    the type `other` shows the text that `text_of` finds in it, or a placeholder.
    """
    if isinstance(content, str):
        return content
    texts = list[str]()
    for place, part in enumerate(content, first):
        if isinstance(part, other):
            text = text_of(part.model_extra or {})
            if not isinstance(text, str):
                text = reading.placeholder(f"{path}.{place}.type", part.type, "must be text")
            texts.append(text)
        else:
            reading.others(f"{path}.{place}.", part)
            texts.append(part.text)
    return "".join(texts)


def read(body: bytes, kind: type[Model], *, most: int = MAX_TOKENS) -> Model:
    """Read a request. Raises RequestError: 400, or 413 for a body of more than `most`
    parts.
    """
    if _has_too_many_tokens(body, most):
        raise RequestError(
            413, f"the body must have at most {most} strings, commas and brackets, got more"
        )
    try:
        asked = kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error, kind) from None
    _check_finite(body)
    return asked


def _check_finite(body: bytes) -> None:
    """Raise RequestError for a number beyond the range of a float, in a schema or tool:
    it would be infinite, which JSON cannot be.
    """

    def number(text: str) -> float:
        if math.isinf(value := float(text)):
            raise RequestError(400, f"numbers must be at most 1.8e308, got {text:.80}")
        return value

    try:  # finding one takes longer than decoding all
        msgspec.json.decode(body)
        if LONG not in body.translate(_ZEROS):
            return
    except (ValueError, RecursionError):
        pass
    with contextlib.suppress(ValueError, RecursionError):  # the reader reports what is wrong
        json.loads(body, parse_float=number, parse_int=number)


LONG = b"0" * 309
"""The digits of an integer beyond the range of a float."""

_ZEROS = bytes.maketrans(b"123456789", b"000000000")


def _has_too_many_tokens(body: bytes, most: int) -> bool:
    """Return whether JSON has more than `most` strings, commas and opening brackets.
    They are counted only if the bytes that could be part of them are many.
    """
    if sum(map(body.count, (b",", b"[", b"{", b'"'))) <= most:
        return False
    # without escapes, every second part between quotation marks is a string
    parts = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    outside = b"".join(parts[::2])
    return len(parts) // 2 + sum(map(outside.count, (b",", b"[", b"{"))) > most


def forced_call(field: str, name: str | None, tools: list[str], *, any_of: str) -> str | None:
    """Return the tool that must be called, in the form of `ChatRequest.call`: the tool
    that `field` names, or any tool if `tool_choice` is `any_of`. Raises RequestError
    for a tool that is not there.
    """
    if name is not None:
        if name not in tools:
            raise bad(field, f"must be one of the tools {tools}", name)
        return name
    if any_of and not tools:
        raise bad("tools", f"must hold a tool where tool_choice is {any_of}", tools)
    return "" if any_of else None


def check_free(field: str, call: str | None, constraint: Constraint | None) -> None:
    """Raise RequestError if a call is forced by `field`, and the form of the answer is
    constrained.
    """
    if call is not None and constraint is not None:
        rule = "must be auto or none where the form of the answer is constrained"
        raise bad(field, rule, constraint.text)


def _message(message: ChatMessage, place: int, reading: Reading) -> Message:
    path = f"messages.{place}"
    if message.role == "tool" and message.tool_call_id is None:
        raise bad(f"{path}.tool_call_id", "must name the call that the tool answers", None)
    return read_message(message, path, reading)


def _refusal(error: ValidationError, kind: type[BaseModel]) -> RequestError:
    """Return the first error."""
    path, rule, got = first_problem(error, kind)
    name = ".".join(path)
    if rule == UNKNOWN_FIELD:
        return bad(name, rule, got)
    is_json = error.errors(include_url=False)[0]["type"] != "json_invalid"
    value = f", got {got!r:.80}" if is_json else ""
    return RequestError(400, f"{name or 'body'}: {rule}{value}", param=name or None)
