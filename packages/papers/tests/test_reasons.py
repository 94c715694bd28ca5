"""Reasons of rows: three kinds and no other, each for rows that exist; and the tables
of docs/results/papers.md have the reasons, signs and published values of the code.
"""

import re
from pathlib import Path

import msgspec
import pytest

from rollweave_papers import reasons
from rollweave_papers.command import BEGIN, END
from rollweave_papers.reasons import (
    KINDS,
    REASONS,
    CauseShown,
    Entry,
    NotKnown,
    NotStated,
    Reason,
    kind_in,
    kind_of,
    reason_of,
    text_of,
)
from rollweave_papers.results import CLOSE, DIFFERS, PUBLISHED, Row, is_within
from rollweave_papers.running import EXPERIMENTS
from rollweave_papers.tables import NOT_IN_TEXT, cells_in, sections_of, shown, summary_in

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "results/papers.md").read_text()
TABLES = PAGE.partition(BEGIN)[2].partition(END)[0]
SECTIONS = sections_of(TABLES, quick=False) or {}

OF_CHANGES = ("laminar-fig14", "rose-fig9")
"""Experiments whose percentages are changes."""

UNITS = re.compile(r"([\d.,e-]+)(×|%| steps| s| ms| instances/s|)(?: \(.*\))?")


def documented() -> list[tuple[str, str, dict[str, str]]]:
    """Return the rows of the page: experiment, row, and cells."""
    return [
        (name, cells["row"].strip("*") if is_own(cells["row"]) else cells["row"], cells)
        for name, section in SECTIONS.items()
        for cells in cells_in(section)
    ]


def is_own(row: str) -> bool:
    return row.startswith("*") and row.endswith("*")


ROWS = documented()


def is_wrong(cells: dict[str, str]) -> bool:
    """Return whether the row deviates by more than a tenth, or in its sign."""
    far = bool(cells["ratio"]) and not is_within(float(cells["ratio"]), CLOSE)
    return far or cells["sign"] == DIFFERS


def test_the_page_has_every_experiment() -> None:
    assert list(SECTIONS) == list(EXPERIMENTS)


def test_a_row_of_the_page_has_the_reason_of_the_code_or_none() -> None:
    """None where it agrees in size and sign."""
    for experiment, row, cells in ROWS:
        reason = reason_of(experiment, row)
        agrees = bool(cells["ratio"] or cells["sign"]) and not is_wrong(cells)
        expected = "" if agrees or reason is None else text_of(reason)
        assert cells["reason"].replace("\\|", "|") == expected, (experiment, row)


def test_a_row_of_the_page_that_deviates_has_a_reason_of_a_kind() -> None:
    without = [
        (experiment, row)
        for experiment, row, cells in ROWS
        if is_wrong(cells) and kind_in(cells["reason"]) not in KINDS
    ]
    assert without == []


def test_every_reason_of_the_page_begins_with_a_kind() -> None:
    assert [cells for *_, cells in ROWS if cells["reason"] and not kind_in(cells["reason"])] == []


def test_signs_and_published_values_of_the_page_are_those_of_the_code() -> None:
    for experiment, row, cells in ROWS:
        published = PUBLISHED.get(experiment, {}).get(row)
        match = UNITS.fullmatch(cells["ours"])
        unit = match[2].strip() if match else ""
        quoted = cells["published"].removesuffix(f" {unit}").removesuffix(unit)
        if match:
            assert quoted == (shown(published) or ("" if is_own(cells["row"]) else NOT_IN_TEXT))
            again = Row(
                row=row,
                ours=float(match[1].replace(",", "")),
                published=published,
                unit=unit,
                is_change=unit == "%" and experiment in OF_CHANGES,
            )
            assert again.sign == cells["sign"], (experiment, row)
        else:
            assert (cells["ours"], cells["sign"]) == ("missing", "")


def test_the_summaries_of_the_pages_are_those_of_the_tables() -> None:
    summary = summary_in(TABLES)
    assert summary.sentence() in " ".join(TABLES.split())
    line = next(
        line
        for line in (DOCS / "RESULTS.md").read_text().splitlines()
        if line.startswith("| the papers' experiments |")
    )
    assert (
        f"{summary.rows} rows, {summary.missing} of them missing; of {summary.comparable} with a "
        f"published value, {summary.within_10} are within 10 % and {summary.within_25} within "
        f"25 %; the sign agrees in {summary.signs_agree} of {summary.signs}" in line
    )


def test_a_shown_cause_names_another_row_that_exists() -> None:
    names = {f"{experiment}: {row}" for experiment, row, _ in ROWS}
    for entry in REASONS:
        if isinstance(entry.reason, CauseShown):
            assert entry.reason.shown_by in names
            experiment, _, row = entry.reason.shown_by.partition(": ")
            assert not entry.fits(experiment, row)


@pytest.mark.parametrize("number", range(len(REASONS)))
def test_every_reason_is_for_a_row_that_is_no_other_reason_s(number: int) -> None:
    """Each pattern fits a row of the page for which no earlier entry is written."""
    entry = REASONS[number]
    for pattern in entry.rows:
        assert any(
            msgspec.structs.replace(entry, rows=(pattern,)).fits(experiment, row)
            and reason_of(experiment, row) is entry.reason
            for experiment, row, _ in ROWS
        ), pattern


def test_no_note_has_a_reason() -> None:
    """Words with which a note would give one."""
    words = ("because", "unexplained", "reason", "so that", "leaves little")
    found = [
        (row, cells["note"]) for _, row, cells in ROWS if any(w in cells["note"] for w in words)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("reason", "kind", "text"),
    [
        (CauseShown(cause="x", shown_by="a: b"), KINDS[0], "cause shown: x (a: b)"),
        (NotStated(missing="x"), KINDS[1], "not stated in the paper: x"),
        (NotKnown(), KINDS[2], "not known"),
        (NotKnown(not_varied="x"), KINDS[2], "not known; not varied: x"),
        (NotKnown(excluded="y", not_varied="x"), KINDS[2], "not known; excluded: y; not varied: x"),
    ],
)
def test_the_text_of_a_reason_begins_with_its_kind(reason: Reason, kind: str, text: str) -> None:
    assert text_of(reason) == text
    assert kind_of(reason) == kind_in(text) == kind


def test_free_text_is_no_reason() -> None:
    assert kind_in("our engines are slower") == ""
    assert kind_in("") == ""
    for kind in ("because", "unexplained"):
        with pytest.raises(msgspec.ValidationError, match="kind"):
            msgspec.convert({"kind": kind, "text": "x"}, Reason)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"kind": "cause shown", "cause": "x"}, Reason)


def test_the_first_entry_that_fits_is_the_row_s(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = NotKnown(not_varied="one"), NotStated(missing="other")
    entries = (
        Entry(experiment="paper-fig1", rows=("8B *", "all"), reason=one),
        Entry(experiment="paper-*", rows=("*",), reason=other),
    )
    monkeypatch.setattr(reasons, "REASONS", entries)
    assert reason_of("paper-fig1", "8B rollout") is one
    assert reason_of("paper-fig1", "32B rollout") is other
    assert reason_of("paper-fig2", "all") is other
    assert reason_of("another-fig1", "all") is None
