"""Token-exact multi-turn chat: messages become tokens once, and sampled tokens are
never tokenized again.

A conversation grows by appending only. The agent's turn is followed by what the chat
template puts after an assistant message (`following`): the rest of the end of turn, the
new messages, and the opening of the next turn. So neither the tokenization of the
agent's message nor what the template does to earlier turns (drop the reasoning, trim)
can change an earlier token.

The messages of environments and users are text: where they spell a marker
(`<|im_end|>`), the spelling is tokenized as ordinary text (`Guard`), so that no message
can close its own turn and pose as another role. Markers come from the template alone.
(A template whose turns are marked by ordinary text has no such guard.)
"""

import contextlib
import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Self

import msgspec
from tokenizers import Tokenizer

from rollweave.io.tokenizer import missing_tokenizer, read_tokenizer
from rollweave.rollout.chat.following import (
    ANSWER,
    CONTEXT,
    EARLIER,
    LETTER,
    PLACEHOLDER,
    QUESTION,
    Ending,
    Following,
    calling,
)
from rollweave.rollout.chat.replies import Thinking, ToolFormat, tool_format_of
from rollweave.rollout.chat.template import (
    DEFAULT,
    HOLE,
    WITH_TOOLS,
    ChatError,
    ChatTemplate,
    configured,
    read_templates,
)
from rollweave.rollout.chat.text import Guard, TextCodec, encode, encode_after, eos_tokens
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError
from rollweave.schema.serving import Sampling
from rollweave.schema.text import valid

__all__ = ["PLACEHOLDER", "ChatCodec", "ChatError"]

SYSTEM: Final = Message(role="system", content="s")
TOOL: Final = json.dumps(
    {"type": "function", "function": {"name": "probe", "description": "", "parameters": {}}}
)
THOUGHT: Final = "<think>\nt\n</think>\n\n"

CACHED = 8192
"""Number of cached renderings: the messages of small environments repeat."""

CACHED_CHARS: Final = 1 << 12
"""Maximum characters of messages and tools whose rendering is cached, so that the cache
stays small.
"""


VARIANTS = 64
"""Number of cached variants of a codec: a variant for each set of template arguments,
or of tools.
"""


