"""Text and tokens: the tokens of plain text, and the guard that keeps text of messages
from becoming markers, the tokens with which a chat template marks turns and tool calls.

The spellings of markers in messages are delimited before the template renders them, and
tokenized without added tokens afterwards. Markers are special tokens and the other
added tokens that the template writes, except white space.
"""

import copy
import functools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, Self

import msgspec
from tokenizers import Tokenizer

from rollweave.io.reading import read_json
from rollweave.io.tokenizer import CheckpointTokenizer, read_tokenizer
from rollweave.rollout.chat.replies import Thinking, ToolFormat
from rollweave.rollout.chat.template import CLOSE, HOLE, OPEN, ChatError
from rollweave.schema.chat import Message, ToolCall
from rollweave.schema.errors import ConfigError
from rollweave.schema.text import valid

CACHED_SPELLINGS: Final = 1024
"""Number of tokenized spellings that are kept: there are few markers."""


class Guard:
    """The markers of a template with these `literals`. `turns` are the tokens of
    renderings without calls and tools, `written` the tokens of other renderings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        literals: str,
        *,
        turns: set[int],
        written: set[int],
    ) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        written = (written | turns) & added.keys()
        special = {id for id, token in added.items() if token.special}
        named = {id for id, token in added.items() if token.content in literals}
        texts = {id: token.content for id, token in added.items() if token.content}
        self.markers = {
            text: id
            for id, text in texts.items()
            if id in special or (id in written | named and not text.isspace())
        }
        """The spelling of each marker, and its token."""
        self.pattern = re.compile(f"(?<!{OPEN})(?:{pattern_of(self.markers) or '(?!)'})")
        """Matches markers that the template writes, in a rendering."""
        self.unwritten = frozenset(special - written - named)
        """Special tokens that are in no rendering, as far as is known."""
        own = [text for text, id in self.markers.items() if id in special | turns]
        self._of_agent, self._of_others = map(_text_of, (own, self.markers))
        self._delimited = re.compile(f"{OPEN}({self._of_others.pattern}){CLOSE}|[{OPEN}{CLOSE}]")
        self._normalizer = tokenizer.normalizer
        self._normalized = [
            (text, self._normalizer.normalize_str(text))
            for text, id in self.markers.items()
            if self._normalizer is not None and added[id].normalized
        ]
        self._literal = functools.lru_cache(CACHED_SPELLINGS)(self._encode_literally)

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with the spellings of markers delimited. In the agent's
        messages, marks within a turn, such as the marks of a tool call, stay marks.

        Raises ChatError for text that only the tokenizer's normalization turns into a
        marker.
        """
        return [
            msgspec.structs.replace(
                message,
                content=self._text(
                    message.content,
                    self._of_agent if message.role == "assistant" else self._of_others,
                ),
                tool_calls=tuple(
                    ToolCall(
                        id=self._text(call.id),
                        name=self._text(call.name),
                        arguments=self.json(call.arguments),
                    )
                    for call in message.tool_calls
                ),
                tool_call_id=self._text(message.tool_call_id),
                name=self._text(message.name),
                thoughts=self._text(message.thoughts),
            )
            for message in messages
        ]

    def json(self, source: str) -> str:
        """Guard JSON's strings, also if they are spelled with escapes; guard other text
        as it is.
        """
        try:
            plain = json.dumps(json.loads(source), ensure_ascii=False)
        except (ValueError, RecursionError):
            plain = source
        return self._text(plain)

    def encode(self, rendering: str, *, before: str = "") -> list[int]:
        """Tokenize a rendering that follows the text `before`. Spellings of added
        tokens become these tokens, except in the content of messages.
        """
        first, *others = self._delimited.split(valid(rendering))
        ids = encode_after(self._tokenizer, before, first) if first else []
        for place, piece in enumerate(others):
            # a template that divides a text may leave one delimiter of a pair: None
            if piece and place % 2:
                ids += encode_after(self._tokenizer, "\n", piece)
            elif piece:
                ids += self._literal(piece)
        return ids

    def _text(self, text: str, spelled: re.Pattern[str] | None = None) -> str:
        spelled = spelled or self._of_others
        if self._normalized and self._normalizer is not None:
            rest = spelled.sub("", text)
            normal = self._normalizer.normalize_str(rest)
            for marker, form in self._normalized:
                if form and form in normal:
                    raise ChatError(
                        f"a message must not have text that becomes {marker} when the tokenizer "
                        f"normalizes it, got {rest!r:.80}"
                    )
        return spelled.sub(rf"{OPEN}\g<0>{CLOSE}", text)

    def _encode_literally(self, text: str) -> tuple[int, ...]:
        """Tokenize a spelling without added tokens. Raises ChatError if the result is
        the marker even so.
        """
        line = encode(self._tokenizer, "\n")
        ids = self._vocabulary_ids(f"\n{text}")
        ids = ids[len(line) :] if ids[: len(line)] == line else self._vocabulary_ids(text)
        if self.markers.get(text) in ids:
            raise ChatError(
                f"a message must not spell {text}, which the tokenizer takes for the token also in "
                "plain text"
            )
        return tuple(ids)

    def _vocabulary_ids(self, text: str) -> list[int]:
        tokenizer = self._tokenizer
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text)
        words = [text]
        if tokenizer.pre_tokenizer is not None:
            words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in tokenizer.model.tokenize(word)]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text, with added tokens where it spells them."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def encode_after(tokenizer: Tokenizer, before: str, text: str) -> list[int]:
    """Return the tokens of a text that follows `before`: without the space that some
    tokenizers put at the beginning. The text is tokenized alone if a token would span
    both.
    """
    if not before:
        return encode(tokenizer, text)
    start = encode(tokenizer, before)
    both = encode(tokenizer, before + text)
    return both[len(start) :] if both[: len(start)] == start else encode(tokenizer, text)


