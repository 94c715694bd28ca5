"""Read messages in the form of OpenAI's chat API, from requests and from the user's
files. null is the same as absent.

Invariant: nothing is left out silently: a field that no prompt can show passes only if
it is null or has a value without effect, or if the caller's `Reading` says so.
"""

import functools
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from rollweave.io.http.fields import UNKNOWN_FIELD, refused_field, shown
from rollweave.schema.chat import Message, Role, ToolCall

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
        "author",
        "cache_control",
        "caller",
        "citations",
        "eager_input_streaming",
        "extra_content",
        "id",
        "index",
        "internal_chat_message_metadata_passthrough",
        "logprobs",
        "parsed",
        "parsed_arguments",
        "phase",
        "prompt_cache_breakpoint",
        "provider_specific_fields",
        "status",
    )
)
"""Fields of a message, or of a part of a message, that clients add or echo and that no
prompt shows.
"""


class OpenModel(BaseModel):
    """A model that keeps further fields, for `Reading.others`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def _as_text(arguments: object) -> object:
    """Return the arguments of a call as text, the form of the API: data sets may have
    them as objects.
    """
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


def other_than(*known: str) -> Any:
    """Return the type of a field `type` that must have none of the `known` values."""

    def check(kind: str) -> str:
        if kind in known:
            raise PydanticCustomError("rule", "must have the fields of its type")
        return kind

    return Annotated[str, Field(max_length=64), AfterValidator(check)]


class OtherPart(OpenModel):
    type: other_than("text")  # type: ignore[valid-type]


class ChatMessage(OpenModel):
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart | OtherPart], Field(fail_fast=True)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    thinking_blocks: list[dict[str, Any]] | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class Reading(Protocol):
    """Decides about fields and parts that a prompt may be unable to show."""

    def refusal(self, field: str, message: str) -> Exception:
        """Return the error of a field that breaks a rule."""

    def others(
        self, path: str, model: OpenModel, *, neutral: Mapping[str, tuple[object, ...]] = ...
    ) -> None:
        """Decide about the fields that the model lacks. Raises an error for a field
        that must be refused.
        """

    def leave(self, field: str, value: Any, rule: str) -> None:
        """Leave out a value, or raise an error."""

    def thoughts(self, field: str, text: str) -> str:
        """Return an assistant's thoughts."""

    def placeholder(self, field: str, what: str, rule: str, *, value: Any = None) -> str:
        """Return the text in place of a part of a message, or raise an error."""


class StrictReading:
    """Refuses every value that would have an effect in another server. Raises
    ValueError.
    """

    def refusal(self, field: str, message: str) -> Exception:
        return ValueError(message)

    def others(
        self, path: str, model: OpenModel, *, neutral: Mapping[str, tuple[object, ...]] = {}
    ) -> None:
        others = model.model_extra or {}
        refusal = refused_field(others, neutral=neutral, without_effect=ECHOED)
        if refusal is not None:
            raise _broken(self, path + refusal[0], refusal[1], others[refusal[0]])

    def leave(self, field: str, value: Any, rule: str) -> None:
        raise _broken(self, field, rule, value)

    def thoughts(self, field: str, text: str) -> str:
        return text

    def placeholder(self, field: str, what: str, rule: str, *, value: Any = None) -> str:
        raise _broken(self, field, rule, what if value is None else value)


def read_message(message: ChatMessage, path: str, reading: Reading) -> Message:
    """Return the message at `path`. Raises the reading's refusal."""
    reading.others(f"{path}.", message, neutral=MESSAGE_NEUTRAL)
    content = message.content
    role: Role = "system" if message.role == "developer" else message.role
    if content is None and role != "assistant":
        raise _broken(reading, f"{path}.content", "must be text", None)
    if message.tool_calls and role != "assistant":
        raise _broken(reading, f"{path}.tool_calls", "must be those of an assistant", role)
    for place, call in enumerate(message.tool_calls or ()):
        reading.others(f"{path}.tool_calls.{place}.", call)
        reading.others(f"{path}.tool_calls.{place}.function.", call.function)
    thoughts = _thoughts(message, path, reading)
    parts = [content] if isinstance(content, str) else []
    for place, part in enumerate(() if content is None or isinstance(content, str) else content):
        where = f"{path}.content.{place}"
        if isinstance(part, OtherPart):
            text = (part.model_extra or {}).get(part.type)
            if part.type in ("thinking", "reasoning") and isinstance(text, str):
                thoughts += reading.thoughts(where, text)
            else:
                parts.append(reading.placeholder(f"{where}.type", part.type, "must be text"))
        else:
            reading.others(f"{where}.", part)
            parts.append(part.text)
    return Message(
        role=role,
        content="".join(parts),
        tool_calls=tuple(
            ToolCall(id=call.id or "", name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        ),
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
        thoughts=thoughts if role == "assistant" else "",
    )


def read_messages(value: object, path: str) -> tuple[Message, ...]:
    """Return the messages of the JSON list at `path`. Raises ValueError."""
    try:
        messages = _LIST.validate_python(value)
    except ValidationError as error:
        place, rule, got = first_problem(error, ChatMessage)
        field = ".".join((path, *place))
        raise ValueError(f"{shown(field)}: {rule}, got {got!r:.80}") from error
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

    A union reports an error for every branch. The deepest location is in the branch
    that was meant; among equally deep locations, it is the branch whose type the value
    has.
    """
    problem = max(
        error.errors(include_url=False),
        key=lambda found: (len(found["loc"]), not found["type"].endswith("_type")),
    )
    fields = _field_names(kind)
    path = [str(part) for part in problem["loc"] if isinstance(part, int) or part in fields]
    if problem["type"] == "extra_forbidden":
        return (*path, str(problem["loc"][-1])), UNKNOWN_FIELD, problem["input"]
    is_object = problem["type"] == "model_type"
    rule = "Input should be an object" if is_object else problem["msg"].partition(", got ")[0]
    return tuple(path), rule, problem["input"]


def _broken(reading: Reading, field: str, rule: str, value: object) -> Exception:
    return reading.refusal(field, f"{shown(field)} {rule}, got {value!r:.80}")


def _thoughts(message: ChatMessage, path: str, reading: Reading) -> str:
    """Return what an assistant thought before it wrote the content."""
    blocks = message.thinking_blocks or ()
    told = {
        "reasoning_content": message.reasoning_content,
        "reasoning": message.reasoning,
        "thinking": message.thinking,
        "thinking_blocks": "".join(
            text for block in blocks if isinstance(text := block.get("thinking"), str)
        ),
    }
    name, thoughts = next(((name, text) for name, text in told.items() if text), ("", ""))
    return reading.thoughts(f"{path}.{name}", thoughts)


@functools.cache
def _field_names(kind: type[BaseModel]) -> frozenset[str]:
    """Return the names of the fields of a model: pydantic's locations also contain
    names of a union's branches.
    """
    schema = kind.model_json_schema()
    models = [schema, *schema.get("$defs", {}).values()]
    return frozenset(name for model in models for name in model.get("properties", {}))
