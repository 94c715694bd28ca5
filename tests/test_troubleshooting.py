"""Every message that docs/TROUBLESHOOTING.md quotes is one that the source has."""

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

from tests.support.pages import table_rows

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/TROUBLESHOOTING.md").read_text()
QUOTED = [first.strip("`") for first, *_ in table_rows(PAGE)]


@functools.cache
def texts() -> tuple[str, ...]:
    """Return all texts of the source, with "…" for each value that is filled in, and
    the refusals of configurations.
    """
    refusals = tomllib.loads((ROOT / "tests/schema/config/refusals.toml").read_text())
    found = [str(row["error"]) for row in refusals["refusal"]]
    beside = ("packages/ray/src", "packages/sandbox/src", "packages/servers/src")
    folders = [ROOT / name for name in ("src/rollweave", *beside)]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        tree, inner = ast.parse(path.read_text()), set[int]()
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                inner |= {id(part) for part in node.values}
                found.append("".join(map(_text, node.values)))
        found += [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inner
        ]
    return tuple(found)


def _text(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "…"


def is_in_the_source(message: str) -> bool:
    """Return whether a text of the source has the message. What the message leaves out
    at its ends, or fills in as "…", may be anything there.
    """
    words = message.strip("… ").split("…")
    pattern = re.compile(".*?".join(map(re.escape, words)))
    return any(pattern.search(text) for text in texts() if all(word in text for word in words))


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_exists(message: str) -> None:
    assert is_in_the_source(message)


def test_a_message_that_nothing_says_is_noticed() -> None:
    assert len(QUOTED) > 50
    assert not is_in_the_source("run.name: … holds a run already, or not")
    assert not is_in_the_source("the trainer exploded … times; last: …")
