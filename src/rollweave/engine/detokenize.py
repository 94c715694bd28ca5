"""Detects stop strings in a growing sequence of tokens, decoding only its end.

A token may hold part of a character, and a tokenizer may render a token differently
after another one. New text is therefore the difference of two decodings that start at
the same token, and an incomplete character (U+FFFD at the end) is held back until it is
complete.
"""

from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from rollweave.io.tokenizer import missing_tokenizer, read_tokenizer
from rollweave.schema.errors import ConfigError, EngineError


class Decoding(Protocol):
    """The part of a tokenizer that this module needs."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the checkpoint's tokenizer.

    Raises EngineError if it has none that can be used: stop strings cannot be served
    without it.
    """
    try:
        read = read_tokenizer(directory)
    except ConfigError as error:
        raise EngineError(f"sampling.stop needs a tokenizer: {error}") from error
    if read is None:
        raise EngineError(f"sampling.stop needs a tokenizer: {missing_tokenizer(directory)}")
    return read.tokenizer


class StopStrings:
    """Scans the output of one request for stop strings. `feed` takes its tokens one by
    one.
    """

    def __init__(self, tokenizer: Decoding, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._longest = max((len(text) for text in self._stop), default=0)
        self._tokens: list[int] = []
        self._from = 0
        self._read = 0
        self._tail = ""

    def feed(self, token: int) -> bool:
        """Return whether `token` completes a stop string in the text."""
        self._tokens.append(token)
        before = self._tokenizer.decode(
            self._tokens[self._from : self._read], skip_special_tokens=False
        )
        after = self._tokenizer.decode(self._tokens[self._from :], skip_special_tokens=False)
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return False
        text = self._tail + after[len(before) :]
        self._from, self._read = self._read, len(self._tokens)
        self._tail = text[max(0, len(text) - self._longest + 1) :] if self._longest > 1 else ""
        return any(stop in text for stop in self._stop)
