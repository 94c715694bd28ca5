"""Results as plain text and as Markdown: experiment, row, published, ours, ratio, note.
Missing rows stay in the table.
"""

import textwrap
from collections.abc import Sequence
from typing import Any

from rollweave.sim.papers.rows import Experiment, Published, Row

NOT_IN_TEXT, MISSING = "not in text", "missing"

ROW_WIDTH = 58
"""Columns for a row's name before its figures; longer names push them to the right."""


def heading(experiment: Experiment) -> str:
    return f"{experiment.name}: {experiment.title} ({experiment.source})"


def as_text(experiment: Experiment, rows: Sequence[Row], *, width: int = 120) -> str:
    """Return one experiment as text: a line per row, its note beneath."""
    lines = [heading(experiment)]
    lines.append(f"  {'':{ROW_WIDTH}} {'published':>14} {'ours':>12} {'ratio':>7}")
    for row in rows:
        name = f"{row.row} (ours alone)" if row.own else row.row
        lines.append(
            f"  {name:{ROW_WIDTH}} {_published(row):>14} {_ours(row):>12} {_ratio(row):>7}".rstrip()
        )
        lines += [f"      {part}" for part in textwrap.wrap(row.note, width - 6)]
    return "\n".join(lines)


def as_markdown(results: Sequence[tuple[Experiment, Sequence[Row]]], *, quick: bool) -> str:
    """Return a page with a table for each experiment, below counts of missing and
    distant rows.
    """
    rows = [row for _, experiment_rows in results for row in experiment_rows]
    missing = sum(row.ours is None for row in rows)
    command = "rollweave reproduce --quick" if quick else "rollweave reproduce"
    lines = [
        "## The papers' results on the simulated world",
        "",
        f"Written by `{command}`: {len(rows)} rows, {missing} of them missing. *Published* quotes "
        "the text of the paper; a range is matched as a range, and *ratio* is then ours over its "
        f'nearer end, 1 inside it. "{NOT_IN_TEXT}": our copy does not state the value. Rows in '
        "*italics* are our own variants. Nothing in the simulator is fitted to these numbers.",
    ]
    for experiment, experiment_rows in results:
        lines += [
            "",
            f"### {experiment.title}",
            "",
            f"`{experiment.name}`, {experiment.source}",
            "",
        ]
        lines += ["| row | published | ours | ratio | note |", "|---|---:|---:|---:|---|"]
        for row in experiment_rows:
            name = f"*{_cell(row.row)}*" if row.own else _cell(row.row)
            lines.append(
                f"| {name} | {_published(row)} | {_ours(row)} | {_ratio(row)} | {_cell(row.note)} |"
            )
    return "\n".join(lines) + "\n"


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
