"""Keeps text of messages from becoming markers: the tokens with which a chat template
marks turns and tool calls.

The spellings of markers in messages are delimited before the template renders them, and
tokenized without added tokens afterwards. Markers are special tokens and the other
added tokens that the template writes, except white space.
"""

import functools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from rollweave.rollout.chat.template import CLOSE, HOLE, OPEN, ChatError
from rollweave.schema.chat import Message, ToolCall
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
