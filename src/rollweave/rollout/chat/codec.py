"""Token-exact multi-turn chat: messages become tokens once, and what the engine sampled
is never tokenized again.

A conversation grows by appending only. After the agent's turn comes what the chat
template puts behind an assistant message: the rest of the end of turn, the new
messages, and the opening of the next turn. That text is taken from a rendering in which
the agent's words are a mark, so neither their tokenization nor what the template does
to earlier turns (drop the thinking, trim) can change a token that was already there.

What an environment or a user writes is text: where it spells a special token
(`<|im_end|>`), the spelling is tokenized as ordinary text, so that no message can close
its own turn and speak as another role. Special tokens come from the template alone. (A
template whose turns are marked by ordinary text has no such guard.)
"""

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Final, Self

import msgspec
from tokenizers import Tokenizer

from rollweave.rollout.chat.template import (
    ChatError,
    ChatTemplate,
    read_json,
    read_template,
    special_tokens,
)
from rollweave.rollout.chat.tools import ToolFormat, calls_of
from rollweave.schema.chat import Message, ToolCall
from rollweave.schema.errors import ConfigError
from rollweave.schema.text import valid

__all__ = ["ChatCodec", "ChatError"]

MARK: Final = "\u2042mark\u2042"
"""Stands for the agent's words in a rendering.

No template has it, and it has no white space that one could trim.
"""

CONTEXT: Final = (Message(role="user", content="a"), Message(role="assistant", content=MARK))
"""The shortest conversation that every template accepts before a new message."""

QUESTION: Final = Message(role="user", content="\u2042new\u2042")
"""A message to look for in a rendering."""

OPEN, CLOSE = "\ue000", "\ue001"
"""Stand around text in a rendering that is to be tokenized without special tokens.

Private characters: no template has them.
"""

CACHED = 8192
"""Renderings kept: the messages of small environments repeat."""


