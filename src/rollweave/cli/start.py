"""The part of `rollweave train` that `rollweave.train` shares: resolves the
configuration, and trains without output.
"""

import contextlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from rollweave.cli.runs import RUNS, clear
from rollweave.io.boot import import_from_working_directory
from rollweave.record.report.page import write_report
from rollweave.record.rundir import RunDir
from rollweave.record.summary import Summary
from rollweave.runtime import launch
from rollweave.runtime.preflight import dryrun
from rollweave.runtime.preflight.checks import Status, must_pass
from rollweave.schema.config.loading import load
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.sections import SIMULATED_MODEL
from rollweave.schema.errors import ConfigError, RollweaveError


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
    return config, resume


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
