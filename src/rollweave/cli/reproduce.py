"""`rollweave reproduce`: the papers' experiments on the simulated world, a table of
each as it finishes.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.markup import escape

from rollweave.cli.console import FAILED, err, error_lines, out
from rollweave.io.disk import replace_file
from rollweave.schema.errors import ConfigError
from rollweave.sim.papers.registry import select
from rollweave.sim.papers.running import cores, run
from rollweave.sim.papers.table import as_json, as_markdown, as_text, heading

BEGIN, END = "<!-- reproduce -->\n", "<!-- /reproduce -->\n"
"""What stands between them in a page is generated."""


def work(names: Sequence[str], *, quick: bool, as_json_: bool, write: Path | None) -> None:
    """Run the experiments of `names`. Raises ConfigError."""
    experiments = select(names)
    if write is not None:
        _writable(write)
    found, failures = {}, []
    for finished in run(experiments, quick=quick, processes=cores()):
        name = finished.experiment.name
        if finished.error:
            failures.append(f"{name}: {finished.error}")
            error_lines(failures[-1])
            continue
        found[name] = finished.rows
        out.print(as_text(finished.experiment, finished.rows), markup=False, soft_wrap=True)
        done = len(found) + len(failures)
        said = (
            f"{done} of {len(experiments)}, {finished.seconds:.1f} s: "
            f"{heading(finished.experiment)}"
        )
        err.print(f"[dim]{escape(said)}[/]", soft_wrap=True)
    results = [
        (experiment, found[experiment.name])
        for experiment in experiments
        if experiment.name in found
    ]
    if write is not None and not failures:
        replace_file(write, placed(as_markdown(results, quick=quick), write).encode())
        out.print(f"written to {write}", markup=False, soft_wrap=True)
    if as_json_:
        sys.stdout.write(json.dumps(as_json(results)) + "\n")
    if failures:
        raise typer.Exit(FAILED)


def placed(tables: str, file: Path) -> str:
    """The text of `file` with `tables` between its two marks; `tables` alone where it
    has none.
    """
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{tables}{end}{after}" if end else tables


def _writable(path: Path) -> None:
    """Raises ConfigError now rather than after all the work."""
    if path.is_dir():
        raise ConfigError(f"--write must name a file, got the directory {path}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(
            f"--write must name a file in a directory that can be written to, got {path}"
        )
    try:
        placed("", path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--write must name a text file, or none yet, got {path}: {error}"
        ) from error
