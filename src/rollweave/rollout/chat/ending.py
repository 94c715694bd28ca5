"""The end of the agent's turn under one chat template, and the part of it that the
agent has written itself.

A turn ends at a token if the template closes it with a marker (perhaps after a space),
or begins every other message with a marker; an ordinary token of the vocabulary never
ends a turn. Otherwise the turn ends at a text: the template's closing, or, if the
closing is a space, the beginning of the next message.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tokenizers import Tokenizer

from rollweave.rollout.chat.following import Following
from rollweave.rollout.chat.guard import encode_after

TAIL: Final = 8
"""Number of tokens that the agent may sample after the token that ends its turn."""

LETTER: Final = "a"
"""Stands for the end of the agent's text."""


class Ending:
    """The end of a turn. `markers` match the spellings of the tokens `ids`."""

    def __init__(
        self,
        following: Following,
        tokenizer: Tokenizer,
        markers: re.Pattern[str],
        ids: Mapping[str, int],
    ) -> None:
        self._tokenizer, self._markers, self._ids = tokenizer, markers, ids
        closing, header = following.closing, following.header
        self._closing = closing
        ends = following.ends or (() if closing.strip() else following.headers())
        self.tokens = tuple(ids[text] for text in ends)
        """The tokens that end the turn, the usual token first."""
        self.stop = ""
        """The text that ends the turn if no token does."""
        if following.ends:
            self._lead = closing.partition(ends[0])[0]
        elif ends:
            self._lead = closing
        else:
            is_text = closing.strip() or "\n" in closing
            self._lead = closing if is_text else f"{closing}{header}"
            self.stop = closing if is_text else self._lead.rstrip()
        self.text = f"{self._lead}{ends[0]}" if ends else closing
        """The text of the end that belongs to the agent's turn."""
        before = encode_after(tokenizer, LETTER, self._lead)
        self._start = len(before) if ends else 0
        rest = closing[len(self.text) :] if following.ends else ""
        after = list(self.tokens[:1])
        after += encode_after(tokenizer, self.text, rest) if rest else []
        self._sequence = (*before, *after)

    def overlap(self, sampled: Sequence[int]) -> int:
        """Return how many of the last sampled tokens belong to the end of the turn:
        they begin it, perhaps only from the token that ends the turn on.
        """
        for end in (self._sequence, self._sequence[self._start :], self.tokens[1:]):
            for count in range(min(len(end), len(sampled)), 0, -1):
                if tuple(sampled[len(sampled) - count :]) == end[:count]:
                    return count
        return 0

    def without(self, text: str) -> str:
        """Return the agent's text without the text that ends its turn."""
        for count in range(len(self._lead), len(self.stop) - 1, -1) if self.stop else ():
            if text.endswith(self._lead[:count]):
                return text[: len(text) - count]
        return text

    def written(
        self, sampled: Sequence[int], after: str, decode: Callable[[Sequence[int]], str]
    ) -> int:
        """Return how many of the first characters of `after`, the template's text after
        the agent's message, the agent has written at the end of its turn.
        """
        found = self._markers.match(after, len(self._lead))
        if found is not None and after.startswith(self._lead):
            token = self._ids[found.group()]
            tokens = self.tokens if token in self.tokens else (token,)
            for count in range(min(TAIL, len(sampled))):
                if sampled[len(sampled) - 1 - count] not in tokens:
                    continue
                more = decode(sampled[len(sampled) - count :]) if count else ""
                if not more or self._closing.startswith(more, found.end()):
                    return found.end() + len(more)
        tail = decode(sampled[-(len(self._lead) + TAIL) :]) if self._lead else ""
        for count in range(len(self._lead), 0, -1):
            if tail.endswith(self._lead[:count]) and after.startswith(self._lead[:count]):
                return count
        return 0
