"""`rollweave train`: checks the configuration, trains, and prints the result."""

import contextlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from rollweave.cli.console import FAILED, err, out, print_error
from rollweave.cli.layout import show_layout
from rollweave.cli.progress import display
from rollweave.cli.runs import RUNS, clear
from rollweave.io.boot import INTERRUPTED, import_from_working_directory
from rollweave.record.report.page import write_report
from rollweave.record.rundir import RunDir
from rollweave.record.summary import (
    Summary,
    account_line,
    cut_turns_line,
    headline_figures,
    scheduling_line,
    weights_line,
    workers_line,
)
from rollweave.runtime import launch
from rollweave.runtime.checkpoints import Checkpoints, with_former_commits, with_model
from rollweave.runtime.preflight import dryrun
from rollweave.runtime.preflight.checks import Status, forced, must_pass, show
from rollweave.runtime.preflight.environments import Declared
from rollweave.schema.config.loading import load, load_hosts
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.sections import SIMULATED_MODEL
from rollweave.schema.errors import ConfigError, RollweaveError
from rollweave.schema.text import human_seconds


def resolve(
    source: str | os.PathLike[str] | RunConfig,
    overrides: Sequence[str],
    *,
    resume: bool,
    fresh: bool,
) -> tuple[RunConfig, bool]:
    """Return the configuration that `source` refers to, and whether its run is resumed.

    A run directory, or its name under `runs/`, refers to the run's configuration, and
    the run is resumed unless `fresh`. Raises ConfigError.
    """
    if resume and fresh:
        raise ConfigError(
            "--resume and --fresh must not be given together: one continues a run, "
            "the other deletes it"
        )
    if isinstance(source, RunConfig):
        if overrides:
            raise ConfigError(
                f"overrides must be empty if a configuration is given, got {', '.join(overrides)}"
            )
        config, named = source, "CONFIG"
    else:
        path = _path_of(source)
        resume = resume or (path.is_dir() and not fresh)
        config = _of_run(path, overrides) if path.is_dir() else load(path, overrides)
        named = str(path)
    if config.model.path == SIMULATED_MODEL:
        raise ConfigError(
            "model must be given for training, got only [sim]; to simulate this file, use "
            f"`rollweave simulate {named}`"
        )
    return with_former_commits(config) if resume else config, resume


def train_quietly(
    source: str | os.PathLike[str] | RunConfig,
    overrides: Sequence[str],
    *,
    resume: bool,
    fresh: bool,
    inproc: bool,
) -> Summary:
    """Check the configuration, train, and write the report.

    `rollweave.train` documents the errors.
    """
    import_from_working_directory()
    config, resume = resolve(source, overrides, resume=resume, fresh=fresh)
    config = with_model(config)
    planned = dryrun.plan(config, resume=resume, fresh=fresh, deep=False)
    must_pass(planned.checks)
    config = planned.config
    for check in planned.checks:
        if check.name in dryrun.SHOWN and check.status is Status.WARN:
            warnings.warn(check.detail, stacklevel=3)
    if fresh:
        clear(config)
    summary = launch.train(config, resume=resume, inproc=inproc, declared=planned.declared)
    # a report that cannot be written must not fail the run
    with contextlib.suppress(OSError, RollweaveError):
        write_report(RunDir(Path(config.run.dir) / config.run.name))
    if summary.error:
        raise RollweaveError(summary.error)
    if summary.interrupted:
        raise KeyboardInterrupt
    return summary


def _path_of(source: str | os.PathLike[str]) -> Path:
    """Return the path that `source` names: `source` itself, or a run directory under
    `runs/`.
    """
    path = Path(source)
    named = RUNS / path
    return named if not os.path.exists(path) and RunDir(named).config.is_file() else path


