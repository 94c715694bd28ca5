"""`rollweave simulate`: runs a configuration on simulated GPUs, and shows how their
time is used.

"""

import json
import re
import shlex
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from rollweave.cli.console import FAILED, err, out, print_error
from rollweave.cli.progress import display
from rollweave.record.report.page import write_report
from rollweave.record.summary import (
    account_line,
    scheduling_line,
    weights_line,
    workers_line,
)
from rollweave.schema.config.loading import load, load_serving
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.text import human_seconds
from rollweave_sim.cost import capped_slots
from rollweave_sim.faults import Report, search
from rollweave_sim.fleet import kv_room
from rollweave_sim.hosts import NO_POOL
from rollweave_sim.lending import Latencies
from rollweave_sim.run import Outcome, directory_of, ignored
from rollweave_sim.run import simulate as run_simulation
from rollweave_sim.world import Costs, costs_of, workloads_of


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


CAUSES = {
    "busy": "working",
    "environment": "waiting for environments",
    "stragglers": "waiting for stragglers",
    "prompts": "prefill engines without prompts",
    "reward": "waiting for rewards",
    "window": "no work: enough rollouts are under way",
    "weights": "loading new weights",
    "training": "waiting for a step that is trained on their GPUs",
    "starting": "starting",
    "batch": "waiting for a batch",
    "measuring": "scoring the buffer",
    "publishing": "publishing weights",
    "saving": "saving a checkpoint",
    "evaluation": "evaluation and end",
}
"""Cause of idle time → its description."""


def simulate(
    path: Path | None,
    overrides: Sequence[str],
    *,
    serving: Path | None,
    faults: Sequence[str],
    as_json: bool,
) -> None:
    """Simulate the run that is configured in the file at `path`, with the serving
    engines that the file `serving` describes, and print its outcome; or search the
    seeds in `faults`.
    """
    if faults and as_json:
        raise ConfigError(
            "--json must be left out with --faults: `rollweave bench faults --json` "
            "prints the figures"
        )
    if faults:
        search_seeds(path, overrides, faults, serving)
        return
    if path is None:
        raise ConfigError("CONFIG must be given unless --faults is, got none")
    config = load(path, overrides)
    without_effect = show_ignored(config)
    lenders = load_serving(serving) if serving is not None else None
    costs, workloads = costs_of(config), workloads_of(config)  # before anything is written
    with directory_of(config) as run:
        with display(err, name=run.path.name, steps=config.run.steps) as progress:
            outcome = run_simulation(
                config,
                run=run,
                on_metrics=progress.line,
                costs=costs,
                work=workloads,
                serving=lenders,
            )
        page = write_report(run)
    show(outcome, kv=_kv_text(config, costs))
    out.print(f"report {escape(str(page))}, timeline {escape(str(run.trace))}", soft_wrap=True)
    if as_json:
        sys.stdout.write(json.dumps({**figures(outcome), "without_effect": without_effect}) + "\n")
    if outcome.summary.error:
        print_error(outcome.summary.error)
        raise typer.Exit(FAILED)


def _kv_text(config: RunConfig, costs: Costs) -> str:
    """Describe the size of an engine's KV cache, and the setting that limits it. For
    engines of several kinds, describe the smallest and the largest cache.
    """
    kinds = [
        (costs[0][(group.pool or NO_POOL) if config.pools else NO_POOL, degree], group)
        for group in config.engines
        for degree in (config.degrees or (group.degree,))
    ]
    capacities = {(kv_room(cost, group), cost.kv_tokens) for cost, group in kinds}
    limited_by = (
        "engines.kv_tokens"
        if all(size < gpu for size, gpu in capacities)
        else f"limited by {'the GPUs of the pools' if config.pools else 'sim.gpu'}"
    )
    slots = [
        capped_slots(cost, context=config.profiled_context, room=kv_room(cost, group))
        for cost, group in kinds
        if group.max_slots == "profiled"
    ]
    capped = f"; {_range(slots)} sequences at once, from the profile" if slots else ""
    return f"{_range(size for size, _ in capacities)} tokens in each engine ({limited_by}){capped}"


def _range(values: Iterable[int]) -> str:
    """Return the least and the greatest value as text, or the only value."""
    ordered = sorted(set(values))
    return " to ".join(f"{value:,}" for value in dict.fromkeys((ordered[0], ordered[-1])))


