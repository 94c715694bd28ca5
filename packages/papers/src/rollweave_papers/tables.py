"""Results for readers and programs: a table of each experiment as plain text and as
Markdown, the page of all tables with its summary, and all rows as values.
"""

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rollweave.schema.base import Struct
from rollweave_papers.reasons import KINDS, kind_in, kind_of, text_of
from rollweave_papers.results import (
    AGREES,
    CLOSE,
    NEAR,
    Experiment,
    Published,
    Row,
    is_within,
)

NOT_IN_TEXT, MISSING = "not in text", "missing"

ROW_WIDTH = 58
"""Columns for a row's name before its figures; longer names push them to the right."""

TEXT_WIDTH = 120
"""Columns of a table as text."""

PAGE_WIDTH = 88
"""Maximum columns of prose in a page."""

SECTION_NAME = re.compile(r"^`([^`]+)`, ", re.MULTILINE)
"""The name of a section's experiment."""

COLUMNS = ("row", "published", "ours", "ratio", "sign", "note", "reason")
"""Columns of a table in Markdown."""


class Summary(Struct, frozen=True, kw_only=True):
    """Counts of rows: the missing ones; the comparable ones, with a published value and
    ours, and how many of them are within a tenth and a quarter of it; rows with a sign,
    and how many agree; and rows by the kind of their reason.
    """

    rows: int
    missing: int
    comparable: int
    within_10: int
    within_25: int
    signs: int
    signs_agree: int
    reasons: dict[str, int]

    def sentence(self) -> str:
        """Return the counts in words."""
        reasons = ", ".join(f"{count} {kind}" for kind, count in self.reasons.items())
        return (
            f"{self.rows} rows, {self.missing} of them missing. {self.comparable} rows are "
            f"comparable with a published value: {self.within_10} are within 10 %, "
            f"{self.within_25} within 25 %. The sign agrees in {self.signs_agree} of "
            f"{self.signs} rows that have one. Reasons: {reasons}."
        )


class _Counted(Struct, frozen=True, kw_only=True):
    """The part of a row that a summary counts."""

    missing: bool
    ratio: float | None
    sign: str
    kind: str


def summary_of(rows: Iterable[Row]) -> Summary:
    """Return the counts of rows."""
    return _summary(
        _Counted(
            missing=row.ours is None,
            ratio=row.ratio,
            sign=row.sign,
            kind=kind_of(row.reason) if row.reason is not None else "",
        )
        for row in rows
    )


def summary_in(text: str) -> Summary:
    """Return the counts of the rows of tables in Markdown."""
    return _summary(
        _Counted(
            missing=cells["ours"] == MISSING,
            ratio=float(cells["ratio"]) if cells["ratio"] else None,
            sign=cells["sign"],
            kind=kind_in(cells["reason"]),
        )
        for cells in cells_in(text)
    )


