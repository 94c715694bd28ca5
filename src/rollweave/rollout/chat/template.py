"""A checkpoint's chat template: renders messages to text as Hugging Face's templates
expect it, in a sandbox.

Invariants: rendering is a function of the messages alone: a template that reads the
time gets the moment at which it was loaded; a template that takes too long for a
history, which a client may make as long as it likes, is ended.
"""

import contextlib
import copy
import datetime
import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, Self

import jinja2
import msgspec
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from rollweave.io.reading import read_json
from rollweave.io.tokenizer import (
    NAMED_TEMPLATES,
    NAMES,
    OLD_TEMPLATE,
    TEMPLATE,
    TOKENIZER_CONFIG,
)
from rollweave.rollout.chat.replies import Thinking, openai_message, thinking_of
from rollweave.schema.chat import Message, ToolCall
from rollweave.schema.errors import ConfigError, RollweaveError

RENDERED = frozenset(("messages", "tools", "add_generation_prompt", "documents", *NAMES))
"""Names that a rendering gives a template, and that no client can set."""

DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of the templates of conversations without and with tools."""

OPEN, CLOSE = "\ue000", "\ue001"
"""Delimiters of text in a rendering that is tokenized without special tokens.

They are private-use characters: no template contains them.
"""

HOLE = "\ue002"
"""Delimiter of our own placeholders in a rendering, also of private use."""


RENDER_S: Final = 10.0
"""Maximum seconds of a rendering: ten thousand messages take about a second."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names by which templates read the thoughts of a message."""


class ChatError(RollweaveError):
    """The chat template refuses these messages."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for trainers
    that need a mask; its body is rendered, with a separate scope.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2's declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class _Namespace(Namespace):
    """Jinja's namespace, without the names of Python's own attributes."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"an attribute of a namespace must not begin with _, got {name!r:.80}")


class _Rendering(threading.local):
    """The rendering of a thread, which ends at a moment of the monotonic clock."""

    ends = math.inf


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which a template ends at a deadline: when it next reads an attribute
    or an item, or calls a function.
    """

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        self._rendering = _Rendering()

    def begin(self) -> None:
        """Begin a rendering on this thread."""
        self._rendering.ends = time.monotonic() + RENDER_S

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._check()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._check()
        return super().getitem(obj, argument)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        return super().call(*args, **kwargs)

    def _check(self) -> None:
        if time.monotonic() > self._rendering.ends:
            raise ChatError(f"chat template must render this within {RENDER_S:g} s")


class ChatTemplate:
    """A compiled template.

    `special` are the special tokens that it may name (`bos_token`…).
    """

    def __init__(
        self,
        source: str,
        *,
        special: Mapping[str, str],
        name: str,
    ) -> None:
        self._special = dict(special)
        self._name = name
        self.source = source
        environment = self._environment = _Environment()
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = datetime.datetime.now().strftime
        environment.globals["namespace"] = _Namespace
        self._arguments: dict[str, Any] = {}
        self.thinking: Thinking | None = None
        """The marks of thoughts; None if the template has no marks."""
        self._thoughts = tuple(
            name for name in THOUGHTS if re.search(rf"(?:\.|\[?['\"]){name}\b", source)
        )
        try:
            tree = environment.parse(source)
            self.variables = frozenset(
                meta.find_undeclared_variables(tree) - RENDERED - self._special.keys()
            )
            """Names of the arguments that the template reads."""
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{name}: chat template must be valid Jinja: {error}") from error
        strings = [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        self.literals = "\0".join((*texts, *strings))
        """The text that the template may write by itself, in pieces."""
        self.takes_text = True
        """False if messages must be lists of parts."""
        self._arguments_of: Callable[[str], Any] = _parsed
        self._id_of: Callable[[str], str] = str
        self._find_form()
        self.thinking = self._find_thinking()

    def _find_form(self) -> None:
        """Find out in which form the template takes a text (perhaps only in a list of
        parts), and a tool call.
        """
        text = Message(role="user", content="\u2042text\u2042")
        shown = (self._renders([text], text.content, parts) for parts in (False, True))
        self.takes_text = next(shown) or not next(shown)
        call = ToolCall(id="call_000000001", name="f", arguments='{"x": 1}')
        messages = [
            text,
            Message(role="assistant", content="", tool_calls=(call,)),
            Message(role="tool", content="y", tool_call_id=call.id, name=call.name),
        ]
        ids: tuple[Callable[[str], str], ...] = (str, _short_id)
        arguments: tuple[Callable[[str], Any], ...] = (_parsed, str)
        forms = [(id, argument) for id in ids for argument in arguments]
        for self._id_of, self._arguments_of in (*forms, forms[0]):
            if self._renders(messages, "", not self.takes_text):
                break

    def _renders(self, messages: Sequence[Message], text: str, parts: bool) -> bool:
        """Return whether a rendering of the messages has this text."""
        self.takes_text = not parts
        try:
            return text in self.render(messages, prompt=False)
        except ChatError:
            return False

    def _find_thinking(self) -> Thinking | None:
        opening = ""
        with contextlib.suppress(ChatError):
            opening = self.render([Message(role="user", content="a")], prompt=True)
        return thinking_of(self.source, opening)

    def with_arguments(self, arguments: Mapping[str, Any]) -> Self:
        """Return this template with values for some of its `variables`, in the form of
        `chat_template_kwargs`. Raises ChatError for a name that it does not read.
        """
        for name in arguments:
            if name not in self.variables:
                raise ChatError(f"{self._name}: chat template reads no argument {name!r:.80}")
        other = copy.copy(self)
        other._arguments = {**self._arguments, **arguments}
        other.thinking = other._find_thinking()
        return other

    def with_those_of(self, arguments: Mapping[str, Any]) -> Self:
        """Return this template with values for the `arguments` that it reads."""
        read = {name: value for name, value in arguments.items() if name in self.variables}
        return self.with_arguments(read)

    def render(
        self, messages: Sequence[Message], *, prompt: bool, tools: Sequence[str] = ()
    ) -> str:
        """Return the text of `messages`, with the opening of the assistant's next turn
        if `prompt`. Raises ChatError.

        `tools` are JSON objects, each a tool's declaration in the form of OpenAI's
        `tools`.
        """
        plain = [self._plain(message) for message in messages]
        declarations = [json.loads(tool) for tool in tools] or None
        self._environment.begin()
        try:
            return self._template.render(
                messages=plain,
                add_generation_prompt=prompt,
                tools=declarations,
                documents=None,
                **{**self._special, **self._arguments},
            )
        except ChatError:
            raise
        except Exception as error:  # the template is user code: any exception is a refusal
            roles = ", ".join(message.role for message in messages)
            raise ChatError(
                f"{self._name}: chat template cannot render roles {roles}: {_reason(error)}"
            ) from error

    def _plain(self, message: Message) -> dict[str, Any]:
        """Return a message as templates take it: with its thoughts in separate fields
        if the template reads such a field, otherwise in its content.
        """
        if message.thoughts and not self._thoughts and self.thinking is not None:
            joined = self.thinking.joined(message.thoughts, message.content)
            message = msgspec.structs.replace(message, content=joined)
        plain = openai_message(
            self._with_ids(message),
            arguments=self._arguments_of,
            as_parts=not self.takes_text,
        )
        return {
            **plain,
            **dict.fromkeys(self._thoughts if message.thoughts else (), message.thoughts),
        }

    def _with_ids(self, message: Message) -> Message:
        """Return the message with the ids of tool calls in the template's form."""
        if self._id_of is str or not (message.tool_calls or message.tool_call_id):
            return message
        calls = (
            msgspec.structs.replace(call, id=self._id_of(call.id)) for call in message.tool_calls
        )
        answered = message.tool_call_id and self._id_of(message.tool_call_id)
        return msgspec.structs.replace(message, tool_calls=tuple(calls), tool_call_id=answered)