def figures(outcome: Outcome) -> dict[str, Any]:
    """Return the figures of the table as numbers. Seconds are simulated seconds."""
    return {
        "wall_s": outcome.summary.wall_s,
        "steps": outcome.summary.steps,
        "step_s": outcome.step_s,
        "tokens_per_s": outcome.tokens_per_s,
        "trained_tokens_per_s": outcome.trained_tokens_per_s,
        "engines": outcome.idle("engines"),
        "trainer": outcome.idle("trainer"),
        "pools": outcome.pools_busy,
        "weights": outcome.summary.weights,
        "serving": None if outcome.serving is None else msgspec.to_builtins(outcome.serving),
        "workers": outcome.summary.workers,
        "staleness": staleness(outcome),
        "gpus": outcome.gpus,
        "gpu_hours": outcome.gpu_hours,
        "events": outcome.events,
    }


def staleness(outcome: Outcome) -> dict[int, int]:
    """Count trained trajectories by the number of steps between launch and training."""
    counts: dict[int, int] = {}
    for line in outcome.steps:
        for age, count in line["staleness"].items():
            counts[int(age)] = counts.get(int(age), 0) + count
    return dict(sorted(counts.items()))


def serving_lines(serving: Latencies) -> list[tuple[str, str]]:
    """Describe the latencies of the serving engines' users, and the lent time."""
    (_, _, first), (_, _, further) = serving.ttft_s, serving.tpot_s
    return [
        (
            "serving",
            f"{serving.requests:,} requests: P99 {1e3 * first:,.0f} ms to the first token, "
            f"{1e3 * further:,.1f} ms for each further one; late {serving.late_first:.2%} and "
            f"{serving.late_tokens:.2%}",
        ),
        (
            "serving engines",
            f"served {serving.serving_share:.1%} of the time, computed rollouts "
            f"{serving.lent_share:.1%}; {serving.returned} turns given back, {serving.cuts} cuts "
            f"of memory, {serving.stalls} stalls",
        ),
    ]


def show(outcome: Outcome, *, kv: str) -> None:
    """Print the outcome as a table. `kv` describes the size of an engine's KV cache."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    seconds, summary = outcome.step_s, outcome.summary
    table.add_row(
        "steps",
        f"{summary.steps} in {human_seconds(summary.wall_s)} of simulated time, {outcome.events:,} "
        "events",
    )
    if seconds:
        spread = (
            f", {human_seconds(min(seconds))} to {human_seconds(max(seconds))}"
            if len(seconds) > 1
            else ""
        )
        table.add_row(
            "step time", f"[bold]{human_seconds(statistics.median(seconds))}[/] (median{spread})"
        )
    table.add_row(
        "tokens",
        f"{outcome.tokens_per_s:,.0f} sampled/s, {outcome.trained_tokens_per_s:,.0f} trained/s",
    )
    for part, label in (
        ("engines", f"engines ({outcome.engine_gpus} GPUs)"),
        ("trainer", "trainer"),
    ):
        shares = sorted(outcome.idle(part).items(), key=lambda item: (item[0] != "busy", -item[1]))
        table.add_row(
            label,
            ", ".join(
                f"{CAUSES.get(cause, cause)} {share:.1%}"
                for cause, share in shares
                if share >= 0.0005
            ),
        )
    if outcome.pools_busy:
        table.add_row(
            "pools",
            ", ".join(f"{pool} working {share:.1%}" for pool, share in outcome.pools_busy.items()),
        )
    table.add_row("KV cache", kv)
    used = [line["kv_used"] for line in outcome.steps]
    if used:
        table.add_row(
            "KV in use", f"{statistics.mean(used):.1%} by running turns at the start of a step"
        )
    ages, total = staleness(outcome), sum(staleness(outcome).values())
    if total:
        table.add_row(
            "staleness", ", ".join(f"{age}: {count / total:.1%}" for age, count in ages.items())
        )
    if scheduling := scheduling_line(summary.scheduling):
        table.add_row("scheduling", scheduling)
    if workers := workers_line(summary.workers, summary.wall_s):
        table.add_row("workers", workers)
    if weights := weights_line(summary.weights):
        table.add_row("weights", weights)
    if outcome.serving is not None:
        for label, text in serving_lines(outcome.serving):
            table.add_row(label, text)
    table.add_row("trajectories", account_line(summary.account))
    table.add_row("cost", f"{outcome.gpu_hours:,.1f} GPU-hours on {outcome.gpus} GPUs")
    out.print(table)
