"""The thoughts and the tool calls in the agent's text, in the marks of several families
of models.

Invariants: dividing a text loses nothing that a reader sees: the result is thoughts,
then the answer, without the marks and the line ends around them; a text without the
opening mark consists of the answer alone. Parsing is a function of the text alone and
never fails: text that is not entirely well-formed calls stays content, so nothing that
the agent wrote is lost. Sampled tokens are unaffected: a call is a view of the tokens.
"""

import base64
import binascii
import json
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, Protocol

from rollweave.schema.base import Struct
from rollweave.schema.chat import Message, ToolCall

MARKS: Final = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""The marks of thoughts in chat templates of several families of models."""

SEAL: Final = "rw1."
"""Beginning of a sealed text: thoughts in a form that a program sends back unread."""

SEALED_CHARS: Final = 1 << 22
"""Maximum number of characters of thoughts that are unsealed."""


class Division(Struct, frozen=True, kw_only=True):
    """The places in a turn's text: thoughts are `[start, end)`, and the answer begins
    at `answer`. The places before `certain` stay, whatever follows the text.
    """

    start: int = 0
    end: int = 0
    answer: int = 0
    certain: int


class Thinking(Struct, frozen=True, kw_only=True):
    """The marks of thoughts. `opened` is true if the chat template writes the first
    mark itself, at the opening of the agent's turn.
    """

    first: str
    last: str
    opened: bool = False

    def divide(self, text: str) -> Division:
        """Return where thoughts and answer stand in the sampled text so far."""
        blank = len(text) - len(text.lstrip())
        if text.startswith(self.first, blank):
            body = blank + len(self.first)
        elif self.first.startswith(text[blank:]):  # the mark may still be completed
            return Division(certain=0)
        elif self.opened:
            body = 0
        else:
            return Division(certain=len(text))
        close = text.find(self.last, body)
        stop = before(self.last, text, since=body) if close < 0 else close
        start = body + len(text[body:stop]) - len(text[body:stop].lstrip("\n"))
        end = max(start, len(text[:stop].rstrip("\n")))
        if close < 0:
            return Division(start=start, end=end, answer=len(text), certain=end)
        after = close + len(self.last)
        answer = len(text) - len(text[after:].lstrip("\n"))
        return Division(start=start, end=end, answer=answer, certain=len(text))

    def split(self, text: str) -> tuple[str, str]:
        """Return thoughts and answer of a complete turn's text."""
        place = self.divide(text)
        return text[place.start : place.end], text[place.answer :]

    def split_sent(self, text: str) -> tuple[str, str]:
        """Return thoughts and answer of a message that a program sends back as one
        text.
        """
        if self.last not in text:
            return "", text
        begins = text.lstrip().startswith(self.first)
        if not begins and (not self.opened or self.first in text):
            return "", text
        return self.split(text)

    def joined(self, thoughts: str, answer: str) -> str:
        """Return thoughts and answer as one text, in the form that models write."""
        return f"{self.first}\n{thoughts}\n{self.last}\n\n{answer}"


def thinking_of(template: str, opening: str) -> Thinking | None:
    """Return the marks that a chat template's source names; None without marks.
    `opening` is the template's text at the opening of a turn.
    """
    for first, last in MARKS:
        if last in template:
            return Thinking(first=first, last=last, opened=opening.rstrip().endswith(first))
    return None


def seal(thoughts: str) -> str:
    """Return thoughts as the opaque text that APIs call a signature or encrypted
    content. It is not secret: it lets a program send thoughts back unread.
    """
    packed = zlib.compress(thoughts.encode(errors="surrogatepass"))
    return SEAL + base64.urlsafe_b64encode(packed).decode()


def unseal(text: str) -> str | None:
    """Return the thoughts of a sealed text; None for any other text."""
    if not text.startswith(SEAL):
        return None
    reader = zlib.decompressobj()
    try:
        packed = base64.b64decode(text[len(SEAL) :], altchars=b"-_", validate=True)
        data = reader.decompress(packed, SEALED_CHARS)
        return data.decode(errors="surrogatepass") if reader.eof else None
    except (binascii.Error, zlib.error, UnicodeDecodeError):
        return None


def before(mark: str, text: str, *, since: int) -> int:
    """Return the length of the text before `mark`, or before a possible beginning of
    `mark` at the end of the text.
    """
    place = text.find(mark, since)
    if place >= 0:
        return place
    for count in range(min(len(mark) - 1, len(text) - since), 0, -1):
        if text.endswith(mark[:count]):
            return len(text) - count
    return len(text)


