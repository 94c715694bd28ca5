"""Token-exact multi-turn chat: messages become tokens once, and what the engine sampled
is never tokenized again.

A conversation grows by appending only. The agent's turn is followed by what the chat
template puts after an assistant message: the rest of the end of turn, the new messages,
and the opening of the next turn. That text is taken from a rendering in which a
placeholder represents the agent's message, so neither the tokenization of the message
nor what the template does to earlier turns (drop the reasoning, trim) can change an
earlier token.

What an environment or a user writes is text: where it spells a special token
(`<|im_end|>`), the spelling is tokenized as ordinary text, so that no message can close
its own turn and pose as another role. Special tokens come from the template alone, and
so does the placeholder of an image, of which a rendering has exactly one for each
image. (A template whose turns are marked by ordinary text has no such guard.)
"""

import copy
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, Self

import msgspec
from tokenizers import Tokenizer

from rollweave.rollout.chat.template import (
    ChatError,
    ChatTemplate,
    configured,
    read_template,
)
from rollweave.rollout.chat.text import TextCodec, eos_tokens, image_tokens, read_tokenizer
from rollweave.rollout.chat.thoughts import Thinking
from rollweave.rollout.chat.tools import ToolFormat, tool_format_of
from rollweave.schema.chat import Message, ToolCall, message_of
from rollweave.schema.errors import ConfigError
from rollweave.schema.media import DIGEST_CHARS, Image
from rollweave.schema.text import valid

__all__ = ["ChatCodec", "ChatError"]

PLACEHOLDER: Final = "\u2042mark\u2042"
"""Represents the agent's message in a rendering.

No template contains it, and it has no white space that a template could trim.
"""

CONTEXT: Final = (Message(role="user", content="a"), Message(role="assistant", content=PLACEHOLDER))
"""The shortest conversation that every template accepts before a new message."""

QUESTION: Final = Message(role="user", content="\u2042new\u2042")
"""A message that is recognizable in a rendering."""

BLANK: Final = Image(digest="0" * DIGEST_CHARS, media_type="image/png")
"""Stands for any image in a rendering."""

OPEN, CLOSE = "\ue000", "\ue001"
"""Delimiters of text in a rendering that is tokenized without special tokens.

They are private-use characters: no template contains them.
"""

THOUGHT: Final = "\ue002"
"""Delimiter of what stands for a message's thoughts in a rendering."""

CACHED = 8192
"""Number of cached renderings: the messages of small environments repeat."""

CACHED_CHARS: Final = 1 << 12
"""Maximum characters of messages and tools whose rendering is cached, so that the cache
stays small.
"""


VARIANTS = 64
"""Number of cached variants of a codec: one for each set of template arguments."""


