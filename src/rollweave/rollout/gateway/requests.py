"""Parse and validate requests of OpenAI's chat API. Every refusal names field, rule and
value.

Invariant: each field of a request falls into one of four classes, and `docs/GATEWAY.md`
lists them all. It is honored (the fields of the models below), it is overridden by the
run where the session is pinned (`PINNED_FIELDS`), it has a value without effect
(`io/http/fields.py`, and the tables here for messages), or the request is refused.
"""

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from rollweave.io.http.fields import UNKNOWN_FIELD, refused_field
from rollweave.rollout.gateway.formats import Formats
from rollweave.rollout.gateway.refusals import RequestError, bad
from rollweave.schema.base import Struct
from rollweave.schema.chat import Message, Role, ToolCall, message_of
from rollweave.schema.media import Image
from rollweave.schema.serving import COLDEST, Constraint


class ChatRequest(Struct, frozen=True, kw_only=True):
    """A parsed request. None means that the client leaves the value to the gateway.
    `tools` are JSON, one declaration each.

    `call` is the tool that the agent must call, "" for any tool, None if it need not
    call one. The agent's text is parsed for calls if `reads_calls`.

    A completion has a `prompt`, text or tokens, in place of messages. `allowed`
    restricts sampling to these tokens. With `prompt_logprobs`, its answer has those of
    the prompt; with `token_ids`, those of the answer's tokens; with `token_names`,
    tokens are named by their ids. `source` is the field with the conversation.
    `template_arguments` are those of the chat template: a JSON object, or "".
    `constraint` is that of the agent's text, which it leaves to call a tool;
    `constraint_field` is the field that demands it.
    """

    model: str
    messages: tuple[Message, ...] = ()
    source: str = "messages"
    tools: tuple[str, ...] = ()
    template_arguments: str = ""
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


PINNED_FIELDS = ("temperature", "top_p", "top_k", "seed")
"""Fields that a pinned session accepts but ignores: the run decides how its turns are
sampled.
"""

MESSAGE_NEUTRAL: dict[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": (),
    "partial": (False,),
    "prefix": (False,),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "refusal": ("",),
    "thinking": ("",),
    "thinking_blocks": ([],),
    "tools": ([],),
}
"""Fields of a message that other servers put into the prompt → their values without
effect.
"""

ECHOED = frozenset(
    (
        "annotations",
        "cache_control",
        "parsed",
        "prompt_cache_breakpoint",
        "provider_specific_fields",
    )
)
"""Fields of a message, or of a part of one, that clients add or echo and that no prompt
shows.
"""

CALL_ECHOED = frozenset(("extra_content", "index", "parsed_arguments", "provider_specific_fields"))
"""Fields of a tool call that clients add or echo and that no prompt shows."""


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class OpenModel(BaseModel):
    """A model that keeps further fields, for `check_others`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class _Function(OpenModel):
    name: str = Field(min_length=1)
    arguments: str = "{}"


class _Call(OpenModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: _Function


class _Part(OpenModel):
    type: Literal["text"]
    text: str


class _Url(OpenModel):
    url: str
    detail: Literal["auto"] | None = None


class _ImagePart(OpenModel):
    type: Literal["image_url"]
    image_url: _Url


class _Message(OpenModel):
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | Annotated[list[_Part | _ImagePart], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[_Call], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    name: str | None = None


TOOL_NAME = r"^[A-Za-z0-9_.:/-]{1,128}$"
"""Names of tools."""


class _Declared(OpenModel):
    """A tool's declaration.

    The chat template shows all of it, so further fields are honored.
    """

    # The name may become part of a forced prefix of the agent's message, so it must not
    # be able to spell a special token.
    name: str = Field(pattern=TOOL_NAME)


class _Tool(OpenModel):
    type: Literal["function"]
    function: _Declared


class _Named(Strict):
    name: str = Field(min_length=1)


class _Choice(Strict):
    type: Literal["function"]
    function: _Named


class _StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


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
        """Return the fields of `ChatRequest` that these are. Raises RequestError."""
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
            "constraint": constraint,
            "constraint_field": field,
        }


class _Chat(Common):
    messages: Annotated[list[_Message], Field(fail_fast=True)] = Field(min_length=1)
    tools: Annotated[list[_Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | _Choice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=1)


def parse_chat(body: bytes) -> ChatRequest:
    """Parse the body of a chat request. Raises RequestError."""
    chat = read(body, _Chat)
    check_others("", chat)
    tools = tuple(
        json.dumps(tool.model_dump(exclude_unset=True), ensure_ascii=False)
        for tool in chat.tools or ()
    )
    names = [tool.function.name for tool in chat.tools or ()]
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
    if chat.top_logprobs and chat.temperature != 0:
        raise bad(
            "top_logprobs",
            "must be 0 unless temperature is 0: only the sampled token's is known",
            chat.top_logprobs,
        )
    return ChatRequest(
        **shared,
        messages=tuple(_message(message, place) for place, message in enumerate(chat.messages)),
        tools=tools,
        template_arguments=template_arguments(
            chat.chat_template_kwargs,
            enable_thinking=chat.enable_thinking,
            reasoning_effort=chat.reasoning_effort,
        ),
        call=call,
        reads_calls=bool(tools) and chat.tool_choice != "none",
        one_call=chat.parallel_tool_calls is False,
        max_tokens=min(
            (each for each in (chat.max_tokens, chat.max_completion_tokens) if each is not None),
            default=None,
        ),
        logprobs=bool(chat.logprobs),
        top_logprobs=chat.top_logprobs or 0,
    )


def template_arguments(given: dict[str, Any] | None, **alone: object) -> str:
    """Return the arguments of the chat template: those `given` together, and those that
    fields of their own name. Raises RequestError if they disagree about one.
    """
    arguments = dict(given or {})
    for name, value in alone.items():
        if value is not None and arguments.setdefault(name, value) != value:
            rule = f"must be that of chat_template_kwargs ({arguments[name]!r:.80})"
            raise bad(name, rule, value)
    return json.dumps(arguments, sort_keys=True) if arguments else ""


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

    try:  # to find one takes longer than to decode all
        msgspec.json.decode(body)
        if LONG not in body.translate(_ZEROS):
            return
    except (ValueError, RecursionError):
        pass
    with contextlib.suppress(ValueError, RecursionError):  # the reader says what is wrong
        json.loads(body, parse_float=number, parse_int=number)


LONG = b"0" * 309
"""The digits of an integer beyond the range of a float."""

_ZEROS = bytes.maketrans(b"123456789", b"000000000")


def _has_too_many_tokens(body: bytes, most: int) -> bool:
    """Count the strings, commas and opening brackets of JSON, unless all bytes that
    could be part of one are few.
    """
    if sum(map(body.count, (b",", b"[", b"{", b'"'))) <= most:
        return False
    # without escapes, every second part between quotation marks is a string
    parts = body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    outside = b"".join(parts[::2])
    return len(parts) // 2 + sum(map(outside.count, (b",", b"[", b"{"))) > most


def forced_call(field: str, name: str | None, tools: list[str], *, any_of: str) -> str | None:
    """Return the tool that must be called, in the form of `ChatRequest.call`: the one
    that `field` names, or any of them where `tool_choice` is `any_of`. Raises
    RequestError for a tool that is not there.
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


