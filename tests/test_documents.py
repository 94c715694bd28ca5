"""What the documents refer to exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]


def test_papers_name_modules_that_exist() -> None:
    text = (ROOT / "docs/papers.md").read_text()
    modules = set(re.findall(r"`([\w/]+\.py)`", text))
    assert len(modules) > 40
    assert [name for name in sorted(modules) if not (ROOT / "src/rollweave" / name).exists()] == []


def test_every_cited_paper_is_listed() -> None:
    """A name that is followed by a section, figure, table or algorithm is a citation."""
    listed = (ROOT / "docs/papers.md").read_text()
    cited = set()
    for path in ROOT.glob("src/rollweave/**/*.py"):
        text = path.read_text()
        cited |= set(re.findall(r"\b([A-Z][A-Za-z]+)(?: Agent)?\s+(?:§|Alg\.|Fig\.|App\.)", text))
    assert cited >= {"RollArt", "Heddle", "Laminar", "ROSE"}
    assert [name for name in sorted(cited) if name not in listed] == []


def test_the_glossary_is_short_and_in_order() -> None:
    rows = re.findall(r"^\*\*(.+?)\*\*", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert 20 <= len(rows) <= 40
    assert rows == sorted(rows, key=str.lower)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_have_targets(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert [link for link in local if not (path.parent / link).exists()] == []
