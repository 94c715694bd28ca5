"""A user's documents, and a BM25 index of their passages (package bm25s, which requires
only numpy).

Invariant: equal queries on equal documents return the same passages, in the same order.
"""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bm25s
import numpy as np

from rollweave.envs.jsonl import must_have_field
from rollweave.io.json_lines import json_lines, utf8_text
from rollweave.schema.base import Struct
from rollweave.schema.errors import ConfigError

PASSAGE_WORDS = 160
"""Maximum words of a passage: about 220 tokens, so five of them are about a thousand.
"""

MOST_BYTES = 256 * 2**20
"""Maximum bytes of a corpus: its index is kept in memory."""


class Document(Struct, frozen=True, kw_only=True):
    """A title and a text; a search returns passages of it."""

    title: str
    text: str


class Bm25:
    """An index over passages in memory."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._passages = [part for document in documents for part in passages(document)]
        # Titles are indexed too: a passage in the middle of an article need not repeat
        # its subject.
        words = _words([f"{passage.title} {passage.text}" for passage in self._passages])
        self._index = bm25s.BM25(backend="numpy")
        self._known = {word for text in words for word in text}
        if self._known:
            self._index.index(words, show_progress=False)

    async def find(self, query: str, count: int) -> Sequence[Document]:
        terms = [word for word in _words([query])[0] if word in self._known]
        if not terms:
            return ()
        scores = self._index.get_scores(terms)
        best = np.argsort(-scores, kind="stable")[:count]
        return [self._passages[place] for place in best if scores[place] > 0]


def passages(document: Document) -> list[Document]:
    """Split the document into passages of at most `PASSAGE_WORDS` words, between
    paragraphs if possible.
    """
    pieces: list[str] = []
    size = PASSAGE_WORDS
    for paragraph in re.split(r"\n\s*\n", document.text):
        words = paragraph.split()
        for start in range(0, len(words), PASSAGE_WORDS):
            part = words[start : start + PASSAGE_WORDS]
            if size + len(part) <= PASSAGE_WORDS:
                pieces[-1] += "\n" + " ".join(part)
                size += len(part)
            else:
                pieces.append(" ".join(part))
                size = len(part)
    return [Document(title=document.title, text=piece) for piece in pieces]


@functools.lru_cache(4)
def documents(path: str) -> tuple[Document, ...]:
    """Return the documents of a folder (its .txt and .md files), or of a JSONL file of
    {"title", "text"}. Raises ConfigError.
    """
    place = Path(path)
    folder = place.is_dir()
    files = (
        sorted(
            file for file in place.rglob("*") if file.suffix in (".txt", ".md") and file.is_file()
        )
        if folder
        else [place]
    )
    try:
        size = sum(file.stat().st_size for file in files)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"options.corpus must be a folder of UTF-8 texts or a JSONL file, got {path!r}: {error}"
        ) from error
    if size > MOST_BYTES:
        raise ConfigError(
            f"options.corpus must have at most {MOST_BYTES} bytes, {path!r} has {size}"
        )
    if folder:
        collected = [
            Document(
                title=str(file.relative_to(place)), text=utf8_text(str(file), "options.corpus")
            )
            for file in files
        ]
    else:
        collected = [
            _document(f"{path}:{number}", number, record)
            for number, record in json_lines(path, "options.corpus", form=" with 'text'")
        ]
    if not any(document.text.strip() for document in collected):
        raise ConfigError(
            f"options.corpus must have documents (.txt, .md, or lines of JSON), {path!r} has none"
        )
    return tuple(collected)


def _document(place: str, number: int, record: dict[str, Any]) -> Document:
    must_have_field(record, "text", place)
    if not isinstance(text := record["text"], str):
        raise ConfigError(f"{place}: text must be a string, got {type(text).__name__}")
    return Document(title=str(record.get("title", f"line {number}")), text=text)


def _words(texts: list[str]) -> list[list[str]]:
    words: list[list[str]] = bm25s.tokenize(texts, return_ids=False, show_progress=False)
    return words
