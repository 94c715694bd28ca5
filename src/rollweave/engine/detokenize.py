"""Finds stop strings in a growing sequence of tokens, decoding only its end.

A token may hold part of a character, and a tokenizer may render a token differently
after another one. So text is taken as the difference of two decodings that start at the
same token, and an unfinished character (U+FFFD at the end) is waited for.
"""

from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from rollweave.schema.errors import EngineError


class Decoding(Protocol):
    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...


def load_tokenizer(directory: Path) -> Tokenizer:
    """The checkpoint's tokenizer.

    Raises EngineError where there is none: without it stop strings cannot be served.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        raise EngineError(f"sampling.stop needs a tokenizer: {path} does not exist")
    return Tokenizer.from_file(str(path))


class StopStrings:
    """Watches the output of one request. `feed` takes its tokens one by one."""

    def __init__(self, tokenizer: Decoding, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._longest = max((len(text) for text in self._stop), default=0)
        self._tokens: list[int] = []
        self._from = 0
        self._read = 0
        self._tail = ""

    def feed(self, token: int) -> bool:
        """True when the text now contains a stop string that was not complete before
        `token`.
        """
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
