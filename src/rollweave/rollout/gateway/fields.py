"""The errors that answer a client, and the fields of requests that all APIs read in the
same way: fields that no server here honors, in one table; wishes for the chat template;
and the form that a client demands of an answer.

Invariants: every refusal names field, rule and value. A field that would change how
tokens are chosen, or that the answer would have to obey, is refused by its name. A
field that asks for nothing, or by its nature changes nothing, passes. Every other field
that the model, its chat template or this server cannot read is `Unread`: the session
ignores the field and records it, or refuses it. A form that cannot be constrained is
refused; nothing is sampled without the constraint that the client asked for. Grammars
are compiled later, by another process (`engine/matchers`).
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollweave.engine.matchers import refused_text
from rollweave.io.http import fields
from rollweave.io.http.fields import UNKNOWN_FIELD, openai_error, refused_field, shown
from rollweave.io.http.messages import ECHOED
from rollweave.schema.base import Struct
from rollweave.schema.errors import RollweaveError
from rollweave.schema.serving import Constraint
from rollweave.schema.work import Ignored


class RequestError(RollweaveError):
    """The client's request cannot be fulfilled.

    The attributes are the HTTP status and the fields of OpenAI's error object.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, object]:
        """Return OpenAI's error object."""
        return openai_error(self.status, str(self), param=self.param, code=self.code)


class TooLongError(RequestError):
    """A prompt does not fit into the context. Each API has its own text for this error,
    by which agent programs know that they must shorten their conversation. `tokens` is
    the number of tokens of the prompt, or a lower bound of it; `limit` is the maximum.
    """

    def __init__(self, message: str, *, param: str, tokens: int, limit: int) -> None:
        super().__init__(400, message, param=param, code="context_length_exceeded")
        self.tokens, self.limit = tokens, limit


def bad(param: str, rule: str, value: object) -> RequestError:
    """Return the refusal of a field's value."""
    return RequestError(400, f"{shown(param)} {rule}, got {value!r:.80}", param=param)


NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    **fields.NEUTRAL,
    # Honored by other APIs only.
    "logprobs": (False,),
    "max_completion_tokens": (),
    "max_output_tokens": (),
    "max_tokens": (),
    "seed": (),
    "stop": (),
    "stop_sequences": ([],),
    "stop_token_ids": ([],),
    "top_k": (),
    # Anthropic's Messages.
    "container": (),
    "context_management": ([], {"edits": []}),
    "diagnostics": (),
    "mcp_servers": ([],),
    # OpenAI's Responses.
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "conversation": (),
    "image": (),
    "include": ([], ["reasoning.encrypted_content"]),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Field of a request → its values, other than null, that ask for nothing."""

UNREADABLE: Final = frozenset(
    (
        "access_programs",
        "allowed_callers",
        "background_options",
        "container",
        "context_management",
        "defer_loading",
        "diagnostics",
        "image",
        "images_config",
        "include",
        "include_reasoning",
        "input_examples",
        "max_tool_calls",
        "mcp_servers",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "moderation",
        "reasoning",
        "separate_reasoning",
        "stream_reasoning",
        "thinking",
        "thinking_token_budget",
        "truncation",
        "verbosity",
        "web_search_options",
    )
)
"""Fields of `NEUTRAL` whose other values ask for something that the model, its template
or this server does not have: without them, the answer is still valid.
"""

WITHOUT_EFFECT: Final = fields.WITHOUT_EFFECT | {
    "betas",
    "cache_control",
    "client_metadata",
    "inference_geo",
    "speed",
    "user_profile_id",
    "workspace_id",
}
"""Fields of a request that name, account for, store or schedule it."""

SHOWN: Final = 80
"""Number of characters of an ignored value that are recorded."""

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Unread(Struct, frozen=True, kw_only=True):
    """A field that is not honored because nothing here can read it. `rule` is the text
    with which a session refuses the field; `action` is how other sessions handle it. A
    model that has thoughts can read a field `of_thoughts`.
    """

    field: str
    value: Any
    rule: str
    action: str = "ignored"
    of_thoughts: bool = False

    def recorded(self) -> Ignored:
        """Return the entry of the trace, which is equal for the same field in other
        messages.
        """
        return Ignored(
            field=_NUMBER.sub("*", self.field), value=f"{self.value!r:.{SHOWN}}", action=self.action
        )


class Ask(Struct, frozen=True, kw_only=True):
    """A wish that some chat templates can read: `arguments` are (name, value) pairs of
    template arguments; any of the pairs expresses the wish. `thinks` is whether it asks
    for thoughts, which a model may have, or lack, without a template argument.
    """

    field: str
    value: Any
    arguments: tuple[tuple[str, Any], ...] = ()
    thinks: bool | None = None


def thinking_ask(field: str, value: Any, *, thinks: bool) -> Ask:
    """Return the wish that the model thinks, or does not."""
    names = ("enable_thinking", "thinking")
    return Ask(
        field=field, value=value, arguments=tuple((name, thinks) for name in names), thinks=thinks
    )


def effort_ask(field: str, effort: str) -> Ask:
    """Return the wish that the model thinks as much as `effort` says."""
    if effort == "none":
        return thinking_ask(field, effort, thinks=False)
    return Ask(field=field, value=effort, arguments=(("reasoning_effort", effort),))


def template_asks(given: Mapping[str, Any] | None) -> Iterable[Ask]:
    """Yield the wishes of `chat_template_kwargs`."""
    for name, value in (given or {}).items():
        yield Ask(field=f"chat_template_kwargs.{name}", value=value, arguments=((name, value),))


class Reading:
    """Collects the wishes of a request and its unread fields while it is read."""

    def __init__(self) -> None:
        self.asks: list[Ask] = []
        self.unread: list[Unread] = []

    def refusal(self, field: str, message: str) -> Exception:
        """Return the refusal of a field."""
        return RequestError(400, message, param=field)

    def leave(self, field: str, value: Any, rule: str, *, action: str = "ignored") -> None:
        """Leave out a field, or a part of a message."""
        self.unread.append(Unread(field=field, value=value, rule=rule, action=action))

    def thoughts(self, field: str, text: str) -> str:
        """Return thoughts of the agent, which a model without thoughts is not shown."""
        if text:
            rule = "must be empty: this model's chat template has no thoughts"
            self.unread.append(Unread(field=field, value=text, rule=rule, of_thoughts=True))
        return text

    def placeholder(self, field: str, what: str, rule: str, *, value: Any = None) -> str:
        """Leave out a part of a message; return the text in its place."""
        self.leave(field, value or what, rule, action="replaced by a text")
        return f"[{what}, which cannot be shown here]"

    def others(
        self,
        path: str,
        model: BaseModel,
        *,
        neutral: Mapping[str, tuple[object, ...]] = {},
        without_effect: Collection[str] = ECHOED,
    ) -> None:
        """Sort the fields that the model lacks. Raises RequestError for a field that
        must be refused.
        """
        for name, value in (model.model_extra or {}).items():
            refusal = refused_field({name: value}, neutral=neutral, without_effect=without_effect)
            if refusal is None:
                continue
            if refusal[1] != UNKNOWN_FIELD and name not in UNREADABLE:
                raise bad(path + name, refusal[1], value)
            self.leave(path + name, value, refusal[1])

    def request(self, model: BaseModel) -> None:
        """Sort the other fields of a request."""
        self.others("", model, neutral=NEUTRAL, without_effect=WITHOUT_EFFECT)

    def thinking(self, field: str, value: Mapping[str, Any] | None) -> None:
        """Read `{"type": "enabled" | "adaptive" | "disabled"}`."""
        for name, each in (value or {}).items():
            if name == "type" and each in ("enabled", "disabled"):
                self.asks.append(thinking_ask(field, value, thinks=each == "enabled"))
            elif name == "type" and each == "adaptive":
                self.asks.append(Ask(field=field, value=value, thinks=True))
            elif each is not None and name != "display":
                self.leave(f"{field}.{name}", each, "must be null: no template reads it")

    def effort(self, field: str, value: str | None) -> None:
        """Read how much the model should think."""
        if value is not None:
            self.asks.append(effort_ask(field, value))


def resolve(
    asks: Iterable[Ask], variables: Collection[str], *, thinks: bool
) -> tuple[str, list[Unread]]:
    """Return the template arguments that express the wishes, as JSON, or "" for none;
    and the wishes that the template does not read. `thinks` is whether the model
    thinks.

    Raises RequestError if two wishes contradict each other.
    """
    arguments: dict[str, Any] = {}
    wished: dict[str, Ask] = {}
    unread = list[Unread]()
    for ask in asks:
        for name, value in ask.arguments:
            other = dict(wished.setdefault(name, ask).arguments)[name]
            if other != value:
                rule = f"must agree with {wished[name].field} ({other!r:.80})"
                raise bad(ask.field, rule, ask.value)
        readable = [(name, value) for name, value in ask.arguments if name in variables]
        if readable:
            arguments.update(readable[:1])
        elif ask.thinks is None or ask.thinks is not thinks:
            reads = ", ".join(sorted(variables)) or "no arguments"
            rule = f"must be null: this model's chat template reads {reads}"
            unread.append(Unread(field=ask.field, value=ask.value, rule=rule))
    return (json.dumps(arguments, sort_keys=True) if arguments else ""), unread


ANY_OBJECT = '{"type": "object"}'
"""The schema of `json_object`."""

MAX_CHOICES = 1000
"""Maximum number of choices of one request."""

Schema = dict[str, Any] | bool


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Named(Strict):
    name: str
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Named | None = None


Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_CHOICES)]


class _Structured(Strict):
    """vLLM's `structured_outputs`."""

    json_: Schema | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None