class ChatCodec(TextCodec):
    """A tokenizer and a chat template, and perhaps another template for conversations
    with tools.

    Raises ConfigError for a template whose conversations cannot grow by appending.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        name: str = "chat template",
        eos: Sequence[int] = (),
        with_tools: ChatTemplate | None = None,
    ) -> None:
        super().__init__(tokenizer)
        self._tokenizer = tokenizer
        self.plain = TextCodec(tokenizer, eos=eos)
        self._name, self._eos = name, tuple(eos)
        self._use(template, with_tools or template)

    def _use(self, template: ChatTemplate, with_tools: ChatTemplate) -> None:
        """Render with these templates. Raises ConfigError if the first cannot be
        extended.
        """
        self._template, self._with_tools = template, with_tools
        results = ((CONTEXT[0], calling((ANSWER,)), ANSWER), (*CONTEXT, ANSWER))
        self._guard = Guard(
            self._tokenizer,
            f"{template.literals}\0{with_tools.literals}",
            turns=self._written(template, ((SYSTEM, CONTEXT[0]), (*CONTEXT, QUESTION), results[1])),
            written=self._written(with_tools, (*results, (SYSTEM, CONTEXT[0])), (TOOL,)),
        )
        self._following = lru_cache(VARIANTS)(self._make_following)
        self._ending = lru_cache(VARIANTS)(self._make_ending)
        try:
            self._endings = [self._ending(())]
        except ChatError as error:
            raise ConfigError(str(error)) from error
        if with_tools is not template:
            with contextlib.suppress(ChatError):  # it is refused when there are tools
                self._endings.append(self._ending((TOOL,)))
        tokens = [token for ending in self._endings for token in ending.tokens]
        self.stop_token_ids = tuple(dict.fromkeys([*tokens, *self._eos]))
        """Tokens that end the agent's turn: the template's and the checkpoint's."""
        self.stop = tuple(dict.fromkeys(ending.stop for ending in self._endings if ending.stop))
        """Text that ends the agent's turn if the template closes it with ordinary
        text.
        """
        self._guarded = lru_cache(VARIANTS)(self._guard_tools)
        self._after = lru_cache(CACHED)(self._text_after)
        self._rest = lru_cache(CACHED)(self._encode_rest)
        self._start = lru_cache(CACHED)(self._render_start)
        self._variants = lru_cache(VARIANTS)(self._with_arguments)

    def _written(
        self,
        template: ChatTemplate,
        conversations: Iterable[Sequence[Message]],
        tools: Sequence[str] = (),
    ) -> set[int]:
        """Return the tokens of the conversations that the template accepts."""
        tokens = set[int]()
        for messages in conversations:
            with contextlib.suppress(ChatError):
                text = template.render(messages, prompt=True, tools=tools)
                tokens.update(encode(self._tokenizer, text))
        return tokens

    def _make_following(self, tools: tuple[str, ...]) -> Following:
        """Raises ChatError for a template that cannot be extended."""
        template = self._with_tools if tools else self._template
        try:
            return Following(template, self._guard.pattern, name=self._name, tools=tools)
        except ChatError as error:
            raise ChatError(
                f"{self._name}: chat template cannot be extended turn by turn: {error}"
            ) from error

    def _make_ending(self, tools: tuple[str, ...]) -> Ending:
        return Ending(
            self._following(tools), self._tokenizer, self._guard.pattern, self._guard.markers
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
        read = read_tokenizer(directory)
        if read is None:
            raise ConfigError(missing_tokenizer(directory))
        templates = configured(read_templates(directory, read.special, template), arguments or {})
        return cls(
            read.tokenizer,
            templates[DEFAULT],
            name=str(directory),
            eos=eos_tokens(directory, read),
            with_tools=templates.get(WITH_TOOLS),
        )

    @property
    def template_variables(self) -> frozenset[str]:
        return self._template.variables | self._with_tools.variables

    def with_arguments(self, arguments: str) -> TextCodec:
        return self._variants(arguments) if arguments else self

    def _with_arguments(self, arguments: str) -> TextCodec:
        other, values = copy.copy(self), json.loads(arguments)
        template, with_tools = self._template.with_those_of(values), self._with_tools
        unknown = {
            name: value for name, value in values.items() if name not in self.template_variables
        }
        template = template.with_arguments(unknown)  # refuses them
        is_other = with_tools is not self._template
        try:
            other._use(template, with_tools.with_those_of(values) if is_other else template)
        except ConfigError as error:
            raise ChatError(str(error)) from error
        return other

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint."""
        return self._tokenizer

    @property
    def unwritten(self) -> frozenset[int]:
        """Special tokens that no prompt has, as far as is known: the chat template does
        not write them, and their spellings in messages are text.
        """
        return self._guard.unwritten - set(self.stop_token_ids)

    @property
    def rewritten(self) -> list[str]:
        """The parts of a conversation that the chat template changes or moves once more
        messages follow. In a conversation that grows, their tokens stay unchanged.
        """
        opening = (EARLIER[0],)
        if self._following(()).rewrites(opening, "d"):
            return ["the openings of turns"]
        kinds = {
            "system messages": ((), (SYSTEM, *opening), "d"),
            "tools": ((TOOL,), opening, "d"),
            "thoughts": ((), opening, f"{THOUGHT}d"),
        }
        found = list[str]()
        for kind, (tools, first, said) in kinds.items():
            with contextlib.suppress(ChatError):
                found += [kind] if self._following(tools).rewrites(first, said) else []
        return found

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
        large = sum(map(len, tools)) + sum(message.chars for message in messages) > CACHED_CHARS
        start = self._render_start if large else self._start
        return start(tuple(messages), tuple(tools), prompt, continues)

    def extend(
        self,
        sampled: Sequence[int],
        messages: Sequence[Message],
        *,
        prompt: bool = True,
        tools: Sequence[str] = (),
    ) -> tuple[int, ...]:
        """Return the tokens to append after a turn whose last tokens are `sampled` (the
        complete turn, or its end). `tools` are the tools with which the conversation
        started.

        They are the rest of the end of turn, `messages`, and with `prompt` the opening
        of the next turn. Raises ChatError.
        """
        guarded = self._guarded(tuple(tools))
        large = sum(message.chars for message in messages) > CACHED_CHARS
        text_after, rest = (
            (self._text_after, self._encode_rest) if large else (self._after, self._rest)
        )
        after = text_after(tuple(messages), prompt, guarded)
        return rest(after, self._ending(guarded).written(sampled, after, self.decode))

    def encode_turn(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a scripted turn: its text, and the end of the agent's
        turn.
        """
        following = self._following(())
        turn = f"{following.lead}{valid(text)}{self._endings[0].text}"
        return tuple(encode_after(self._tokenizer, following.opening, turn))

    def end_overlap(self, sampled: Sequence[int]) -> int:
        return max(ending.overlap(sampled) for ending in self._endings)

    def text(self, sampled: Sequence[int]) -> str:
        text = super().text(sampled)
        for ending in self._endings:  # a token may contain the end of the message and this text
            text = ending.without(text)
        return text

    @property
    def tool_format(self) -> ToolFormat | None:
        return tool_format_of(self._with_tools.source)

    @property
    def thinking(self) -> Thinking | None:
        return self._template.thinking

    def shown_thoughts(self, messages: Sequence[Message]) -> frozenset[int]:
        marks = {
            place: f"{HOLE}{place}{HOLE}"
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
        return self.start((CONTEXT[0],), (TOOL,)) != self.start((CONTEXT[0],))

    def single_token_ids(self, words: Sequence[str]) -> tuple[int, ...]:
        """Return the token ids of an action grammar's words.

        Raises ConfigError for a word that is not one token.
        """
        encoded = [encode(self._tokenizer, word) for word in words]
        for word, ids in zip(words, encoded, strict=True):
            if len(ids) != 1:
                raise ConfigError(
                    f"{self._name}: an allowed word must be one token, got {word!r} "
                    f"of {len(ids)} tokens"
                )
        return tuple(ids[0] for ids in encoded)

    def _render_start(
        self, messages: tuple[Message, ...], tools: tuple[str, ...], prompt: bool, continues: bool
    ) -> tuple[int, ...]:
        template = self._with_tools if tools else self._template
        guarded = self._guard.messages(messages)
        text = template.render(guarded, prompt=prompt, tools=self._guarded(tools))
        if continues:
            last = guarded[-1].content
            place = text.rfind(last.strip())
            if place < 0 or not last.strip():
                raise ChatError(f"{self._name}: chat template must show the last message as it is")
            whole = text.startswith(last.lstrip(), place)
            text = text[: place + len(last.lstrip() if whole else last.strip())]
        return tuple(self._guard.encode(text))

    def _guard_tools(self, tools: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(self._guard.json, tools))

    def _text_after(
        self, messages: tuple[Message, ...], prompt: bool, tools: tuple[str, ...]
    ) -> str:
        """Return the guarded text after the agent's message; `tools` are guarded."""
        return self._following(tools).after(self._guard.messages(messages), prompt=prompt)

    def _encode_rest(self, after: str, written: int) -> tuple[int, ...]:
        """Return the tokens of `after` without its first `written` characters, which
        the agent has written.
        """
        before = after[:written]
        if not before and not self._guard.pattern.match(after):
            before = LETTER
        return tuple(self._guard.encode(after[written:], before=before))


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """The agent's configuration in one task domain: the codec between messages and
    tokens, and the sampling parameters without seed and length.
    """

    codec: ChatCodec
    sampling: Sampling