def pattern_of(texts: Iterable[str]) -> str:
    """Return a pattern that matches the longest of these texts. It is a tree of their
    characters, so that a search takes no longer for thousands of texts.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branches(tree)


def _branches(node: dict[str, Any]) -> str:
    """Return the pattern of the texts that continue at a node."""
    only = ""
    while len(node) == 1 and "" not in node:
        ((key, node),) = node.items()
        only += re.escape(key)
    branches = [re.escape(key) + _branches(child) for key, child in node.items() if key]
    if not branches:
        return only
    both = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return only + (f"(?:{both})?" if "" in node else both)


def _text_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of the strings that must stay text in messages: these texts,
    and our own delimiters.
    """
    spelled = pattern_of(texts)
    return re.compile(f"{spelled}|[{OPEN}{CLOSE}{HOLE}]" if spelled else f"[{OPEN}{CLOSE}{HOLE}]")


class TextCodec:
    """A tokenizer, and the tokens that end a text. Without a tokenizer, the text of any
    tokens is empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, eos: Iterable[int] = ()) -> None:
        self._reader, self._hides_special = tokenizer, False
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(eos))
        """Tokens that end the agent's turn."""
        self.stop: tuple[str, ...] = ()
        """Text that ends the agent's turn."""
        self.plain: TextCodec = self
        """The codec of plain text, which no chat template changes."""

    @classmethod
    def of_checkpoint(cls, directory: Path) -> "TextCodec":
        """Return the codec of a checkpoint's plain text.

        Raises ConfigError for a tokenizer that cannot be read.
        """
        read = read_tokenizer(directory)
        if read is None:
            return TextCodec(None)
        return TextCodec(read.tokenizer, eos=eos_tokens(directory, read))

    @property
    def tool_format(self) -> ToolFormat | None:
        """The format in which the chat template tells the agent to call tools, None if
        it is unknown.
        """
        return None

    @property
    def thinking(self) -> Thinking | None:
        """The marks of the model's thoughts; None if its template has no marks."""
        return None

    def shown_thoughts(self, messages: Sequence[Message]) -> frozenset[int]:
        """Return the numbers of the messages whose thoughts the chat template shows in
        this conversation, at the opening of the next turn.
        """
        del messages
        return frozenset()

    @property
    def shows_tools(self) -> bool:
        """True if the chat template shows the agent its tools."""
        return False

    @property
    def template_variables(self) -> frozenset[str]:
        """Names of the arguments that the chat template reads."""
        return frozenset()

    def with_arguments(self, arguments: str) -> "TextCodec":
        """Return this codec with arguments of its chat template: a JSON object, or ""
        for none. Raises ChatError for an argument that the template does not read, or
        with which a conversation cannot grow by appending.
        """
        return self if not arguments else self._without_template()

    def start(
        self,
        messages: Sequence[Message],
        tools: Sequence[str] = (),
        *,
        prompt: bool = True,
        continues: bool = False,
    ) -> tuple[int, ...]:
        """Return the tokens of a conversation's first messages. Raises ChatError, as
        there is no chat template.
        """
        del messages, tools, prompt, continues
        return self._without_template()

    def extend(
        self,
        sampled: Sequence[int],
        messages: Sequence[Message],
        *,
        prompt: bool = True,
        tools: Sequence[str] = (),
    ) -> tuple[int, ...]:
        """Return the tokens to append after a turn. Raises ChatError, as `start`."""
        del sampled, prompt
        return self.start(messages, tools)

    def _without_template(self) -> NoReturn:
        raise ChatError("the checkpoint has no chat template: only completions of text are served")

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of any tokens, including special tokens."""
        if self._reader is None:
            return ""
        text: str = self._reader.decode(list(tokens), skip_special_tokens=self._hides_special)
        return text

    def without_special(self) -> Self:
        """Return this codec, except that special tokens have no text."""
        other = copy.copy(self)
        other._hides_special = True
        return other

    def encode_literal(
        self, text: str, *, after: str = "", adds_special: bool = False
    ) -> tuple[int, ...]:
        """Return the tokens of a text that follows the text `after`, with special
        tokens where it spells them. With `adds_special`, special tokens that the
        tokenizer adds are included.

        Raises ChatError without a tokenizer.
        """
        if self._reader is None:
            raise ChatError("a prompt must be token ids: the checkpoint has no tokenizer")
        if adds_special:
            return tuple(self._reader.encode(valid(text)).ids)
        return tuple(encode_after(self._reader, after, valid(text)))

    def added_before(self) -> tuple[int, ...]:
        """Return the special tokens that the tokenizer adds before a text."""
        reader = self._reader
        if reader is None:
            return ()
        plain = reader.encode("a", add_special_tokens=False).ids
        whole = reader.encode("a", add_special_tokens=True).ids
        place = next(at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
        return tuple(whole[:place])

    def names(self, tokens: Sequence[int]) -> list[str | None]:
        """Return the tokens as the vocabulary spells them; None for unknown tokens."""
        reader = self._reader
        return [None if reader is None else reader.id_to_token(token) for token in tokens]

    def pieces(self, text: str) -> list[str | int]:
        """Return a text in pieces: the added tokens that it spells, by their ids, and
        the texts between them.
        """
        added = self._added
        parts = re.split(f"({'|'.join(map(re.escape, added))})", text) if added else [text]
        return [added.get(part, part) for part in parts if part]

    @functools.cached_property
    def _added(self) -> dict[str, int]:
        """The added tokens, the longest first."""
        tokens = {} if self._reader is None else self._reader.get_added_tokens_decoder()
        texts = {token.content: id for id, token in tokens.items()}
        return {text: texts[text] for text in sorted(texts, key=len, reverse=True)}

    def end_overlap(self, sampled: Sequence[int]) -> int:
        """Return how many of the last sampled tokens already belong to the end of the
        turn that a chat template writes.
        """
        del sampled
        return 0

    def text(self, sampled: Sequence[int]) -> str:
        """Return the agent's message: the text of the turn's tokens without its end."""
        end = len(sampled) - self.end_overlap(sampled)
        if end == len(sampled) and sampled and sampled[-1] in self.stop_token_ids:
            end -= 1
        return self.decode(sampled[:end])


class TokenTexts:
    """Finds the text that each token of a growing sequence adds, in complete
    characters. A tokenizer may render a token differently after another token: new text
    is the difference of two decodings that start at the same token.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._tokens: list[int] = []
        """The tokens from the last but one token that completed a character on."""
        self._read = 0

    def add(self, token: int) -> str:
        """Append a token; return its text, "" within a character that later tokens
        complete.
        """
        self._tokens.append(token)
        added = self.rest()
        if not added or added.endswith("\ufffd"):
            return ""
        del self._tokens[: self._read]
        self._read = len(self._tokens)
        return added

    def rest(self) -> str:
        """Return the text of the tokens that have no text yet."""
        before = self._codec.decode(self._tokens[: self._read])
        return self._codec.decode(self._tokens)[len(before) :]


def eos_tokens(directory: Path, read: CheckpointTokenizer) -> list[int]:
    """Return the end-of-sequence ids that the checkpoint names: in
    generation_config.json, config.json and the tokenizer's eos_token. An id beyond the
    model's vocabulary is left out, since no engine can sample it. Raises ConfigError
    for a value that is not an id.
    """
    config = read_json(directory / "config.json")
    text = config.get("text_config")
    inner = text if isinstance(text, dict) else {}
    ids: list[int] = []
    for values in (read_json(directory / "generation_config.json"), config, inner):
        value = values.get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if any(type(id) is not int for id in ids):
        raise ConfigError(f"{directory}: eos_token_id must be an id or a list of ids, got {ids}")
    end = read.special.get("eos_token")
    token = None if end is None else read.tokenizer.token_to_id(end)
    size = config.get("vocab_size") or inner.get("vocab_size")
    found = [*ids, *([] if token is None else [token])]
    return [id for id in found if not isinstance(size, int) or 0 <= id < size]