class Formats(BaseModel):
    """The fields of a request that demand a form of its answer: OpenAI's, vLLM's,
    vLLM's former fields, SGLang's.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    response_format: ResponseFormat | None = None
    structured_outputs: _Structured | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    regex: str | None = None
    json_schema: str | None = None

    def constraint(self) -> tuple[Constraint | None, str]:
        """Return the constraint, if there is one, and its field. Raises RequestError
        for several constraints, and for a constraint that is too long.
        """
        wanted = self.response_format
        if wanted is not None and (wanted.type == "json_schema") is (wanted.json_schema is None):
            rule = f"must be given if, and only if, type is json_schema, and it is {wanted.type}"
            raise bad("response_format.json_schema", rule, wanted.json_schema)
        given = list(self._constraints())
        if not given:
            return None, ""
        field, constraint = given[0]
        if len(given) > 1:
            other, refused = given[1]
            raise bad(other, f"must be null where {field} is given", refused.text)
        return checked(field, constraint), field

    def _constraints(self) -> Iterator[tuple[str, Constraint]]:
        """Yield each constraint with the name of its field."""
        wanted, also = self.response_format, self.structured_outputs
        if wanted is not None and wanted.type == "json_object":
            yield "response_format", of_schema(ANY_OBJECT)
        if wanted is not None and wanted.json_schema is not None:
            schema = wanted.json_schema.schema_
            yield "response_format.json_schema.schema", of_schema({} if schema is None else schema)
        if also is not None:
            if also.json_ is not None:
                yield "structured_outputs.json", of_schema(also.json_)
            if also.json_object:
                yield "structured_outputs.json_object", of_schema(ANY_OBJECT)
            if also.regex is not None:
                yield "structured_outputs.regex", Constraint(kind="regex", text=also.regex)
            if also.choice:
                yield "structured_outputs.choice", _of_choices(also.choice)
        if self.guided_json is not None:
            yield "guided_json", of_schema(self.guided_json)
        if self.json_schema is not None:
            yield "json_schema", of_schema(self.json_schema)
        for name in ("guided_regex", "regex"):
            if (regex := getattr(self, name)) is not None:
                yield name, Constraint(kind="regex", text=regex)
        if self.guided_choice:
            yield "guided_choice", _of_choices(self.guided_choice)


def of_schema(schema: Schema | str) -> Constraint:
    """Return the constraint of a JSON schema, or of its text."""
    if schema is True:
        schema = {}
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return Constraint(kind="json", text=text)


def checked(field: str, constraint: Constraint) -> Constraint:
    """Return the constraint. Raises RequestError if it is too long."""
    if why := refused_text(constraint):
        raise bad(field, why.removeprefix("it "), constraint.text)
    return constraint


def _of_choices(choices: list[str]) -> Constraint:
    return Constraint(kind="regex", text="|".join(map(re.escape, choices)))
