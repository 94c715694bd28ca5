"""A checkpoint's chat template: messages to text, as Hugging Face's templates expect to
be rendered, in a sandbox.

Invariant: rendering is a function of the messages alone: a template that asks for the
time gets the moment it was loaded.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError, RollweaveError

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class ChatError(RollweaveError):
    """The chat template refuses these messages."""


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for trainers
    that need a mask; we render its body.
    """

    tags = {"generation"}  # noqa: RUF012 (jinja2's declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = moment.strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{name}: chat template must be valid Jinja: {error}") from error

    def render(
        self, messages: Sequence[Message], *, prompt: bool, tools: Sequence[str] = ()
    ) -> str:
        """The text of `messages`, with the opening of the assistant's next turn where
        `prompt`. Raises ChatError.

        `tools` are JSON objects, each a tool's declaration as OpenAI's `tools` has it.
        """
        plain = [_plain(message) for message in messages]
        offered = [json.loads(tool) for tool in tools] or None
        try:
            return self._template.render(
                messages=plain,
                add_generation_prompt=prompt,
                tools=offered,
                documents=None,
                **self._special,
            )
        except ChatError:
            raise
        except (
            Exception
        ) as error:  # the template is the user's program: whatever it raises is its refusal
            roles = ", ".join(message.role for message in messages)
            raise ChatError(
                f"{self._name}: chat template cannot render roles {roles}: {error}"
            ) from error


def _plain(message: Message) -> dict[str, Any]:
    """A message as Hugging Face's templates know it: the arguments of a tool call are
    an object where they are one.
    """
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _parsed(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.name:
        plain["name"] = message.name
    return plain


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):  # what a client says that its model said need not be JSON
        return arguments


def read_template(directory: Path, *, now: datetime.datetime | None = None) -> ChatTemplate:
    """The template of checkpoint `directory`: chat_template.jinja, else
    tokenizer_config.json's. ConfigError without one.
    """
    config = read_json(directory / "tokenizer_config.json")
    special = special_tokens(directory)
    file = directory / "chat_template.jinja"
    if file.exists():
        return ChatTemplate(
            file.read_text(encoding="utf-8"), special=special, name=str(file), now=now
        )
    source = config.get("chat_template")
    if isinstance(source, list):  # several named ones
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
    """The text of the special tokens that the checkpoint names."""
    found: dict[str, str] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        config = read_json(directory / file)
        for name in SPECIAL_NAMES:
            value = config.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no such file.

    Raises ConfigError where there is something else.
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
    """JSON as it is, without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **rest)


def _refuse(message: str) -> NoReturn:
    raise ChatError(f"chat template: {message}")