class ParsedReply(Struct, frozen=True, kw_only=True):
    """A parsed turn: the text outside of calls, and the calls (without ids) in
    order.
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = ()


class ToolFormat(Protocol):
    """The tool-call format of a family of models."""

    def parse(self, text: str) -> ParsedReply:
        """Parse the calls of a turn's text.

        If a call is malformed, the whole text is content. Else the content begins with
        the text before the first `call_start`, without the space at its end.
        """

    @property
    def call_start(self) -> str:
        """The text with which every call begins. A stream shows nothing from there on
        before the turn is complete; if the text is "", it shows nothing at all.
        """

    def call_around(self, name: str) -> tuple[str, str]:
        """Return the text before and after the JSON object of arguments in a call of
        tool `name`: from `call_start` to `call_end`.

        A turn whose calls are constrained must write them in this way.
        """

    @property
    def call_end(self) -> str:
        """The text that ends a call; as a stop string it limits a turn to one call."""


class Hermes:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them:
    Hermes, Qwen 2.5 and 3, and others.

    The last call may lack its closing mark if its JSON is complete.
    """

    call_start: Final = "<tool_call>"
    call_end: Final = "</tool_call>"

    def parse(self, text: str) -> ParsedReply:
        calls: list[ToolCall] = []
        before, mark, _ = text.partition(self.call_start)
        content, place = [before], len(before) if mark else -1
        while place >= 0:
            try:
                value, end = _JSON.raw_decode(
                    text, _after_space(text, place + len(self.call_start))
                )
                calls.append(_call(value))
            except (ValueError, RecursionError):
                return ParsedReply(content=text)
            end = _after_space(text, end)
            if text.startswith(self.call_end, end):
                end += len(self.call_end)
            elif end < len(text):
                return ParsedReply(content=text)
            place = text.find(self.call_start, end)
            content.append(text[end : place if place >= 0 else len(text)])
        shown = "".join(content).rstrip() if calls else text
        return ParsedReply(content=shown, tool_calls=tuple(calls))

    def call_around(self, name: str) -> tuple[str, str]:
        spelled = json.dumps(name, ensure_ascii=False)
        before = f'{self.call_start}\n{{"name": {spelled}, "arguments": '
        return before, f"}}\n{self.call_end}"


def tool_format_of(template: str) -> ToolFormat | None:
    """Return the format that a chat template tells its model to write, by the marks in
    its source; None if it is unknown.
    """
    return Hermes() if Hermes.call_start in template else None


def openai_message(
    message: Message,
    *,
    arguments: Callable[[str], Any] = str,
    as_parts: bool = False,
) -> dict[str, Any]:
    """Return a message in the form of OpenAI's API. `arguments` changes the JSON text
    of a call's arguments. With `as_parts`, the content is a list of parts.
    """
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if as_parts:
        fields["content"] = [{"type": "text", "text": message.content}] if message.content else []
    if message.tool_calls:
        fields["tool_calls"] = openai_calls(message, arguments=arguments)
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.name:
        fields["name"] = message.name
    if message.thoughts:
        fields["reasoning_content"] = message.thoughts
    return fields


def openai_calls(
    message: Message, *, arguments: Callable[[str], Any] = str
) -> list[dict[str, Any]]:
    """Return the tool calls of a message in the form of OpenAI's API."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": arguments(call.arguments)},
        }
        for call in message.tool_calls
    ]


def call_key(calls: Sequence[ToolCall]) -> tuple[tuple[str, str], ...]:
    """Return a key that is equal for equal calls, independent of their ids and of the
    spacing and key order of their JSON.
    """
    return tuple((call.name, _canonical(call.arguments)) for call in calls)


_SPACE = re.compile(r"\s*")


def _after_space(text: str, start: int) -> int:
    """Return where the white space from `start` on ends."""
    space = _SPACE.match(text, start)
    assert space is not None, "it matches nothing, too"
    return space.end()


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _call(value: Any) -> ToolCall:
    """Return the call. Raises ValueError for anything else."""
    if not isinstance(value, dict):
        raise ValueError(f"a call must be an object, got {value!r:.80}")
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError(f"a call must have a name and an object of arguments, got {value!r:.80}")
    source = json.dumps(arguments, ensure_ascii=False)
    # Half a surrogate pair raises ValueError: no client could send it back.
    f"{name}{source}".encode()
    return ToolCall(name=name, arguments=source)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


_JSON = json.JSONDecoder(parse_constant=_no_constant)
