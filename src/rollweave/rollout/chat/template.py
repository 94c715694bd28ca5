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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, Self

import jinja2
import msgspec
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollweave.rollout.chat.thoughts import Thinking, thinking_of
from rollweave.rollout.chat.tools import openai_message
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError, RollweaveError
from rollweave.schema.media import Image

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


RENDERED = frozenset(("messages", "tools", "add_generation_prompt", "documents", *SPECIAL_NAMES))
"""Names that a rendering gives a template, and that no client can set."""


RENDER_S: Final = 10.0
"""Maximum seconds of a rendering: ten thousand messages take about a second."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names by which templates read the thoughts of a message."""


class ChatError(RollweaveError):
    """The chat template refuses these messages."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for trainers
    that need a mask; its body is rendered.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2's declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
        now: datetime.datetime | None = None,
    ) -> None:
        self._special = dict(special)
        self._name = name
        self.source = source
        moment = now or datetime.datetime.now()
        environment = self._environment = _Environment()
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = moment.strftime
        self._arguments: dict[str, Any] = {}
        self.thinking: Thinking | None = None
        """The marks of thoughts, None if the template has none."""
        self._thoughts = tuple(
            name for name in THOUGHTS if re.search(rf"(?:\.|\[?['\"]){name}\b", source)
        )
        self.takes_text = True
        """False if messages must be lists of parts, even without images."""
        try:
            self.variables = frozenset(
                meta.find_undeclared_variables(environment.parse(source)) - RENDERED
            )
            """Names of the arguments that the template reads."""
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{name}: chat template must be valid Jinja: {error}") from error
        self.takes_text = not self._needs_parts()
        self.thinking = self._find_thinking()

    def _needs_parts(self) -> bool:
        """Return whether the template shows a text only in a list of parts, as those of
        some models that take images.
        """
        messages = [Message(role="user", content="\u2042text\u2042")]
        try:
            if messages[0].content in self.render(messages, prompt=False):
                return False
        except ChatError:
            pass
        self.takes_text = False
        try:
            return messages[0].content in self.render(messages, prompt=False)
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

    def render(
        self, messages: Sequence[Message], *, prompt: bool, tools: Sequence[str] = ()
    ) -> str:
        """Return the text of `messages`, with the opening of the assistant's next turn
        if `prompt`. Raises ChatError.

        `tools` are JSON objects, each a tool's declaration in the form of OpenAI's
        `tools`.
        """
        # Templates take the arguments of a tool call as an object if they parse as one.
        plain = [self._plain(message) for message in messages]
        declarations = [json.loads(tool) for tool in tools] or None
        self._environment.begin()
        try:
            return self._template.render(
                messages=plain,
                add_generation_prompt=prompt,
                tools=declarations,
                documents=None,
                **self._special,
                **self._arguments,
            )
        except ChatError:
            raise
        except Exception as error:  # the template is user code: any exception is a refusal
            roles = ", ".join(message.role for message in messages)
            raise ChatError(
                f"{self._name}: chat template cannot render roles {roles}: {error}"
            ) from error

    def _plain(self, message: Message) -> dict[str, Any]:
        """Return a message as templates take it: with its thoughts in fields of their
        own if the template reads one, otherwise in its content.
        """
        if message.thoughts and not self._thoughts and self.thinking is not None:
            joined = self.thinking.joined(message.thoughts, message.content)
            message = msgspec.structs.replace(message, content=joined)
        plain = openai_message(
            message, arguments=_parsed, image=_image_part, as_parts=not self.takes_text
        )
        return {
            **plain,
            **dict.fromkeys(self._thoughts if message.thoughts else (), message.thoughts),
        }


def _image_part(image: Image) -> dict[str, Any]:
    del image  # a template only says where it is
    return {"type": "image"}


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):  # a client's tool calls need not be valid JSON
        return arguments


def configured(template: ChatTemplate, arguments: Mapping[str, Any]) -> ChatTemplate:
    """Return the template with the arguments of `model.template_arguments`. Raises
    ConfigError for one that it does not read: it would change nothing.
    """
    for name in arguments:
        if name not in template.variables:
            reads = ", ".join(sorted(template.variables)) or "no arguments"
            raise ConfigError(
                f"model.template_arguments must be arguments of the chat template, which reads "
                f"{reads}, got {name!r:.80}"
            )
    return template.with_arguments(arguments)


def read_template(
    directory: Path, file: Path | None = None, *, now: datetime.datetime | None = None
) -> ChatTemplate:
    """Return the template in `file`, or that of checkpoint `directory`:
    chat_template.jinja, otherwise that of tokenizer_config.json. Raises ConfigError if
    it has none, and OSError for a `file` that cannot be read.
    """
    config = read_json(directory / "tokenizer_config.json")
    special = special_tokens(directory)
    given, file = file, file or directory / "chat_template.jinja"
    if given or file.exists():
        return ChatTemplate(
            file.read_text(encoding="utf-8"), special=special, name=str(file), now=now
        )
    source = config.get("chat_template")
    if source is None:  # that of a processor of images
        source = read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {
            entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)
        }
        source = named.get("default")
    if not isinstance(source, str):
        raise ConfigError(
            f"{directory} must have a chat template (chat_template.jinja, or in "
            "tokenizer_config.json), got none"
        )
    return ChatTemplate(
        source, special=special, name=str(directory / "tokenizer_config.json"), now=now
    )


def special_tokens(directory: Path) -> dict[str, str]:
    """Return the text of the special tokens that the checkpoint names."""
    tokens: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        config = read_json(directory / file)
        for name in SPECIAL_NAMES:
            value = config.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object, empty if there is no such file.

    Raises ConfigError for anything else.
    """
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} must be readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **rest: Any) -> str:
    """Return JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **rest)


def _refuse(message: str) -> NoReturn:
    raise ChatError(f"chat template: {message}")
