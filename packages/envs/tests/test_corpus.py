"""Searchable documents: which are read, which are refused, and the order of the
passages.
"""

import itertools
import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.schema.errors import ConfigError
from rollweave_envs.corpus import PASSAGE_WORDS, Bm25, Document, documents, passages
from tests.support.properties import examples


def texts(*contents: str) -> list[Document]:
    return [Document(title="", text=text) for text in contents]


async def titles_found(index: Bm25, query: str, count: int = 9) -> list[str]:
    return [hit.text for hit in await index.find(query, count)]


async def test_search() -> None:
    index = Bm25(
        [
            *texts("The cat sat.", "A dog and a cat, dogged.", "Fish\n\nand ships"),
            Document(title="Whale", text="It sings."),
        ]
    )
    assert await titles_found(index, "CAT?") == ["The cat sat.", "A dog and a cat, dogged."]
    assert await titles_found(index, "cat", 1) == ["The cat sat."]
    assert await titles_found(index, "whale") == ["It sings."]
    for query in ("", "the", "zebra", "!?", "\0", "ca"):
        assert await titles_found(index, query) == []
    assert await titles_found(Bm25([]), "cat") == []
    assert await titles_found(Bm25(texts("the")), "the") == []


def reference(words: list[list[str]], query: list[str]) -> list[float]:
    """Return the score of each text by Lucene's BM25, literally, with k1 1.5 and b
    0.75.
    """
    mean = sum(map(len, words)) / len(words)
    scores = [0.0] * len(words)
    for word in query:
        holding = sum(word in text for text in words)
        rare = math.log(1 + (len(words) - holding + 0.5) / (holding + 0.5))
        for place, text in enumerate(words):
            often = text.count(word)
            scores[place] += rare * often / (often + 1.5 * (0.25 + 0.75 * len(text) / mean))
    return scores


@settings(max_examples=examples(60))
@given(st.integers(0, 2**32))
async def test_the_order_is_that_of_bm25s(seed: int) -> None:
    rng = random.Random(seed)
    drawn = {
        tuple(rng.choices(("red", "green", "blue", "black"), k=rng.randint(1, 12)))
        for _ in range(8)
    }
    words, query = (
        [list(text) for text in sorted(drawn)],
        rng.choices(("red", "green", "blue", "pink"), k=2),
    )
    hits = await Bm25(texts(*map(" ".join, words))).find(" ".join(query), 20)
    scores = dict(zip(map(" ".join, words), reference(words, query), strict=True))
    assert {hit.text for hit in hits} == {text for text, score in scores.items() if score > 0}
    in_order = [scores[hit.text] for hit in hits]
    # the index has float32
    assert all(one > other - 1e-5 for one, other in itertools.pairwise(in_order))


@given(
    st.lists(
        st.lists(st.sampled_from(["a", "bb", "\n", "\n\n", "\n \n"]), max_size=300), max_size=4
    )
)
def test_passages_hold_all_words_in_order(parts: list[list[str]]) -> None:
    document = Document(title="t", text=" ".join(word for part in parts for word in part))
    pieces = passages(document)
    assert [word for piece in pieces for word in piece.text.split()] == document.text.split()
    assert all(
        0 < len(piece.text.split()) <= PASSAGE_WORDS and piece.title == "t" for piece in pieces
    )
    pairs = itertools.pairwise(len(piece.text.split()) for piece in pieces)
    assert all(one + other > PASSAGE_WORDS for one, other in pairs)  # none could have been joined


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("second", encoding="utf-8-sig")
    (tmp_path / "one.txt").write_text("first")
    (tmp_path / "code.py").write_text("third")
    read = documents(str(tmp_path))
    assert [(document.title, document.text) for document in read] == [
        ("b/two.md", "second"),
        ("one.txt", "first"),
    ]


def test_lines_of_json(tmp_path: Path) -> None:
    lines = [{"title": "One", "text": "first"}, {"text": "second", "more": 3}]
    (tmp_path / "c.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    read = documents(str(tmp_path / "c.jsonl"))
    assert [(document.title, document.text) for document in read] == [
        ("One", "first"),
        ("line 3", "second"),
    ]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", r"c\.jsonl:1: must be a JSON object with 'text': JSONDecodeError"),
        (
            '{"text": "a"}\n{"title": "b"}',
            r"c\.jsonl:2 has no field 'text' \(its fields: title\)$",
        ),
        ('{"text": 3}', r"c\.jsonl:1: .*text must be a string, got int"),
        ("[1]", r"c\.jsonl:1: .*"),
        ("", r"options\.corpus must have documents .*c\.jsonl' has none"),
        ('{"text": " "}', "must have documents"),
    ],
)
def test_refuses_invalid_lines(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=problem):
        documents(str(tmp_path / "c.jsonl"))


def test_refuses_an_unreadable_corpus(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"options\.corpus must be a folder of UTF-8 texts or a JSONL file, got "
        r"'.*/no'.*No such",
    ):
        documents(str(tmp_path / "no"))
    with pytest.raises(
        ConfigError,
        match=r"options\.corpus must have documents \(.txt, .md, or lines of JSON\), .* has none",
    ):
        documents(str(tmp_path))
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(
        ConfigError,
        match=r"bad\.txt:1: must be UTF-8: .*decode",
    ):
        documents(f"{tmp_path}/")