def cells_in(text: str) -> list[dict[str, str]]:
    """Return the rows of tables in Markdown, each by its columns."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))] for line in lines
    ]
    return [dict(zip(COLUMNS, row, strict=True)) for row in cells if tuple(row) != COLUMNS]


def _summary(rows: Iterable[_Counted]) -> Summary:
    rows = list(rows)
    ratios = [row.ratio for row in rows if row.ratio is not None]
    signs = [row.sign for row in rows if row.sign]
    return Summary(
        rows=len(rows),
        missing=sum(row.missing for row in rows),
        comparable=len(ratios),
        within_10=sum(is_within(ratio, CLOSE) for ratio in ratios),
        within_25=sum(is_within(ratio, NEAR) for ratio in ratios),
        signs=len(signs),
        signs_agree=signs.count(AGREES),
        reasons={kind: sum(row.kind == kind for row in rows) for kind in KINDS},
    )


def heading(experiment: Experiment) -> str:
    return f"{experiment.name}: {experiment.title} ({experiment.source})"


def as_text(experiment: Experiment, rows: Sequence[Row]) -> str:
    """Return one experiment as text: a line per row, its note and its reason
    beneath.
    """
    lines = [heading(experiment)]
    lines.append(f"  {'':{ROW_WIDTH}} {'published':>14} {'ours':>12} {'ratio':>7} {'sign':>7}")
    for row in rows:
        name = f"{row.row} (ours alone)" if row.own else row.row
        figures = f"{_published(row):>14} {_ours(row):>12} {_ratio(row):>7} {row.sign:>7}"
        lines.append(f"  {name:{ROW_WIDTH}} {figures}".rstrip())
        for text in (row.note, _reason(row)):
            lines += [f"      {part}" for part in textwrap.wrap(text, TEXT_WIDTH - 6)]
    return "\n".join(lines)


def section(experiment: Experiment, rows: Sequence[Row]) -> str:
    """Return the heading and the table of one experiment in Markdown."""
    lines = [f"### {experiment.title}", "", f"`{experiment.name}`, {experiment.source}", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---|---:|---:|---:|---|---|---|"]
    for row in rows:
        name = f"*{_cell(row.row)}*" if row.own else _cell(row.row)
        figures = f"{_published(row)} | {_ours(row)} | {_ratio(row)} | {row.sign}"
        lines.append(f"| {name} | {figures} | {_cell(row.note)} | {_cell(_reason(row))} |")
    return "\n".join(lines)


def page(sections: Iterable[str], *, quick: bool, own: bool = False) -> str:
    """Return a page of such sections, below their summary. `own` are those of our own
    experiments, in which nothing is summarized.
    """
    sections = list(sections)
    if own:
        intro = (
            f"Written by `{_command(quick)}`, which has the names of the tables as arguments. "
            "A range in parentheses is that over seeds; another one is that over what the "
            "papers leave open."
        )
        return "\n\n".join(["## Tables", textwrap.fill(intro, PAGE_WIDTH), *sections]) + "\n"
    summary = summary_in("\n".join(sections)).sentence()
    intro = (
        f"Written by `{_command(quick)}`: {summary} *Published* quotes the text of the paper; a "
        "range is matched as a range, and *ratio* is then ours over its nearer end, 1 inside it. "
        f'"{NOT_IN_TEXT}": our copy does not state the value. *Sign* says whether ours and the '
        "published value are on the same side of no difference, for ratios and changes. A range "
        "in parentheses is that of ours over its seeds. Rows in *italics* are our own variants. "
        "Nothing in the simulator is fitted to these numbers."
    )
    heading = "## The papers' results on the simulated world"
    return "\n\n".join([heading, textwrap.fill(intro, PAGE_WIDTH), *sections]) + "\n"


def between(tables: str, file: Path, marks: tuple[str, str]) -> str:
    """Return the text of `file` with `tables` between its two marks, or `tables` alone
    if it has none.
    """
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    return f"{before}{begin}\n{tables}{end}{after}" if end else tables


def sections_of(text: str, *, quick: bool) -> dict[str, str] | None:
    """Return the sections of a page by the names of their experiments; None if other
    forms of the experiments wrote it.
    """
    intro, *sections = f"{text.strip()}\n".split("\n### ")
    if f"`{_command(quick)}`" not in intro:
        return None
    named = ((SECTION_NAME.search(one), one) for one in sections)
    return {match[1]: f"### {one.strip()}" for match, one in named if match}


def _command(quick: bool) -> str:
    return "rollweave reproduce --quick" if quick else "rollweave reproduce"


def as_json(results: Sequence[tuple[Experiment, Sequence[Row]]]) -> dict[str, Any]:
    """Return all rows and their summary as values. `ratio` is null without a published
    value or ours, `reason` without a reason, and an open end of a range is null.
    """
    rows = [row for _, experiment_rows in results for row in experiment_rows]
    summary = summary_of(rows)
    return {
        "rows": [
            {
                "experiment": row.experiment,
                "row": row.row,
                "published": _finite(row.published),
                "ours": row.ours,
                "seeds": row.seeds,
                "open_range": row.open_range,
                "ratio": row.ratio,
                "sign": row.sign,
                "unit": row.unit,
                "note": row.note,
                "reason": None
                if row.reason is None
                else {"kind": kind_of(row.reason), "text": text_of(row.reason)},
                "own": row.own,
            }
            for row in rows
        ],
        "summary": {name: getattr(summary, name) for name in Summary.__struct_fields__},
    }


def _finite(published: Published) -> float | list[float | None] | None:
    if isinstance(published, tuple):
        return [end if math.isfinite(end) else None for end in published]
    return published


def _published(row: Row) -> str:
    if row.published is None:
        return "" if row.own else NOT_IN_TEXT
    return f"{shown(row.published)}{_unit(row)}"


def _ours(row: Row) -> str:
    if row.ours is None:
        return MISSING
    if row.open_range is not None:
        return f"{shown(row.open_range)}{_unit(row)}"
    seeds = f" ({shown(row.seeds)})" if row.seeds is not None else ""
    return f"{shown(row.ours)}{_unit(row)}{seeds}"


def _ratio(row: Row) -> str:
    return "" if row.ratio is None else f"{row.ratio:.2f}"


def _reason(row: Row) -> str:
    return "" if row.reason is None else text_of(row.reason)


def _unit(row: Row) -> str:
    return row.unit if row.unit in ("×", "%", "") else f" {row.unit}"


def shown(value: Published) -> str:
    """Return a number with three figures, or a range by its ends; of a range that is
    open above, its lower end.
    """
    if isinstance(value, tuple):
        low, high = value
        return f">{shown(low)}" if high == math.inf else f"{shown(low)}-{shown(high)}"
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