class ChatCodec(TextCodec):
    """A tokenizer and a chat template.

    Raises ConfigError for a template whose conversations cannot grow by appending.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        name: str = "chat template",
        eos: Sequence[int] = (),
        images: Sequence[int] = (),
    ) -> None:
        """`images` are the tokens that may be the placeholder of an image."""
        super().__init__(tokenizer)
        self._tokenizer = tokenizer
        self._literal = _Literal(tokenizer, images)
        self.plain = TextCodec(tokenizer, eos=eos)
        self._name, self._eos = name, tuple(eos)
        special = [
            token.content
            for id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special or id in images
        ]
        spellings = [
            *sorted(map(re.escape, special), key=len, reverse=True),
            f"[{OPEN}{CLOSE}{PLACEHOLDER[0]}]",
        ]
        self._guarded = re.compile("|".join(spellings))
        self._image_tokens = tuple(images)
        self._use(template)

    def _use(self, template: ChatTemplate) -> None:
        """Render with this template. Raises ConfigError if it cannot be extended."""
        self._template = template
        self._check_extendable()
        closing = self._after_placeholder(CONTEXT, prompt=False)
        following = self._encode(self._after_placeholder((*CONTEXT, QUESTION), prompt=True))
        self._end = _common_prefix(self._encode(closing), following)
        by_token = self._ends_with_token = bool(self._end) and self._is_special(self._end[0])
        ends = self._end[:1] if by_token else ()
        self.stop_token_ids = tuple(dict.fromkeys([*ends, *self._eos]))
        """Tokens that end the agent's turn: the template's and the checkpoint's."""
        self.stop = () if by_token or not closing else (closing,)
        """Text that ends the agent's turn if the template closes it with ordinary
        text.
        """
        self._extend = lru_cache(CACHED)(self._render_extension)
        self._start = lru_cache(CACHED)(self._render_start)
        self._variants = lru_cache(VARIANTS)(self._with_arguments)
        self.image_token = self._find_image_token()

    def _find_image_token(self) -> int | None:
        """Return the candidate of which a rendering of one image has one, and one of no
        image none.
        """
        without, shown = (
            [Message(role="user", content=QUESTION.content, images=images)]
            for images in ((), (BLANK,))
        )
        try:
            before, after = (
                self._encode(self._template.render(messages, prompt=True))
                for messages in (without, shown)
            )
        except ChatError:
            return None
        return next(
            (
                token
                for token in self._image_tokens
                if (before.count(token), after.count(token)) == (0, 1)
            ),
            None,
        )

    @classmethod
    def from_directory(
        cls,
        model_dir: str | Path,
        arguments: Mapping[str, Any] | None = None,
        *,
        template: Path | None = None,
    ) -> Self:
        """Return the codec of a checkpoint directory with tokenizer.json and a chat
        template, which gets the `arguments` of `model.template_arguments`. The file
        `template` takes the place of the checkpoint's.

        Raises ConfigError if one of them is missing, or for an argument that the
        template cannot have.
        """
        directory = Path(model_dir)
        tokenizer = read_tokenizer(directory)
        if tokenizer is None:
            raise ConfigError(f"{directory} must have a tokenizer.json, got none")
        return cls(
            tokenizer,
            configured(read_template(directory, template), arguments or {}),
            name=str(directory),
            eos=eos_tokens(directory, tokenizer),
            images=image_tokens(directory, tokenizer),
        )

    @property
    def no_images(self) -> str:
        """Why messages must have no images, "" if they may."""
        if self.image_token is not None:
            return ""
        return f"the chat template of {self._name} has no place for images"

    @property
    def template_variables(self) -> frozenset[str]:
        """Names of the arguments that the chat template reads."""
        return self._template.variables

    def with_arguments(self, arguments: str) -> TextCodec:
        """Return this codec with arguments of its chat template: a JSON object, or ""
        for none. Raises ChatError for an argument that the template does not read, or
        with which a conversation cannot grow by appending.
        """
        return self._variants(arguments) if arguments else self

    def _with_arguments(self, arguments: str) -> TextCodec:
        other = copy.copy(self)
        try:
            other._use(self._template.with_arguments(json.loads(arguments)))
        except ConfigError as error:
            raise ChatError(str(error)) from error
        return other

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint."""
        return self._tokenizer

    def start(
        self,
        messages: Sequence[Message],
        tools: Sequence[str] = (),
        *,
        prompt: bool = True,
        continues: bool = False,
    ) -> tuple[int, ...]:
        """Return the tokens of a conversation's first messages, and with `prompt` of
        the opening of the agent's turn. If it `continues`, the last message is left
        open. Raises ChatError.

        `tools` are the declarations that the agent is shown, as in
        `ChatTemplate.render`.
        """
        count = self._count_images(messages)
        large = sum(map(len, tools)) + sum(message.chars for message in messages) > CACHED_CHARS
        start = self._render_start if large else self._start
        tokens = start(_blanked(messages), tuple(tools), prompt, continues)
        return self._checked(tokens, count)

    def extend(
        self, sampled: Sequence[int], messages: Sequence[Message], *, prompt: bool = True
    ) -> tuple[int, ...]:
        """Return the tokens to append after a turn whose last tokens are `sampled` (the
        complete turn, or its end).

        They are the rest of the end of turn, `messages`, and with `prompt` the opening
        of the next turn. Raises ChatError.
        """
        count = self._count_images(messages)
        large = sum(message.chars for message in messages) > CACHED_CHARS
        extend = self._render_extension if large else self._extend
        tokens = self._checked(extend(_blanked(messages), prompt), count)
        return tokens[self.end_overlap(sampled) :]

    def _count_images(self, messages: Sequence[Message]) -> int:
        """Return the number of images. Raises ChatError if there is no place for
        them.
        """
        count = sum(len(message.images) for message in messages)
        if count and self.image_token is None:
            raise ChatError(f"{self.no_images}, got {count}")
        return count

    def _checked(self, tokens: tuple[int, ...], images: int) -> tuple[int, ...]:
        """Return the tokens of a rendering. Raises ChatError unless it has exactly one
        placeholder for each image.
        """
        shown = 0 if self.image_token is None else tokens.count(self.image_token)
        if shown != images:
            raise ChatError(
                f"{self._name}: chat template must show each of {images} images once, got {shown} "
                "placeholders"
            )
        return tokens

    def encode_turn(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a scripted turn: its text, and the token that ends the
        agent's turn.
        """
        return (*self._encode(text), *self._end[: 1 if self._ends_with_token else len(self._end)])

    def end_overlap(self, sampled: Sequence[int]) -> int:
        """Return how many of the last sampled tokens already belong to the template's
        end of turn.
        """
        for count in range(min(len(self._end), len(sampled)), 0, -1):
            if tuple(sampled[len(sampled) - count :]) == self._end[:count]:
                return count
        return 0

    @property
    def tool_format(self) -> ToolFormat | None:
        """The format in which the chat template tells the agent to call tools, None if
        it is unknown.
        """
        return tool_format_of(self._template.source)

    @property
    def thinking(self) -> Thinking | None:
        """The marks of the model's thoughts, None if its template has none."""
        return self._template.thinking

    def shown_thoughts(self, messages: Sequence[Message]) -> frozenset[int]:
        """Return the numbers of the messages whose thoughts the chat template shows in
        this conversation, at the opening of the next turn.
        """
        marks = {
            place: f"{THOUGHT}{place}{THOUGHT}"
            for place, message in enumerate(messages)
            if message.thoughts
        }
        if not marks:
            return frozenset()
        marked = [
            msgspec.structs.replace(message, thoughts=marks[place]) if place in marks else message
            for place, message in enumerate(messages)
        ]
        try:
            text = self._template.render(marked, prompt=True)
        except ChatError:  # it takes these messages in parts only
            return frozenset(marks)
        return frozenset(place for place, mark in marks.items() if mark in text)

    @property
    def shows_tools(self) -> bool:
        """True if the chat template shows the agent its tools."""
        tool = json.dumps(
            {"type": "function", "function": {"name": "probe", "description": "", "parameters": {}}}
        )
        return self.start((CONTEXT[0],), (tool,)) != self.start((CONTEXT[0],))

    def single_token_ids(self, words: Sequence[str]) -> tuple[int, ...]:
        """Return the token ids of an action grammar's words.

        Raises ConfigError for a word that is not one token.
        """
        encoded = [self._encode(word) for word in words]
        for word, ids in zip(words, encoded, strict=True):
            if len(ids) != 1:
                raise ConfigError(
                    f"{self._name}: an allowed word must be one token, got {word!r} "
                    f"of {len(ids)} tokens"
                )
        return tuple(ids[0] for ids in encoded)

    def _encode(self, text: str) -> tuple[int, ...]:
        """Tokenize a rendering: special tokens where it spells them, except between
        OPEN and CLOSE.
        """
        text = valid(text)
        if OPEN not in text:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
        ids: list[int] = []
        for index, piece in enumerate(re.split(f"{OPEN}(.+?){CLOSE}", text, flags=re.DOTALL)):
            tokenizer = self._literal.tokenizer if index % 2 else self._tokenizer
            ids += tokenizer.encode(piece, add_special_tokens=False).ids
        return tuple(ids)

    def _guard(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with special tokens and our own delimiters, which must
        stay text, between OPEN and CLOSE.
        """
        text = self._guard_text
        return [
            msgspec.structs.replace(
                message,
                **self._guard_content(message),
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
                thoughts=text(message.thoughts),
            )
            for message in messages
        ]

    def _guard_content(self, message: Message) -> dict[str, Any]:
        """Return the guarded content, and where images stand in it."""
        if not message.images:
            return {"content": self._guard_text(message.content)}
        parts = [
            self._guard_text(part) if isinstance(part, str) else part for part in message.parts()
        ]
        guarded = message_of(parts, role=message.role)
        return {"content": guarded.content, "image_places": guarded.image_places}

    def _guard_text(self, text: str) -> str:
        return self._guarded.sub(rf"{OPEN}\g<0>{CLOSE}", text)

    def _guard_json(self, source: str) -> str:
        """Guard JSON's strings, also if they are spelled with escapes; guard other text
        as it is.
        """
        try:
            plain = json.dumps(json.loads(source), ensure_ascii=False)
        except (ValueError, RecursionError):
            plain = source
        return self._guard_text(plain)

    def _is_special(self, token: int) -> bool:
        return self._tokenizer.decode([token], skip_special_tokens=True) == ""

    def _render_start(
        self, messages: tuple[Message, ...], tools: tuple[str, ...], prompt: bool, continues: bool
    ) -> tuple[int, ...]:
        declared, guarded = [self._guard_json(tool) for tool in tools], self._guard(messages)
        text = self._template.render(guarded, prompt=prompt, tools=declared)
        if continues:
            last = guarded[-1].content
            place = text.rfind(last.strip())
            if place < 0 or not last.strip():
                raise ChatError(f"{self._name}: chat template must show the last message as it is")
            whole = text.startswith(last.lstrip(), place)
            text = text[: place + len(last.lstrip() if whole else last.strip())]
        return self._encode(text)

    def _render_extension(self, messages: tuple[Message, ...], prompt: bool) -> tuple[int, ...]:
        return self._encode(
            self._after_placeholder((*CONTEXT, *self._guard(messages)), prompt=prompt)
        )

    def _after_placeholder(self, messages: Sequence[Message], *, prompt: bool) -> str:
        pieces = self._template.render(messages, prompt=prompt).split(PLACEHOLDER)
        if len(pieces) != 2:
            raise ChatError(
                f"{self._name}: chat template must show an assistant message once, "
                f"got {len(pieces) - 1} times"
            )
        return pieces[1]

    def _check_extendable(self) -> None:
        """Raise ConfigError for a template where what follows the agent's turn is not
        simply appended, or depends on earlier turns.
        """
        earlier = (Message(role="user", content="c"), Message(role="assistant", content="d"))
        problem = ""
        try:
            after = self._after_placeholder((*CONTEXT, QUESTION), prompt=True)
            later = self._after_placeholder((*earlier, *CONTEXT, QUESTION), prompt=True)
            closed = self._after_placeholder(CONTEXT, prompt=False)
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


class _Literal:
    """The same tokenizer, except that the spelling of a special token is text.

    It is created on demand, since a large vocabulary takes time. The tokens `images`
    count as special ones.
    """

    def __init__(self, tokenizer: Tokenizer, images: Sequence[int]) -> None:
        self._original, self._images = tokenizer, images

    @cached_property
    def tokenizer(self) -> Tokenizer:
        source = self._original.to_str()
        if self._images:
            parsed = json.loads(source)
            for token in parsed["added_tokens"]:
                token["special"] |= token["id"] in self._images
            source = json.dumps(parsed)
        tokenizer = Tokenizer.from_str(source)
        tokenizer.encode_special_tokens = True
        return tokenizer


def _blanked(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages with the same image in place of each: a rendering depends on
    the places of images alone.
    """
    return tuple(
        msgspec.structs.replace(message, images=(BLANK,) * len(message.images))
        if message.images
        else message
        for message in messages
    )


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    return tuple(
        a
        for a, _ in itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(left, right, strict=False)
        )
    )
