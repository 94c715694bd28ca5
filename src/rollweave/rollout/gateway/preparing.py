"""Prepares a request for one model: wishes become arguments of its chat template, calls
get a grammar, and large requests are prepared outside the event loop.

Fields that neither the model nor the template can read are left out or refused, as the
session says. A turn that must call a tool, or whose calls must have the form of their
tools' parameters, writes its calls as the model's template tells it to, with arguments
in the spelling of `json.dumps`. Everything that a constrained turn samples is its
output, as in an answer of a given form (docs/GATEWAY.md#calls-of-a-given-form).

A thread does work that is proportional to the size of a request (parsing, rendering and
tokenizing it). A process, which can be ended, checks grammars, whose work has no such
bound (`engine/matchers`).

Invariants: nothing is left out in silence: each `Unread` is recorded or refused. Small
requests wait for neither the thread nor the process; the thread does one piece of work
at a time; every piece ends by itself, and lets other threads run meanwhile.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import msgspec

from rollweave.engine.matchers import CANNOT, BusyError, GrammarCheck, rule_of
from rollweave.rollout.chat.replies import Thinking, ToolFormat
from rollweave.rollout.chat.template import ChatError
from rollweave.rollout.chat.text import TextCodec
from rollweave.rollout.gateway.fields import RequestError, Unread, bad, of_schema, resolve
from rollweave.rollout.gateway.requests import ChatRequest
from rollweave.schema.chat import Message
from rollweave.schema.serving import Constraint
from rollweave.schema.work import Ignored, Unreadable

T = TypeVar("T")

INLINE: Final = 1 << 14
"""Maximum number of bytes, or of characters, that are parsed or rendered on the event
loop, which takes some milliseconds.
"""

INLINE_TOKENS: Final = 1 << 12
"""Maximum number of tokens of an answer that is written on the event loop."""

WAIT_S: Final = 120.0
"""Maximum seconds for which a request waits for the thread."""


class Aside:
    """The thread and the process of one gateway. Both start when they are needed. All
    calls belong to one event loop.
    """

    def __init__(self, *, wait_s: float = WAIT_S) -> None:
        self._grammars = GrammarCheck()
        self._wait_s = wait_s
        self._thread: ThreadPoolExecutor | None = None

    async def run(
        self,
        work: Callable[[], T],
        *,
        size: int,
        most: int = INLINE,
        line: asyncio.Lock | None = None,
    ) -> T:
        """Return the result of work, or raise its exception. Work of a size above
        `most` runs on the thread; such work with the same `line` runs one piece at a
        time.

        Raises RequestError if the thread does not finish it in time.
        """
        if size <= most:
            return work()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="large-requests")
        try:
            async with asyncio.timeout(self._wait_s), line or contextlib.nullcontext():
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except TimeoutError:
            rule = f"a large request must be prepared within {self._wait_s:g} s: try again later"
            raise RequestError(503, rule, code="unavailable") from None

    async def check_form(self, field: str, constraint: Constraint) -> None:
        """Raise RequestError for a constraint that cannot be met."""
        try:
            why = await self._grammars.why_not(constraint)
        except BusyError as error:
            raise RequestError(503, str(error), code="unavailable") from error
        if why:
            raise unconstrainable(field, constraint, why)

    def close(self) -> None:
        """End both. Work in progress on the thread ends by itself."""
        self._grammars.close()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None


MOST: Final = 100
"""Maximum number of different fields that a session records; further fields are counted
together.
"""

MAX_ARGUMENTS: Final = 4096
"""Maximum characters of the arguments of a chat template, which is tried with them."""

OTHERS: Final = "(other fields)"


class Line:
    """The large work of one session. One piece is done at a time, so that other
    sessions need not wait for all of it.
    """

    def __init__(self, aside: Aside) -> None:
        self._aside, self._lock = aside, asyncio.Lock()

    async def run(self, work: Callable[[], T], *, size: int, most: int = INLINE) -> T:
        """Return the result of work, as `Aside.run`."""
        return await self._aside.run(work, size=size, most=most, line=self._lock)

    async def check_form(self, field: str, constraint: Constraint) -> None:
        """Raise RequestError for a constraint that cannot be met."""
        async with self._lock:
            await self._aside.check_form(field, constraint)


@contextlib.contextmanager
def template_errors(field: str) -> Iterator[None]:
    """Raise the errors of a chat template as RequestErrors of a field."""
    try:
        yield
    except ChatError as error:
        raise RequestError(400, f"{field}: {error}", param=field) from error


FORMS: Final = {"json": "a JSON schema", "regex": "a regular expression", "lark": "forms"}
"""Kind of a constraint → the name of its text's form."""