class ChatCodec:
    """A tokenizer and a chat template.

    Raises ConfigError for a template whose conversations cannot grow by appending.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        name: str = "chat template",
        eos: Iterable[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._name = name
        special = [
            token.content
            for token in tokenizer.get_added_tokens_decoder().values()
            if token.special
        ]
        spelled = [
            *sorted(map(re.escape, special), key=len, reverse=True),
            f"[{OPEN}{CLOSE}{MARK[0]}]",
        ]
        self._guarded = re.compile("|".join(spelled))
        self._check_extendable()
        closing = self._after_mark(CONTEXT, prompt=False)
        following = self._encode(self._after_mark((*CONTEXT, QUESTION), prompt=True))
        self._end = _common_prefix(self._encode(closing), following)
        marked = self._closes_with_token = bool(self._end) and self._is_special(self._end[0])
        self.stop_token_ids: tuple[int, ...] = tuple(
            dict.fromkeys([*(self._end[:1] if marked else ()), *eos])
        )
        """Tokens that end the agent's turn: the template's and the checkpoint's."""
        self.stop: tuple[str, ...] = () if marked or not closing else (closing,)
        """Text that ends the agent's turn, where the template closes it with ordinary
        text.
        """
        self._extend = lru_cache(CACHED)(self._render_extension)
        self._start = lru_cache(CACHED)(self._render_start)

    @classmethod
    def from_directory(cls, model_dir: str | Path) -> Self:
        """From tokenizer.json and the chat template of a checkpoint directory.

        Raises ConfigError for what is missing.
        """
        directory = Path(model_dir)
        path = directory / "tokenizer.json"
        if not path.exists():
            raise ConfigError(f"{directory} must have a tokenizer.json, got none")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path} must be a tokenizer: {error}") from error
        return cls(
            tokenizer, read_template(directory), name=str(directory), eos=_eos(directory, tokenizer)
        )

    def start(self, messages: Sequence[Message], tools: Sequence[str] = ()) -> tuple[int, ...]:
        """The tokens of a conversation's first messages and of the opening of the
        agent's turn. Raises ChatError.

        `tools` are the declarations that the agent is shown, as `ChatTemplate.render`
        takes them.
        """
        return self._start(tuple(messages), tuple(tools))

    def extend(
        self, sampled: Sequence[int], messages: Sequence[Message], *, prompt: bool = True
    ) -> tuple[int, ...]:
        """The tokens to append after a turn whose last tokens are `sampled` (the whole
        turn, or its end).

        What is left of the end of turn, `messages`, and with `prompt` the opening of
        the next turn. Raises ChatError.
        """
        return self._extend(tuple(messages), prompt)[self.ended_by(sampled) :]

    def spoken(self, text: str) -> tuple[int, ...]:
        """The tokens of a turn that nobody sampled: scripted words, and the token that
        ends the agent's turn.
        """
        return (*self._encode(text), *self._end[: 1 if self._closes_with_token else len(self._end)])

    def ended_by(self, sampled: Sequence[int]) -> int:
        """How many of the last sampled tokens are the template's end of turn already."""
        for count in range(min(len(self._end), len(sampled)), 0, -1):
            if tuple(sampled[len(sampled) - count :]) == self._end[:count]:
                return count
        return 0

    def text(self, sampled: Sequence[int]) -> str:
        """The agent's words: the turn's tokens without its end."""
        end = len(sampled) - self.ended_by(sampled)
        if end == len(sampled) and sampled and sampled[-1] in self.stop_token_ids:
            end -= 1
        return self.decode(sampled[:end])

    def pieces(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """What each token adds to the text of all: whole characters, so "" for one
        within a character that others end.

        Joined they are `decode(tokens)`. A character that is never ended is in the last
        piece.
        """
        found, whole = [], self.decode(tokens)
        since = read = 0
        for end in range(1, len(tokens) + 1):
            before, after = self.decode(tokens[since:read]), self.decode(tokens[since:end])
            if end < len(tokens) and (len(after) <= len(before) or after.endswith("\ufffd")):
                found.append("")
            else:
                found.append(after[len(before) :])
                since, read = read, end
        # A tokenizer whose text is not the sum of its windows has no pieces: then all
        # of it comes at the end.
        return tuple(found) if "".join(found) == whole else (*[""] * (len(tokens) - 1), whole)

    def literal(self, text: str) -> tuple[int, ...]:
        """The tokens of text put into the agent's mouth: special tokens where it spells
        them.
        """
        return self._encode(text)

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the chat template tells the agent to call tools, None where that is not
        known.
        """
        return calls_of(self._template.source)

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the chat template tells the agent of its tools."""
        tool = json.dumps(
            {"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}
        )
        return self.start((CONTEXT[0],), (tool,)) != self.start((CONTEXT[0],))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of any tokens, special ones included."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def words(self, words: Sequence[str]) -> tuple[int, ...]:
        """Token ids of an action grammar's words.

        Raises ConfigError for a word that is not one token.
        """
        found = [self._encode(word) for word in words]
        for word, ids in zip(words, found, strict=True):
            if len(ids) != 1:
                raise ConfigError(
                    f"{self._name}: an allowed word must be one token, got {word!r} "
                    f"of {len(ids)} tokens"
                )
        return tuple(ids[0] for ids in found)

    def _encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a rendering: special ones where it spells them, save between
        OPEN and CLOSE.
        """
        text = valid(text)
        if OPEN not in text:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
        ids: list[int] = []
        for index, piece in enumerate(re.split(f"{OPEN}(.+?){CLOSE}", text, flags=re.DOTALL)):
            tokenizer = self._literal if index % 2 else self._tokenizer
            ids += tokenizer.encode(piece, add_special_tokens=False).ids
        return tuple(ids)

    @cached_property
    def _literal(self) -> Tokenizer:
        """The same tokenizer, to which the spelling of a special token is text.

        Made at need: a large vocabulary takes time.
        """
        tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _guard(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with what must stay text between OPEN and CLOSE: special tokens,
        and our own marks.
        """
        text = self._guard_text
        return [
            msgspec.structs.replace(
                message,
                content=text(message.content),
                tool_calls=tuple(
                    ToolCall(
                        id=text(call.id),
                        name=text(call.name),
                        arguments=self._guard_json(call.arguments),
                    )
                    for call in message.tool_calls
                ),
                tool_call_id=text(message.tool_call_id),
                name=text(message.name),
            )
            for message in messages
        ]

    def _guard_text(self, text: str) -> str:
        return self._guarded.sub(rf"{OPEN}\g<0>{CLOSE}", text)

    def _guard_json(self, source: str) -> str:
        """JSON whose strings are guarded, also where it spelled them with escapes;
        other text is guarded as it is.
        """
        try:
            plain = json.dumps(json.loads(source), ensure_ascii=False)
        except (ValueError, RecursionError):
            plain = source
        return self._guard_text(plain)

    def _is_special(self, token: int) -> bool:
        return self._tokenizer.decode([token], skip_special_tokens=True) == ""

    def _render_start(
        self, messages: tuple[Message, ...], tools: tuple[str, ...]
    ) -> tuple[int, ...]:
        guarded = [self._guard_json(tool) for tool in tools]
        return self._encode(
            self._template.render(self._guard(messages), prompt=True, tools=guarded)
        )

    def _render_extension(self, messages: tuple[Message, ...], prompt: bool) -> tuple[int, ...]:
        return self._encode(self._after_mark((*CONTEXT, *self._guard(messages)), prompt=prompt))

    def _after_mark(self, messages: Sequence[Message], *, prompt: bool) -> str:
        pieces = self._template.render(messages, prompt=prompt).split(MARK)
        if len(pieces) != 2:
            raise ChatError(
                f"{self._name}: chat template must show an assistant message once, "
                f"got {len(pieces) - 1} times"
            )
        return pieces[1]

    def _check_extendable(self) -> None:
        """Refuse a template where what follows the agent's turn is not simply appended,
        or depends on earlier turns.
        """
        earlier = (Message(role="user", content="c"), Message(role="assistant", content="d"))
        problem = ""
        try:
            after = self._after_mark((*CONTEXT, QUESTION), prompt=True)
            later = self._after_mark((*earlier, *CONTEXT, QUESTION), prompt=True)
            closed = self._after_mark(CONTEXT, prompt=False)
        except ChatError as error:
            problem = str(error)
        else:
            if after.count(QUESTION.content) != 1:
                problem = "a new message must appear once, after the turn before it"
            elif after != later:
                problem = "what follows a turn must not depend on earlier turns"
            elif not after.startswith(closed):
                problem = (
                    f"a turn must end with {closed!r} also where another follows, got {after!r}"
                )
        if problem:
            raise ConfigError(
                f"{self._name}: chat template cannot be extended turn by turn: {problem}"
            )


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    return tuple(
        a
        for a, _ in itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(left, right, strict=False)
        )
    )


def _eos(directory: Path, tokenizer: Tokenizer) -> list[int]:
    """End-of-sequence ids that the checkpoint names: generation_config.json,
    config.json and the tokenizer's eos_token.
    """
    found: list[int] = []
    for file in ("generation_config.json", "config.json"):
        value = read_json(directory / file).get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    text = special_tokens(directory).get("eos_token")
    token = None if text is None else tokenizer.token_to_id(text)
    return [*found, *([] if token is None else [token])]