def _of_run(path: Path, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of the run in directory `path`. The run's directory is
    `path` even if the configuration names another directory.
    """
    config = load(path / "config.toml", overrides)
    here = path.resolve()
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in ("run.name", "run.dir"):
            raise ConfigError(
                f"--set: {key} must be left out if a run directory is given, got "
                f"{override} for {here}"
            )
    return config.model_copy(
        update={"run": config.run.model_copy(update={"name": here.name, "dir": str(here.parent)})}
    )


def train(
    path: Path,
    overrides: Sequence[str],
    *,
    dry_run: bool,
    hosts: Path | None,
    resume: bool,
    fresh: bool,
    force: bool,
    inproc: bool,
) -> None:
    """Train as configured in the file or run directory at `path`, and print the result.

    A dry run only checks the configuration and prints the processes. `hosts` is a file
    that describes the hosts on which the processes would run. With `force`, checks that
    rest on an estimate only warn.
    """
    if hosts is not None and not dry_run:
        raise ConfigError(f"--hosts must be left out without --dry-run, got {hosts}")
    config, resume = resolve(path, overrides, resume=resume, fresh=fresh)
    dryrun.check_first(config, resume=resume, fresh=fresh)
    if inproc:
        launch.check_inproc(config)
    config = with_model(config, weights=not dry_run)
    planned = dryrun.plan(
        config,
        resume=resume,
        fresh=fresh,
        deep=dry_run,
        hosts=load_hosts(hosts) if hosts is not None else None,
    )
    checks = forced(planned.checks) if force else planned.checks
    if dry_run:
        show(checks, out)
        if planned.layout is not None:
            show_layout(planned.layout, out)
    must_pass(checks)
    if dry_run:
        out.print("[green]ready:[/] all checks passed")
        return
    config = planned.config
    for check in checks:
        if check.name in dryrun.SHOWN and check.status is Status.WARN:
            err.print(f"[yellow]warning:[/] {escape(check.detail)}", soft_wrap=True)
    if fresh:
        clear(config)
    run(config, resume=resume, force=force, inproc=inproc, declared=planned.declared)


def run(
    config: RunConfig,
    *,
    resume: bool,
    inproc: bool,
    force: bool = False,
    declared: Declared | None = None,
) -> Summary:
    """Run to the end and print the summary. `declared` is what the tasks declare, if
    known.

    Exits with 1 if the run failed, with 130 if the user ended it.
    """
    with display(err, name=config.run.name, steps=config.run.steps) as progress:
        summary = launch.train(
            config,
            resume=resume,
            force=force,
            inproc=inproc,
            progress=progress,
            declared=declared,
        )
    print_summary(summary, Path(config.run.dir) / config.run.name)
    return summary


def print_summary(summary: Summary, directory: Path) -> None:
    """Print the summary of a run, and exit if the run failed or was interrupted."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, (kind, value) in headline_figures(summary.success_rate, summary.mean_reward).items():
        measure = "success" if kind == "success" else "mean reward"
        table.add_row(
            name,
            f"{measure} [bold]{value:.3f}[/] over {summary.eval_episodes.get(name, 0)} held-out "
            "episodes",
        )
    rate_per_s = summary.tokens / summary.wall_s if summary.wall_s else 0.0
    table.add_row(
        "steps",
        f"{summary.steps} in {human_seconds(summary.wall_s)}, {rate_per_s:,.0f} sampled tokens/s",
    )
    if summary.ended_by:
        table.add_row("ended by", summary.ended_by)
    if summary.best_step is not None:
        table.add_row(
            "best", f"checkpoint of step {summary.best_step}: {escape(str(directory / 'best'))}"
        )
    if (model := Checkpoints(RunDir(directory).checkpoints).model()) is not None:
        table.add_row("model", escape(str(model)))
    table.add_row("trajectories", account_line(summary.account))
    if any(summary.engines.values()):
        table.add_row("engines", _counts(summary.engines))
    if scheduling := scheduling_line(summary.scheduling):
        table.add_row("scheduling", scheduling)
    if workers := workers_line(summary.workers, summary.wall_s):
        table.add_row("workers", workers)
    if weights := weights_line(summary.weights):
        table.add_row("weights", weights)
    table.add_row(
        "attempts", f"{_counts(summary.attempts)}; stopped: {_counts(summary.stop_reasons)}"
    )
    if cut := cut_turns_line(summary.cut_turns, summary.turns):
        table.add_row("cut", f"[yellow]{escape(cut)}[/]")
    table.add_row(
        "staleness", f"at most {summary.staleness_max} steps{_inherent(summary.inherent_staleness)}"
    )
    for label, counts in (("retried", summary.retried), ("watchdog", summary.watchdog)):
        if counts:
            table.add_row(label, _counts(counts))
    table.add_row("report", _report(directory))
    out.print(table)
    if summary.error:
        print_error(summary.error)
        raise typer.Exit(FAILED)
    if summary.interrupted:
        err.print(
            f"[yellow]stopped in order;[/] to continue: rollweave train {escape(str(directory))} "
            "--resume",
            soft_wrap=True,
        )
        raise typer.Exit(INTERRUPTED)


def _report(directory: Path) -> str:
    """Write the run's report and return its path. A report that cannot be written must
    not fail the run, so the reason is returned instead.
    """
    try:
        return escape(str(write_report(RunDir(directory))))
    except (OSError, RollweaveError) as error:
        return f"[yellow]not written:[/] {escape(str(error))}"


def _inherent(ages: dict[str, int]) -> str:
    """Describe the inherent staleness, which the duration of rollouts alone causes
    (Laminar §6).
    """
    total = sum(ages.values())
    mean = sum(int(age) * count for age, count in ages.items()) / total if total else 0.0
    return f"; {mean:.2f} versions published during a rollout, on average" if total else ""


def _counts(counts: dict[str, int]) -> str:
    return (
        ", ".join(
            f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1])
        )
        or "-"
    )