def _short_id(id: str) -> str:
    """Return an id of nine letters and digits, as some templates require it."""
    return "".join(filter(str.isalnum, id))[-9:].rjust(9, "0")


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):  # a client's tool calls need not be valid JSON
        return arguments


def configured(
    templates: Mapping[str, ChatTemplate], arguments: Mapping[str, Any]
) -> dict[str, ChatTemplate]:
    """Return the templates with the arguments of `model.template_arguments`. Raises
    ConfigError for an argument that no template reads: it would change nothing.
    """
    variables = {name for template in templates.values() for name in template.variables}
    for name in arguments:
        if name not in variables:
            reads = ", ".join(sorted(variables)) or "no arguments"
            raise ConfigError(
                f"model.template_arguments must be arguments of the chat template, which reads "
                f"{reads}, got {name!r:.80}"
            )
    return {name: template.with_those_of(arguments) for name, template in templates.items()}


def read_templates(
    directory: Path,
    special: Mapping[str, str],
    file: Path | None = None,
) -> dict[str, ChatTemplate]:
    """Return the templates of checkpoint `directory` by name, `default` among them: the
    templates in files, otherwise in tokenizer_config.json, otherwise in
    chat_template.json. The template in `file` replaces all of these. Raises ConfigError
    if there is no template, and OSError for a `file` that cannot be read.
    """
    if file is not None:
        source = file.read_text(encoding="utf-8")
        return {DEFAULT: ChatTemplate(source, special=special, name=str(file))}
    files = {path.stem: path for path in sorted(directory.glob(f"{NAMED_TEMPLATES}/*.jinja"))}
    if (directory / TEMPLATE).exists():
        files = {DEFAULT: directory / TEMPLATE} | files
    try:
        named: Any = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory}: chat templates must be readable: {error}") from error
    for config in (TOKENIZER_CONFIG, OLD_TEMPLATE):
        if not named:
            files, named = {}, read_json(directory / config).get("chat_template")
            files[DEFAULT] = directory / config
    if isinstance(named, list):  # several named templates
        entries = [entry for entry in named if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
    elif isinstance(named, str):
        named = {DEFAULT: named}
    if not named or not isinstance(named, dict):
        raise ConfigError(
            f"{directory} must have a chat template ({TEMPLATE}, or in {TOKENIZER_CONFIG}), got "
            "none"
        )
    if not all(isinstance(source, str) for source in named.values()) or DEFAULT not in named:
        raise ConfigError(
            f"{directory}: one of several chat templates must be named default, got "
            f"{', '.join(map(str, named))}"
        )
    return {
        name: ChatTemplate(source, special=special, name=str(files.get(name, files[DEFAULT])))
        for name, source in named.items()
        if name in (DEFAULT, WITH_TOOLS)
    }


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **rest: Any) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **rest)
    for mark in (OPEN, CLOSE, HOLE) if ensure_ascii else ():
        text = text.replace(f"\\u{ord(mark):04x}", mark)
    return text


def _refuse(message: Any) -> NoReturn:
    raise ChatError(f"chat template: {' '.join(str(message).split())}")


def _reason(error: Exception) -> str:
    """Return the error in one line."""
    return " ".join(str(error).split()) or type(error).__name__