def unconstrainable(field: str, constraint: Constraint, why: str) -> RequestError:
    """Return the refusal of a constraint, or of a text that cannot meet it."""
    rule = (
        f"must be {FORMS[constraint.kind]} that can be constrained: {why.removeprefix(CANNOT):.300}"
    )
    return bad(field, rule, constraint.text)


def readable(
    chat: ChatRequest, codec: TextCodec, *, unreadable: Unreadable
) -> tuple[ChatRequest, list[Unread]]:
    """Return the request in the form that the model can be shown, and the fields that
    were left out. Raises RequestError for a field that must be refused.
    """
    if chat.prompt is not None:
        unread = list(chat.unread)
        _check(unread, unreadable)
        return chat, unread
    thinks = codec.thinking is not None
    arguments, left = resolve(chat.asks, codec.template_variables, thinks=thinks)
    if len(arguments) > MAX_ARGUMENTS:
        rule = f"must have at most {MAX_ARGUMENTS} characters of JSON"
        raise bad("chat_template_kwargs", rule, arguments)
    unread = [*(field for field in chat.unread if not (field.of_thoughts and thinks)), *left]
    if chat.tools and chat.call is None and not _shows_tools(codec, arguments):
        rule = "must be none: this model's chat template shows none"
        unread.append(Unread(field="tools", value=len(chat.tools), rule=rule, action="left out"))
        chat = msgspec.structs.replace(chat, tools=(), reads_calls=False)
    _check(unread, unreadable)
    return (
        msgspec.structs.replace(
            chat,
            messages=tuple(_shown(message, codec.thinking) for message in chat.messages),
            template_arguments=arguments or chat.template_arguments,
            asks=(),
            unread=(),
        ),
        unread,
    )


def _shows_tools(codec: TextCodec, arguments: str) -> bool:
    try:
        return codec.with_arguments(arguments).shows_tools
    except ChatError:  # the session reports what is wrong with the arguments
        return True


def _check(unread: Iterable[Unread], unreadable: Unreadable) -> None:
    if unreadable == "refuse":
        for field in unread:
            raise bad(field.field, field.rule, field.value)


def _shown(message: Message, thinking: Thinking | None) -> Message:
    """Return the message with its thoughts apart, if the model has any."""
    if message.role != "assistant":
        return message
    if thinking is None:
        return msgspec.structs.replace(message, thoughts="") if message.thoughts else message
    if not message.thoughts:
        thoughts, content = thinking.split_sent(message.content)
        if thoughts:
            return msgspec.structs.replace(message, thoughts=thoughts, content=content)
    return message


class IgnoredFields:
    """The fields of a session's requests that had no effect, and the number of requests
    that had each field.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Ignored] = {}

    def add(self, unread: Iterable[Unread]) -> None:
        """Record the unread fields of one request."""
        of_request = {
            (ignored.field, ignored.action): ignored for ignored in (u.recorded() for u in unread)
        }
        for key, one in of_request.items():
            if key not in self._found and len(self._found) >= MOST:
                key = (OTHERS, "ignored")
                one = Ignored(field=OTHERS, value="")
            known = self._found.get(key)
            count = 1 if known is None else known.requests + 1
            self._found[key] = msgspec.structs.replace(known or one, requests=count)

    def entries(self) -> tuple[Ignored, ...]:
        """Return the recorded fields, in the order of the first request that had each
        field.
        """
        return tuple(self._found.values())


NO_ARGUMENTS: Final[dict[str, Any]] = {"type": "object", "additionalProperties": False}
"""The schema of a tool that declares no parameters."""

SPELLING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""llguidance's spelling of arguments: with no other white space than `json.dumps`, so
that a call cannot end in a run of blanks.
"""

CLOSED_BY: Final = ("additionalProperties", "patternProperties")
COMBINED_BY: Final = ("allOf", "if", "dependentSchemas", "unevaluatedProperties")
"""Keywords that decide which further properties an object may have, and keywords that
combine the properties of several schemas in one object.
"""


VALUES: Final = ("const", "default", "enum", "examples")
"""Keywords whose values are not schemas."""


async def constraint_of(
    chat: ChatRequest,
    codec: TextCodec,
    tools: ToolFormat | None,
    line: Line,
    *,
    unconstrained: str,
) -> Constraint | None:
    """Return the constraint of a turn: of its answer, of its calls, or of both.
    `unconstrained` is the reason why the engines cannot constrain answers, or "";
    strict tools are then only shown.

    Raises RequestError, with the field that is to blame, for a demanded constraint that
    cannot be met.
    """
    if unconstrained:
        for field, rule, wanted in (
            ("response_format", "null", chat.constraint),
            ("tool_choice", "auto or none", chat.call),
        ):
            if wanted is not None:
                raise RequestError(400, f"{field} must be {rule}: {unconstrained}", param=field)
        return None
    if chat.constraint is not None:
        await line.check_form(chat.constraint_field, chat.constraint)
    if tools is None or not chat.reads_calls:
        return chat.constraint
    constraint = await line.run(lambda: call_constraint(chat, tools, codec), size=chat.chars)
    if constraint is not None and constraint != chat.constraint:
        try:
            await line.check_form("tools", constraint)
        except RequestError:
            for field, part in parts_of(chat):
                await line.check_form(field, part)
            raise
    return constraint


