"""Read messages as OpenAI's chat API has them: those of requests, and those of the
user's files. null is the same as absent.

Invariant: nothing is left out silently: a field that no prompt can show passes only if
it is null or has a value without effect, or if the caller's `Reading` says so.
"""

import functools
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from rollweave.io.http.fields import UNKNOWN_FIELD, refused_field, shown
from rollweave.schema.chat import Message, Role, ToolCall, message_of
from rollweave.schema.media import Image

MESSAGE_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": (),
    "partial": (False,),
    "prefix": (False,),
    "refusal": ("",),
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


class FieldError(ValueError):
    """A field breaks a rule: the message names field, rule and value."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field

    @classmethod
    def of(cls, field: str, rule: str, value: object) -> Self:
        """Return the error of a value that breaks the rule."""
        return cls(field, f"{shown(field)} {rule}, got {value!r:.80}")


class OpenModel(BaseModel):
    """A model that keeps further fields, for `Reading.others`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def _as_text(arguments: object) -> object:
    """Return arguments in the form of the API: data sets have them as objects, too."""
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    return "{}" if arguments is None else arguments


class Function(OpenModel):
    name: str = Field(min_length=1)
    arguments: Annotated[str, BeforeValidator(_as_text)] = "{}"


class Call(OpenModel):
    id: str | None = ""
    type: Literal["function"] | None = "function"
    function: Function


class TextPart(OpenModel):
    type: Literal["text"]
    text: str


class ImageUrl(OpenModel):
    url: str
    detail: Literal["auto"] | None = None


class ImagePart(OpenModel):
    type: Literal["image_url"]
    image_url: ImageUrl


class ChatMessage(OpenModel):
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart | ImagePart], Field(fail_fast=True)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    thinking_blocks: list[dict[str, Any]] | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class Reading(Protocol):
    """Decides about what a prompt cannot show."""

    def others(
        self,
        path: str,
        model: OpenModel,
        *,
        neutral: Mapping[str, tuple[object, ...]],
        without_effect: Collection[str],
    ) -> None:
        """Decide about the fields that the model lacks. Raises an error for one that
        must be refused.
        """


class StrictReading:
    """Refuses every value that has an effect elsewhere. Raises FieldError."""

    def others(
        self,
        path: str,
        model: OpenModel,
        *,
        neutral: Mapping[str, tuple[object, ...]],
        without_effect: Collection[str],
    ) -> None:
        others = model.model_extra or {}
        refusal = refused_field(others, neutral=neutral, without_effect=without_effect)
        if refusal is not None:
            raise FieldError.of(path + refusal[0], refusal[1], others[refusal[0]])


def read_message(message: ChatMessage, path: str, reading: Reading) -> Message:
    """Return a message, which is at `path`. Raises FieldError."""
    reading.others(f"{path}.", message, neutral=MESSAGE_NEUTRAL, without_effect=ECHOED)
    content = message.content
    role: Role = "system" if message.role == "developer" else message.role
    if content is None and role != "assistant":
        raise FieldError.of(f"{path}.content", "must be text", None)
    if message.tool_calls and role != "assistant":
        raise FieldError.of(f"{path}.tool_calls", "must be those of an assistant", role)
    for place, call in enumerate(message.tool_calls or ()):
        each = f"{path}.tool_calls.{place}."
        reading.others(each, call, neutral={}, without_effect=CALL_ECHOED)
        reading.others(f"{each}function.", call.function, neutral={}, without_effect=CALL_ECHOED)
    parts = [content] if isinstance(content, str) else list(_parts(content or (), path, reading))
    fields: dict[str, Any] = {
        "tool_calls": tuple(
            ToolCall(id=call.id or "", name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        ),
        "tool_call_id": message.tool_call_id or "",
        "name": message.name or "",
        "thoughts": _thoughts(message) if role == "assistant" else "",
    }
    try:
        return message_of(parts, role=role, **fields)
    except ValueError as error:  # images where they cannot be
        raise FieldError(f"{path}.content", f"{path}.content: {error}") from error


def read_messages(value: object, path: str) -> tuple[Message, ...]:
    """Return the messages of a JSON list, which is at `path`. Raises FieldError."""
    try:
        messages = _LIST.validate_python(value)
    except ValidationError as error:
        place, rule, got = first_problem(error, ChatMessage)
        field = ".".join((path, *place))
        raise FieldError(field, f"{shown(field)}: {rule}, got {got!r:.80}") from error
    strict = StrictReading()
    return tuple(
        read_message(message, f"{path}.{place}", strict) for place, message in enumerate(messages)
    )


_LIST = TypeAdapter(
    Annotated[list[ChatMessage], Field(fail_fast=True)], config=ConfigDict(strict=True)
)


def first_problem(
    error: ValidationError, kind: type[BaseModel]
) -> tuple[tuple[str, ...], str, object]:
    """Return the path, the broken rule and the value of the first error.

    A union reports every branch. The deepest location is what was meant, and of several
    the branch of which the value has the type.
    """
    problem = max(
        error.errors(include_url=False),
        key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")),
    )
    fields = _field_names(kind)
    path = [str(part) for part in problem["loc"] if isinstance(part, int) or part in fields]
    if problem["type"] == "extra_forbidden":
        return (*path, str(problem["loc"][-1])), UNKNOWN_FIELD, problem["input"]
    is_object = problem["type"] == "model_type"
    rule = "Input should be an object" if is_object else problem["msg"].partition(", got ")[0]
    return tuple(path), rule, problem["input"]


def _parts(
    content: Iterable[TextPart | ImagePart], path: str, reading: Reading
) -> Iterable[str | Image]:
    for place, part in enumerate(content):
        field = f"{path}.content.{place}."
        reading.others(field, part, neutral={}, without_effect=ECHOED)
        if isinstance(part, TextPart):
            yield part.text
        else:
            url = f"{field}image_url."
            reading.others(url, part.image_url, neutral={}, without_effect=())
            try:
                yield Image.of_url(part.image_url.url)
            except ValueError as error:
                raise FieldError(f"{url}url", f"{url}url: {error}") from error


def _thoughts(message: ChatMessage) -> str:
    """Return what an assistant thought before it wrote the content."""
    told = message.reasoning_content or message.reasoning or message.thinking
    blocks = message.thinking_blocks or ()
    return told or "".join(
        text for block in blocks if isinstance(text := block.get("thinking"), str)
    )


@functools.cache
def _field_names(kind: type[BaseModel]) -> frozenset[str]:
    """Return the names of the fields of a model: pydantic's locations also contain
    names of a union's branches.
    """
    schema = kind.model_json_schema()
    models = [schema, *schema.get("$defs", {}).values()]
    return frozenset(name for model in models for name in model.get("properties", {}))
