"""`rollweave simulate --faults`: what each seed came to, a line a seed, and the one
command that shows a failure again.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.markup import escape

from rollweave.cli.console import FAILED, out
from rollweave.schema.config.loading import load
from rollweave.schema.errors import ConfigError
from rollweave.sim.faults import Report, search


def work(path: Path | None, overrides: Sequence[str], named: Sequence[str]) -> None:
    """Search these seeds: their own scenarios, or the configuration at `path` under
    their faults. Raises ConfigError.
    """
    seeds = [seed for text in named for seed in parsed(text)]
    if path is None and overrides:
        raise ConfigError(
            "--set must go with CONFIG, since a seed of --faults has its own "
            f"scenario, got {overrides[0]!r}"
        )
    config = load(path, overrides) if path is not None else None
    failed = False
    for seed in seeds:
        report = search(seed, config)
        out.print(line(report), soft_wrap=True)
        if report.violation:
            failed = True
            out.print(f"  replay with: {escape(command(seed, path, overrides))}", soft_wrap=True)
    if failed:
        raise typer.Exit(FAILED)


def parsed(text: str) -> range:
    """The seeds that `7` or `0-49` stands for. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", text, re.ASCII)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
    if first > last:
        raise ConfigError(f"--faults must be a seed or a range of seeds such as 0-49, got {text!r}")
    return range(first, last + 1)


def line(report: Report) -> str:
    """The outcome of a seed, as markup."""
    total = sum(report.faults.values())
    faults = ", ".join(f"{kind} {count}" for kind, count in report.faults.items())
    if report.violation:
        verdict = f"[red]violated:[/] {escape(report.violation)}"
    else:
        verdict = "all held" + (
            f"; the run ended with: {escape(report.error)}" if report.error else ""
        )
    story = (
        f"{report.mode}, {report.events:,} events, {total:,} "
        f"faults{f' ({faults})' if faults else ''}"
    )
    return f"seed {report.seed}: {story}: {verdict}"


def command(seed: int, path: Path | None = None, overrides: Sequence[str] = ()) -> str:
    """What to type to see this seed again."""
    words = ["rollweave", "simulate", *([str(path)] if path is not None else [])]
    for override in overrides:
        words += ["--set", override]
    return shlex.join([*words, "--faults", str(seed)])
