"""`rollweave reproduce`: runs the papers' experiments in the simulated world, prints a
table for each as it finishes, and ends with a summary of their rows.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.markup import escape

from rollweave.cli.console import FAILED, check_writable, err, out, print_error
from rollweave.io.disk import replace_file
from rollweave.schema.errors import ConfigError
from rollweave_papers import constraint_tables
from rollweave_papers.running import ALL, EXPERIMENTS, cores, run, select
from rollweave_papers.tables import as_json as results_as_json
from rollweave_papers.tables import (
    as_text,
    between,
    heading,
    page,
    section,
    sections_of,
    summary_of,
)

BEGIN, END = "<!-- reproduce -->\n", "<!-- /reproduce -->\n"
"""Marks in a Markdown file between which the tables are generated."""


def reproduce(
    names: Sequence[str],
    *,
    quick: bool,
    as_json: bool,
    write: Path | None,
    constraints: bool = False,
) -> None:
    """Run the experiments of `names`, which are experiments or papers; all if there are
    none. Tables of other experiments in the file `write` stay there if names are given.
    With `constraints`, compare workloads with what papers state, or with a file of that
    name. Raises ConfigError.
    """
    if constraints:
        constraint_tables.constraints(names, quick=quick, as_json=as_json, write=write)
        return
    experiments = select(names)
    kept = _kept_tables(write, quick=quick, all_anew=not names) if write is not None else {}
    rows, failures = {}, []
    for finished in run(experiments, quick=quick, processes=cores()):
        name = finished.experiment.name
        if finished.error:
            failures.append(f"{name}: {finished.error}")
            print_error(failures[-1])
            continue
        rows[name] = finished.rows
        out.print(as_text(finished.experiment, finished.rows), markup=False, soft_wrap=True)
        done = len(rows) + len(failures)
        progress = (
            f"{done} of {len(experiments)}, {finished.seconds:.1f} s: "
            f"{heading(finished.experiment)}"
        )
        err.print(f"[dim]{escape(progress)}[/]", soft_wrap=True)
    results = [
        (experiment, rows[experiment.name]) for experiment in experiments if experiment.name in rows
    ]
    summary = summary_of(row for _, finished_rows in results for row in finished_rows)
    out.print(summary.sentence(), markup=False, soft_wrap=True)
    if write is not None and not failures:
        tables = kept | {one.name: section(one, rows) for one, rows in results}
        ordered = [tables[name] for name in ALL if name in tables]
        own = not EXPERIMENTS.keys() & tables.keys()
        text = page(ordered, quick=quick, own=own)
        replace_file(write, between(text, write, (BEGIN, END)).encode())
        out.print(f"written to {write}", markup=False, soft_wrap=True)
    if as_json:
        sys.stdout.write(json.dumps(results_as_json(results)) + "\n")
    if failures:
        raise typer.Exit(FAILED)


def _kept_tables(path: Path, *, quick: bool, all_anew: bool) -> dict[str, str]:
    """Return the tables in the file, by their experiments, which those of other ones
    are to join. Raises ConfigError if the file cannot be written, before the
    experiments run.
    """
    check_writable("--write", path)
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--write must name a text file, or a new file, got {path}: {error}"
        ) from error
    _, begin, tables = text.partition(BEGIN)
    tables, end, _ = tables.partition(END)
    if all_anew or not (begin and end and tables.strip()):
        return {}
    kept = sections_of(tables, quick=quick)
    if kept is None:
        form = "with" if quick else "without"
        raise ConfigError(
            f"--write must name a file whose tables were computed {form} --quick, got {path}"
        )
    return kept