def call_constraint(chat: ChatRequest, tools: ToolFormat, codec: TextCodec) -> Constraint | None:
    """Return the constraint of a turn that may call tools; None for a free turn. A turn
    that must call a tool consists of calls alone. Otherwise it is free up to its first
    call, if the form of its answer is free. Raises RequestError for parameters that are
    not a schema.
    """
    functions = _functions(chat)
    strict = any(function.get("strict") is True for function in functions)
    if chat.call is None and chat.constraint is None and not strict:
        return None
    rules, names = list[str](), list[str]()
    begins = chat.call is None and chat.constraint is None
    for number, function in enumerate(functions):
        if chat.call and function["name"] != chat.call:
            continue
        schema = _schema(function, chat.call is not None, f"tools.{number}")
        before, after = tools.call_around(function["name"])
        before = before.removeprefix(tools.call_start) if begins else before
        names.append(f"call_{number}")
        rules.append(
            f"call_{number}: {_literal(codec, before)} args_{number} {_literal(codec, after)}\n"
            f"args_{number}: %json {schema}"
        )
    start = _free(codec, tools.call_start) if begins else _bound(chat)
    text = "\n".join((*start, f"call: {' | '.join(names)}", *rules))
    return Constraint(kind="lark", text=text)


def parts_of(chat: ChatRequest) -> Iterator[tuple[str, Constraint]]:
    """Yield the constraint of each tool's calls, with the field that declares it."""
    for number, function in enumerate(_functions(chat)):
        if not chat.call or function["name"] == chat.call:
            schema = _schema(function, chat.call is not None, f"tools.{number}")
            yield f"tools.{number}.function.parameters", of_schema(schema)


def _functions(chat: ChatRequest) -> list[dict[str, Any]]:
    return [json.loads(tool)["function"] for tool in chat.tools]


def _free(codec: TextCodec, mark: str) -> Iterator[str]:
    """Yield the first rules of a free turn, in which `mark` begins a call: the rule
    `call` follows the mark.
    """
    match codec.pieces(mark):
        case [int(token)]:
            yield f"start: (text <[{token}]> call)* text"
            yield f"text: <[^{token}]>*"
        case _:
            yield "start: (begun call)* text"
            yield "text: /(?s:.*)/"
            yield f"begun[lazy]: /(?s:.*)/ {json.dumps(mark)}"


def _bound(chat: ChatRequest) -> Iterator[str]:
    """Yield the first rules of a turn that consists of calls, or of an answer that must
    have a form.
    """
    calls = 'call ("\\n"? call)*'
    if chat.call is not None or chat.constraint is None:
        yield f"start: {calls}"
        return
    yield "start: calls | answer"
    yield f"calls: {calls}"
    yield f"answer: {rule_of(chat.constraint)}"


def _schema(function: dict[str, Any], must_call: bool, path: str) -> str:
    """Return the schema of a tool's arguments: the tool's parameters if a call is
    forced or the tool is strict, else any object.
    """
    if not must_call and function.get("strict") is not True:
        return json.dumps({"type": "object", "x-guidance": SPELLING})
    given = function.get("parameters")
    schema = NO_ARGUMENTS if given is None else given
    if not isinstance(schema, dict):
        raise bad(f"{path}.function.parameters", "must be a JSON schema of an object", given)
    return json.dumps({"type": "object", **_closed(schema), "x-guidance": SPELLING})


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose objects have only the named properties, unless the schema
    says otherwise: a model that invents more properties may never come to an end.
    """
    if any(f'"{keyword}"' in json.dumps(schema) for keyword in COMBINED_BY):
        return schema

    def close(part: Any) -> Any:
        if isinstance(part, list):
            return [close(item) for item in part]
        if not isinstance(part, dict):
            return part
        inner = {name: value if name in VALUES else close(value) for name, value in part.items()}
        named = isinstance(part.get("properties"), dict) and part.get("type") == "object"
        if named and not any(keyword in part for keyword in CLOSED_BY):
            inner["additionalProperties"] = False
        return inner

    closed: dict[str, Any] = close(schema)
    return closed


def _literal(codec: TextCodec, text: str) -> str:
    """Return a text in the grammar's form. Its added tokens are named by their ids: a
    grammar's letters never match them.
    """
    return " ".join(
        f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece, ensure_ascii=False)
        for piece in codec.pieces(text)
    )
