"""Tables of rows: missing rows kept, one form for readers and one for programs, and a
summary that is the same from rows and from their tables.
"""

import json
import math

import msgspec
import pytest

from rollweave_papers.reasons import CauseShown, NotKnown, NotStated, Reason
from rollweave_papers.results import Experiment, Published, Row
from rollweave_papers.tables import (
    as_json,
    as_text,
    page,
    section,
    sections_of,
    shown,
    summary_in,
    summary_of,
)

SHOWN = CauseShown(cause="the spread", shown_by="paper-fig1: half of it")


def row(
    published: Published = 2.0,
    ours: float | None = 3.0,
    *,
    note: str = "",
    own: bool = False,
    reason: Reason | None = None,
    seeds: tuple[float, float] | None = None,
) -> Row:
    return Row(
        experiment="paper-fig1",
        row="a over b",
        published=published,
        ours=ours,
        note=note,
        own=own,
        reason=reason,
        seeds=seeds,
    )


EXPERIMENT = Experiment(
    name="paper-fig1", title="A figure", source="Paper Fig. 1", run=lambda quick: []
)

ROWS = [
    row((1.0, 2.0), note="this | that"),
    row(2.0, 0.5, reason=SHOWN),
    row(2.0, 2.4, reason=NotKnown()),
    row((1.0, math.inf), 0.9, reason=NotStated(missing="the | batch")),
    row(2.0, 2.1),
    row(ours=None, note="to be built: a thing"),
    row(None),
    row(None, own=True, seeds=(2.5, 3.25)),
]


def test_text_shows_every_row_with_its_note_and_reason() -> None:
    texts = [line.split() for line in as_text(EXPERIMENT, ROWS).splitlines()]
    assert texts[0][:2] == ["paper-fig1:", "A"]
    assert texts[2:4] == [
        ["a", "over", "b", "1.00-2.00×", "3.00×", "1.50", "agrees"],
        ["this", "|", "that"],
    ]
    assert texts[4] == ["a", "over", "b", "2.00×", "0.5×", "0.25", "differs"]
    assert " ".join(texts[5]) == "cause shown: the spread (paper-fig1: half of it)"
    assert " ".join(texts[7]) == "not known"
    assert texts[8] == ["a", "over", "b", ">1.00×", "0.9×", "differs"]
    assert texts[11] == ["a", "over", "b", "2.00×", "missing"]
    assert " ".join(texts[12]) == "to be built: a thing"
    assert texts[13] == ["a", "over", "b", "not", "in", "text", "3.00×"]
    assert texts[14] == ["a", "over", "b", "(ours", "alone)", "3.00×", "(2.50-3.25)"]


def test_markdown_has_the_summary_and_keeps_its_columns() -> None:
    text = page([section(EXPERIMENT, ROWS)], quick=True)
    words = " ".join(text.split())
    assert "`rollweave reproduce --quick`: 8 rows, 1 of them missing. 4 rows are" in words
    assert "1 are within 10 %, 2 within 25 %. The sign agrees in 3 of 5 rows" in words
    assert "1 cause shown, 1 not stated in the paper, 1 not known." in words
    assert "| a over b | 1.00-2.00× | 3.00× | 1.50 | agrees | this \\| that |  |" in text
    assert (
        "| a over b | >1.00× | 0.9× |  | differs |  | not stated in the paper: the \\| batch |"
        in text
    )
    assert "| a over b | 2.00× | missing |  |  | to be built: a thing |  |" in text
    assert "| *a over b* |  | 3.00× (2.50-3.25) |  |  |  |  |" in text


def test_the_summary_of_tables_is_that_of_their_rows() -> None:
    assert summary_in(section(EXPERIMENT, ROWS)) == summary_of(ROWS)


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
    rows = [row((1.0, 2.0), reason=SHOWN), row((1.0, math.inf), seeds=(1.0, 4.0))]
    values = json.loads(json.dumps(as_json([(EXPERIMENT, rows)]), allow_nan=False))
    assert values["rows"][0] == {
        "experiment": "paper-fig1",
        "row": "a over b",
        "published": [1.0, 2.0],
        "ours": 3.0,
        "seeds": None,
        "open_range": None,
        "ratio": 1.5,
        "sign": "agrees",
        "unit": "×",
        "note": "",
        "reason": {
            "kind": "cause shown",
            "text": "cause shown: the spread (paper-fig1: half of it)",
        },
        "own": False,
    }
    assert values["rows"][1]["published"] == [1.0, None]
    assert values["rows"][1]["seeds"] == [1.0, 4.0]
    assert values["rows"][1]["reason"] is None
    assert values["summary"] == {
        "rows": 2,
        "missing": 0,
        "comparable": 1,
        "within_10": 0,
        "within_25": 0,
        "signs": 2,
        "signs_agree": 2,
        "reasons": {"cause shown": 1, "not stated in the paper": 0, "not known": 0},
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234.4, "1,234"),
        (12.0, "12.00"),
        (0.0512, "0.0512"),
        (0.0, "0.00"),
        ((0.5, 1.5), "0.5-1.50"),
        ((1.0, math.inf), ">1.00"),
        (None, ""),
    ],
)
def test_numbers_have_about_three_figures(value: Published, text: str) -> None:
    assert shown(value) == text
