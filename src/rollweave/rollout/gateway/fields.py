"""Fields of requests that no server here honors, in one table for all APIs, and how
they are handled.

Invariants: a field that would change how tokens are chosen, or that the answer would
have to obey, is refused by its name. A field that asks for nothing, or by its nature
changes nothing, passes. Every other field that the model, its chat template or this
server cannot read is `Unread`: the session ignores the field and records it, or refuses
it.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from pydantic import BaseModel

from rollweave.io.http import fields
from rollweave.io.http.fields import UNKNOWN_FIELD, refused_field
from rollweave.io.http.messages import ECHOED
from rollweave.rollout.gateway.refusals import RequestError, bad
from rollweave.schema.base import Struct
from rollweave.schema.work import Ignored

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
