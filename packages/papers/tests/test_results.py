"""Rows and their tables: the ratio to a number or a range, missing rows kept, one form
for readers and one for programs.
"""

import json

import msgspec
import pytest

from rollweave_papers.results import (
    Experiment,
    Published,
    Row,
    as_json,
    as_text,
    page,
    section,
    sections_of,
    shown,
)


def row(
    published: Published = 2.0, ours: float | None = 3.0, *, note: str = "", own: bool = False
) -> Row:
    return Row(
        experiment="paper-fig1", row="a over b", published=published, ours=ours, note=note, own=own
    )


EXPERIMENT = Experiment(
    name="paper-fig1", title="A figure", source="Paper Fig. 1", run=lambda quick: []
)


@pytest.mark.parametrize(
    ("published", "ours", "ratio"),
    [
        (2.0, 3.0, 1.5),
        ((1.0, 2.0), 0.5, 0.5),
        ((1.0, 2.0), 1.5, 1.0),
        ((1.0, 2.0), 3.0, 1.5),
        (None, 3.0, None),
        (2.0, None, None),
        (0.0, 3.0, None),
    ],
)
def test_ratio_uses_the_nearer_end_of_a_range(
    published: Published, ours: float | None, ratio: float | None
) -> None:
    assert row(published, ours).ratio == ratio


def test_text_shows_every_row_with_its_note() -> None:
    lines = as_text(
        EXPERIMENT,
        [
            row((1.0, 2.0)),
            row(None),
            row(ours=None, note="to be built: a thing"),
            row(None, own=True),
        ],
    )
    texts = [line.split() for line in lines.splitlines()]
    assert texts[0][:2] == ["paper-fig1:", "A"]
    assert texts[2] == ["a", "over", "b", "1.00-2.00×", "3.00×", "1.50"]
    assert texts[3] == ["a", "over", "b", "not", "in", "text", "3.00×"]
    assert texts[4] == ["a", "over", "b", "2.00×", "missing"]
    assert texts[5] == ["to", "be", "built:", "a", "thing"]
    assert texts[6] == ["a", "over", "b", "(ours", "alone)", "3.00×"]


def test_markdown_counts_missing_rows_and_keeps_its_columns() -> None:
    rows = [row(note="this | that"), row(ours=None), row(None, own=True)]
    text = page([section(EXPERIMENT, rows)], quick=True)
    assert "`rollweave reproduce --quick`: 3 rows, 1 of them missing" in text
    assert "| a over b | 2.00× | 3.00× | 1.50 | this \\| that |" in text
    assert "| a over b | 2.00× | missing |  |  |" in text
    assert "| *a over b* |  | 3.00× |  |  |" in text


def test_sections_are_read_as_they_were_written() -> None:
    other = msgspec.structs.replace(EXPERIMENT, name="paper-fig2", title="Two")
    sections = [section(EXPERIMENT, [row()]), section(other, [row(ours=None), row()])]
    text = page(sections, quick=False)
    assert sections_of(text, quick=False) == {
        EXPERIMENT.name: sections[0],
        "paper-fig2": sections[1],
    }
    read = sections_of(text, quick=False)
    assert read is not None
    assert page(read.values(), quick=False) == text
    assert sections_of(text, quick=True) is None


def test_json_has_the_contract_s_fields() -> None:
    (entry,) = json.loads(json.dumps(as_json([(EXPERIMENT, [row((1.0, 2.0))])])))["rows"]
    assert entry == {
        "experiment": "paper-fig1",
        "row": "a over b",
        "published": [1.0, 2.0],
        "ours": 3.0,
        "ratio": 1.5,
        "unit": "×",
        "note": "",
        "own": False,
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234.4, "1,234"), (12.0, "12.00"), (0.0512, "0.0512"), (0.0, "0.00"), (None, "")],
)
def test_numbers_have_about_three_figures(value: float | None, text: str) -> None:
    assert shown(value) == text