def check_others(path: str, model: OpenModel, **tables: Any) -> None:
    """Raise RequestError for a field that the model lacks and whose value has an
    effect.
    """
    others = model.model_extra or {}
    refusal = refused_field(others, **tables)
    if refusal is not None:
        name, rule = refusal
        raise bad(path + name, rule, others[name])


def _check_message(message: _Message, path: str) -> None:
    """Raise RequestError for an unsupported field of the message, or within it, whose
    value has an effect.
    """
    check_others(path, message, neutral=MESSAGE_NEUTRAL, without_effect=ECHOED)
    for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
        check_others(f"{path}content.{place}.", part, neutral={}, without_effect=ECHOED)
        if isinstance(part, _ImagePart):
            check_others(f"{path}content.{place}.image_url.", part.image_url, neutral={})
    for place, call in enumerate(message.tool_calls or ()):
        check_others(f"{path}tool_calls.{place}.", call, neutral={}, without_effect=CALL_ECHOED)
        check_others(
            f"{path}tool_calls.{place}.function.",
            call.function,
            neutral={},
            without_effect=CALL_ECHOED,
        )


def _message(message: _Message, place: int) -> Message:
    _check_message(message, f"messages.{place}.")
    content = message.content
    role: Role = "system" if message.role == "developer" else message.role
    if content is None and role != "assistant":
        raise bad(f"messages.{place}.content", "must be text", None)
    if message.tool_calls and role != "assistant":
        raise bad(f"messages.{place}.tool_calls", "must be those of an assistant", role)
    if role == "tool" and message.tool_call_id is None:
        raise bad(
            f"messages.{place}.tool_call_id", "must name the call that the tool answers", None
        )
    path = f"messages.{place}.content"
    parts: list[str | Image] = [content] if isinstance(content, str) else []
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, _ImagePart):
            parts.append(image_at(f"{path}.{number}.image_url.url", part.image_url.url))
        else:
            parts.append(part.text)
    return with_parts(
        path,
        parts,
        role=role,
        tool_calls=tuple(
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        ),
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def image_at(path: str, text: str, *, of: Callable[[str], Image] = Image.of_url) -> Image:
    """Return the image in a data: URL, or what else `of` reads. Raises RequestError,
    which names the field.
    """
    try:
        return of(text)
    except ValueError as error:
        raise RequestError(400, f"{path}: {error}", param=path) from error


def with_parts(path: str, parts: Iterable[str | Image], *, role: Role, **fields: Any) -> Message:
    """Return the message with these parts. Raises RequestError, which names the field,
    for images where they cannot be.
    """
    try:
        return message_of(parts, role=role, **fields)
    except ValueError as error:
        raise RequestError(400, f"{path}: {error}", param=path) from error


def _refusal(error: ValidationError, kind: type[BaseModel]) -> RequestError:
    """Return the first error.

    A union reports every branch. The deepest location is what the client meant, and of
    several the branch of which the value has the type.
    """
    problem = max(
        error.errors(include_url=False),
        key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")),
    )
    fields = _field_names(kind)
    path = [str(part) for part in problem["loc"] if isinstance(part, int) or part in fields]
    if problem["type"] == "extra_forbidden":
        name = ".".join((*path, str(problem["loc"][-1])))
        return bad(name, UNKNOWN_FIELD, problem["input"])
    name = ".".join(path) or "body"
    rule = problem["msg"].partition(", got ")[0]
    value = "" if problem["type"] == "json_invalid" else f", got {problem['input']!r:.80}"
    return RequestError(400, f"{name}: {rule}{value}", param=name if path else None)


@functools.cache
def _field_names(kind: type[BaseModel]) -> frozenset[str]:
    """Return the names of the fields of a request: pydantic's locations also contain
    names of a union's branches.
    """
    schema = kind.model_json_schema()
    models = [schema, *schema.get("$defs", {}).values()]
    return frozenset(name for model in models for name in model.get("properties", {}))
