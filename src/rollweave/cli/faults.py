"""`rollweave simulate --faults`: prints the outcome of each seed on one line, and for a
failure the command that reproduces it.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.markup import escape

from rollweave.cli.console import FAILED, err, out
from rollweave.schema.config.loading import load, load_serving
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave.sim.faults import Report, search
from rollweave.sim.ignored import ignored


def search_seeds(
    path: Path | None, overrides: Sequence[str], ranges: Sequence[str], serving: Path | None = None
) -> None:
    """Search the seeds in `ranges` for faults that break the core, in the configuration
    at `path` with the serving engines that the file `serving` describes. Without a
    configuration, each seed generates a scenario.

    Raises ConfigError.
    """
    seeds = [seed for text in ranges for seed in parse_seeds(text)]
    if path is None and overrides:
        raise ConfigError(
            "--set must be used with CONFIG, because a seed of --faults generates its "
            f"own scenario, got {overrides[0]!r}"
        )
    config = load(path, overrides) if path is not None else None
    if config is not None:
        show_ignored(config)
    lenders = load_serving(serving) if serving is not None else None
    failed = False
    for seed in seeds:
        report = search(seed, config, lenders)
        out.print(outcome_text(report), soft_wrap=True)
        if report.violation:
            failed = True
            out.print(
                f"  replay with: {escape(replay_command(seed, path, overrides, serving))}",
                soft_wrap=True,
            )
    if failed:
        raise typer.Exit(FAILED)


def show_ignored(config: RunConfig) -> list[str]:
    """Name the settings that a simulation of `config` ignores, and return them."""
    names = ignored(config)
    if names:
        err.print(
            f"[yellow]without effect in a simulation:[/] {escape(', '.join(names))}",
            soft_wrap=True,
        )
    return names


def parse_seeds(text: str) -> range:
    """Parse one seed or a range of seeds, such as `7` or `0-49`. Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", text, re.ASCII)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
    if first > last:
        raise ConfigError(f"--faults must be a seed or a range of seeds such as 0-49, got {text!r}")
    return range(first, last + 1)


def outcome_text(report: Report) -> str:
    """Return the outcome of a seed, as markup."""
    total = sum(report.faults.values())
    faults = ", ".join(f"{kind} {count}" for kind, count in report.faults.items())
    if report.violation:
        verdict = f"[red]violated:[/] {escape(report.violation)}"
    else:
        verdict = "all invariants held" + (
            f"; the run ended with: {escape(report.error)}" if report.error else ""
        )
    counts = (
        f"{report.mode}, {report.events:,} events, {total:,} "
        f"faults{f' ({faults})' if faults else ''}"
    )
    return f"seed {report.seed}: {counts}: {verdict}"


def replay_command(
    seed: int,
    path: Path | None = None,
    overrides: Sequence[str] = (),
    serving: Path | None = None,
) -> str:
    """Return the command line that runs this seed again."""
    words = ["rollweave", "simulate", *([str(path)] if path is not None else [])]
    for override in overrides:
        words += ["--set", override]
    words += ["--serving", str(serving)] if serving is not None else []
    return shlex.join([*words, "--faults", str(seed)])
