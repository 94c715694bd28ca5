"""`rollweave bench`: a table for people, and with `--json` one line for programs at the end."""

import sys
from collections.abc import Callable
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from rollweave.bench.contract import Figure, Result, json_line
from rollweave.cli.console import FAILED, err, out
from rollweave.cli.machine import describe
from rollweave.schema.errors import ConfigError

SEEDED = ("demo", "fixed", "multitask", "longtail", "modes", "truth", "faults")
SEEDLESS = ("engine", "sim", "placement", "scheduling", "service", "dapo", "tools", "sandbox", "delta", "relay", "soak")
"""Benches in which nothing is learned, or once, so that seeds mean nothing to them."""

NAMES = (*SEEDED, *SEEDLESS)


def bench(
    name: str, *, as_json: bool, quick: bool, seeds: int | None, profile: Path | None = None, model: Path | None = None
) -> None:
    """Run bench `name`; with `profile`, measure an engine's step times into that file. Raises ConfigError for a wrong name."""
    if name not in NAMES:
        raise ConfigError(f"NAME must be one of {', '.join(NAMES)}, got {name!r}")
    if name in SEEDLESS and seeds is not None:
        raise ConfigError(f"--seeds must be left out for bench {name}, which has no use for seeds, got {seeds}")
    if name != "engine" and profile is not None:
        raise ConfigError(f"--profile must be left out for bench {name}: only engine measures step times, got {profile}")
    if profile is None and model is not None:
        raise ConfigError(f"--model must be left out where --profile is not given, got {model}")
    result = _profile(profile, model, quick=quick) if profile is not None else _run(name, quick=quick, seeds=seeds)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", overflow="fold")
    for figure, value in result.figures.items():
        table.add_row(escape(figure), shown(value))
    out.print(table)
    for what, why in result.conditions.items():
        if isinstance(why, str):
            out.print(f"[dim]{escape(what)}: {escape(why)}[/]", soft_wrap=True)
    if as_json:
        sys.stdout.write(json_line(result, describe()) + "\n")
    if result.broken:
        raise typer.Exit(FAILED)


def _profile(path: Path, model: Path | None, *, quick: bool) -> Result:
    from rollweave.bench.profile import bench_profile

    return bench_profile(path, model, quick=quick)


def _run(name: str, *, quick: bool, seeds: int | None) -> Result:
    say: Callable[[str], None] = lambda text: err.print(text, markup=False, soft_wrap=True)  # noqa: E731
    if name == "engine":
        from rollweave.bench.engine import bench_engine

        return bench_engine(quick=quick)
    if name == "sim":
        from rollweave.bench.sim import bench_sim

        return bench_sim(quick=quick)
    if name == "placement":
        from rollweave.bench.placement import bench_placement

        return bench_placement(quick=quick)
    if name == "scheduling":
        from rollweave.bench.scheduling import bench_scheduling

        return bench_scheduling(quick=quick, say=say)
    if name == "service":
        from rollweave.bench.service import bench_service

        return bench_service(quick=quick, say=say)
    if name == "dapo":
        from rollweave.bench.dapo import bench_dapo

        return bench_dapo(quick=quick, say=say)
    if name == "tools":
        from rollweave.bench.tools import bench_tools

        return bench_tools(quick=quick)
    if name == "sandbox":
        from rollweave.bench.sandbox import bench_sandbox

        return bench_sandbox(quick=quick)
    if name == "delta":
        from rollweave.bench.delta import bench_delta

        return bench_delta(quick=quick, say=say)
    if name == "relay":
        from rollweave.bench.relay import bench_relay

        return bench_relay(quick=quick, say=say)
    if name == "soak":
        from rollweave.bench.soak import bench_soak

        return bench_soak(quick=quick, say=say)
    if name == "modes":
        from rollweave.bench.modes import bench_modes

        return bench_modes(seeds=seeds, quick=quick, say=say)
    if name == "truth":
        from rollweave.bench.truth import bench_truth

        return bench_truth(seeds=seeds, quick=quick, say=say)
    if name == "faults":
        from rollweave.bench.faults import bench_faults

        return bench_faults(seeds=seeds, quick=quick, say=say)
    from rollweave.bench.learning import bench_learning

    return bench_learning(name, seeds=seeds, quick=quick, say=say)


def shown(value: Figure) -> str:
    """A figure for people."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(shown(item) for item in value) or "-"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"
