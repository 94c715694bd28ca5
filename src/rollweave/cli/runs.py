"""Resolve the arguments RUN and CHECKPOINT of the commands."""

import difflib
import os
import shutil
from pathlib import Path

from rollweave.record.rundir import RunDir
from rollweave.runtime.checkpoints import Checkpoints
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.text import whole

RUNS = Path("runs")
"""Directory in which runs are looked up by name."""


def find_run(name: str) -> RunDir:
    """Return the run directory that `name` refers to: a path, or a name under `runs/`.

    Raises ConfigError, also from `must_fit`.
    """
    for path in (Path(name), RUNS / name):
        # unlike os.path.exists, Path.exists raises for invalid names
        if any(os.path.exists(path / file) for file in ("config.toml", "metrics.jsonl")):
            run = RunDir(path)
            run.must_fit()
            return run
    known = sorted(path.parent.name for path in RUNS.glob("*/config.toml"))
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"runs here: {', '.join(known[:8]) or 'none'}"
    raise ConfigError(f"RUN must be a run directory or a name in {RUNS}/, got {name!r} ({hint})")


def clear(config: RunConfig) -> None:
    """Delete the run directory of `config`, for `--fresh`.

    Raises ConfigError if the directory is in use or is not a run directory.
    """
    path = Path(config.run.dir) / config.run.name
    if not path.exists() or not any(path.iterdir()):
        return
    if not (RunDir(path).lock.exists() or RunDir(path).identity.exists()):
        raise ConfigError(
            f"--fresh: {path} must be a run directory to be deleted, got one without a lock "
            "file; remove it yourself"
        )
    if not RunDir(path).config.exists():
        # the run died before it wrote its configuration, which `claim` requires
        RunDir(path).config.touch()
    with RunDir.claim(config, resume=True, to_clear=True):
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != "lock":
                entry.unlink()


def exported_checkpoint(run: RunDir, which: str | None) -> tuple[int, Path]:
    """Return the step and the export directory of a checkpoint: `best`, `last` or the
    number of a step; if None, of `best`, or of `last` if no checkpoint is the best.

    Raises ConfigError.
    """
    checkpoints = Checkpoints(run.checkpoints)
    steps = checkpoints.exported()
    if not steps:
        raise ConfigError(
            f"--checkpoint: {run.path} must hold a finished checkpoint with an export, got none yet"
        )
    best = run.path / "best"
    if which is None:
        which = "best" if os.path.lexists(best) else "last"
    if which == "best" and not os.path.lexists(best):
        raise ConfigError(
            f"--checkpoint best: {run.path.name} has none{_why_no_best(run)}; its checkpoints are "
            f"{', '.join(map(str, steps))}"
        )
    if which == "last":
        step = steps[-1]
    elif which == "best" and (own := whole(best.resolve().name.removeprefix("step-"))) is not None:
        step = own
    elif which == "best":
        raise ConfigError(
            f"--checkpoint: {best} must be a link to a checkpoint, got {best.resolve()}; name a "
            "step"
        )
    elif (named := whole(which)) is not None:
        step = named
    else:
        raise ConfigError(f"--checkpoint must be best, last or a step, got {which!r}")
    if step not in steps:
        raise ConfigError(
            f"--checkpoint must be one of {', '.join(map(str, steps))} in {run.path}, got {step}"
        )
    return step, checkpoints.export(step)


def _why_no_best(run: RunDir) -> str:
    """Return the reason why no checkpoint is the best, if the configuration says it."""
    try:
        every = run.configuration().eval.every
    except ConfigError:  # an incomplete or outdated file explains nothing
        return ""
    return ", because eval.every is 0" if every == 0 else ", because no evaluation has chosen one"
