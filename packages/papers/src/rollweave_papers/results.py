"""The form of a result, one row of an experiment with the published value and ours; and
results as plain text and as Markdown: experiment, row, published, ours, ratio, note.

Invariants: `published` quotes the text of a paper (a number, or the two ends of a
range), as `published.toml` has it for the row; it is None where our copy does not state
it. Nothing in the simulator is fitted to these numbers; a miss stays in the table with
its reason in `note`, and so does a missing row.
"""

import re
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from rollweave.schema.base import Struct

Published = float | tuple[float, float] | None

PUBLISHED: dict[str, dict[str, Published]] = msgspec.convert(
    tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8")),
    dict[str, dict[str, Published]],
)
"""The published values by experiment and row."""


class Row(Struct, frozen=True, kw_only=True):
    """One row. `ours` is None where the row is missing: `note` then names the missing
    feature. `own` marks our own variants. An `Experiment` adds its name, and what was
    published.
    """

    row: str
    ours: float | None
    experiment: str = ""
    published: Published = None
    unit: str = "×"
    note: str = ""
    own: bool = False

    @property
    def ratio(self) -> float | None:
        """Return ours over the published number; over the nearer end of a range, 1
        inside it.
        """
        if self.ours is None or self.published is None:
            return None
        if isinstance(self.published, tuple):
            low, high = self.published
            nearest = min(max(self.ours, low), high)
            return self.ours / nearest if nearest else None
        return self.ours / self.published if self.published else None


class Experiment(Struct, frozen=True):
    """`run(quick)` returns what was simulated; quick rows are smaller or fewer, as
    their notes state.
    """

    name: str
    title: str
    source: str
    run: Callable[[bool], list[Row]]

    def rows(self, quick: bool) -> list[Row]:
        """Return the rows of the experiment, beside what was published."""
        known = PUBLISHED.get(self.name, {})
        return [
            replace(row, experiment=self.name, published=known.get(row.row))
            for row in self.run(quick)
        ]


NOT_IN_TEXT, MISSING = "not in text", "missing"

ROW_WIDTH = 58
"""Columns for a row's name before its figures; longer names push them to the right."""


TEXT_WIDTH = 120
"""Columns of a table as text."""

PAGE_WIDTH = 88
"""Maximum columns of prose in a page."""

SECTION_NAME = re.compile(r"^`([^`]+)`, ", re.MULTILINE)
"""The name of a section's experiment."""


def heading(experiment: Experiment) -> str:
    return f"{experiment.name}: {experiment.title} ({experiment.source})"


def as_text(experiment: Experiment, rows: Sequence[Row]) -> str:
    """Return one experiment as text: a line per row, its note beneath."""
    lines = [heading(experiment)]
    lines.append(f"  {'':{ROW_WIDTH}} {'published':>14} {'ours':>12} {'ratio':>7}")
    for row in rows:
        name = f"{row.row} (ours alone)" if row.own else row.row
        lines.append(
            f"  {name:{ROW_WIDTH}} {_published(row):>14} {_ours(row):>12} {_ratio(row):>7}".rstrip()
        )
        lines += [f"      {part}" for part in textwrap.wrap(row.note, TEXT_WIDTH - 6)]
    return "\n".join(lines)


def section(experiment: Experiment, rows: Sequence[Row]) -> str:
    """Return the heading and the table of one experiment in Markdown."""
    lines = [f"### {experiment.title}", "", f"`{experiment.name}`, {experiment.source}", ""]
    lines += ["| row | published | ours | ratio | note |", "|---|---:|---:|---:|---|"]
    for row in rows:
        name = f"*{_cell(row.row)}*" if row.own else _cell(row.row)
        lines.append(
            f"| {name} | {_published(row)} | {_ours(row)} | {_ratio(row)} | {_cell(row.note)} |"
        )
    return "\n".join(lines)


def page(sections: Iterable[str], *, quick: bool) -> str:
    """Return a page of such sections, below their counts of rows and missing rows."""
    sections = list(sections)
    rows = [line for text in sections for line in text.splitlines() if line.startswith("| ")]
    missing = sum(f" | {MISSING} | " in line for line in rows)
    intro = (
        f"Written by `{_command(quick)}`: {len(rows) - len(sections)} rows, {missing} of them "
        "missing. *Published* quotes the text of the paper; a range is matched as a range, and "
        f'*ratio* is then ours over its nearer end, 1 inside it. "{NOT_IN_TEXT}": our copy does '
        "not state the value. Rows in *italics* are our own variants. Nothing in the simulator is "
        "fitted to these numbers."
    )
    heading = "## The papers' results on the simulated world"
    return "\n\n".join([heading, textwrap.fill(intro, PAGE_WIDTH), *sections]) + "\n"


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
    """Return all rows as values. `ratio` is null without a published value or ours."""
    return {
        "rows": [
            {
                "experiment": row.experiment,
                "row": row.row,
                "published": row.published,
                "ours": row.ours,
                "ratio": row.ratio,
                "unit": row.unit,
                "note": row.note,
                "own": row.own,
            }
            for _, experiment_rows in results
            for row in experiment_rows
        ]
    }


def _published(row: Row) -> str:
    if row.published is None:
        return "" if row.own else NOT_IN_TEXT
    return f"{shown(row.published)}{_unit(row)}"


def _ours(row: Row) -> str:
    return MISSING if row.ours is None else f"{shown(row.ours)}{_unit(row)}"


def _ratio(row: Row) -> str:
    return "" if row.ratio is None else f"{row.ratio:.2f}"


def _unit(row: Row) -> str:
    return row.unit if row.unit in ("×", "%", "") else f" {row.unit}"


def shown(value: Published) -> str:
    """Return a number with three figures, or a range by its ends."""
    if isinstance(value, tuple):
        return f"{shown(value[0])}-{shown(value[1])}"
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) >= 1 or value == 0 else f"{value:.3g}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
