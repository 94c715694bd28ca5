"""The checkpoints of a run: `checkpoints/step-NNNNNN/`, and `best`, a link to one of
them.

An epoch of the trainer writes a checkpoint to a staged directory, whose name no other
epoch uses, and the controller gives it the name `step-…`. A trainer that was given up,
but still runs on a host that is cut off, therefore changes no checkpoint, however late
it writes. Invariants: a directory named `step-…` is complete, and comes from the epoch
that was the trainer when it got this name. The core decides which of them to resume
from, and the journal records it.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollweave.io.disk import REPLACED_SUFFIX, replace_directory
from rollweave.io.hub import PINNED, fetched, folder, is_hub_name
from rollweave.record.rundir import RunDir
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.weights import NUMBER_BYTES
from rollweave.weights.checkpoint import ModelShape, gguf_of
from rollweave.weights.needs import trained_parameters

UNFINISHED = "step-*.partial-*"
"""Pattern of the directories that a trainer was writing when it was killed
(`io/disk.py`), of staged ones, and of those that were being removed.
"""

STAGED = ".partial-epoch-"
"""Suffix of a staged checkpoint, before the trainer's epoch."""

PRUNED = ".partial-pruned"
"""Suffix of a checkpoint that is being removed."""


EXPORT = "hf"
"""Subdirectory of a checkpoint with its export in Hugging Face format
(`train/checkpoint.py`).
"""


KEPT = 3
"""Number of checkpoints on disk: the newest, the best, and the one being written."""


def is_model(path: Path) -> bool:
    """True if the path is a directory with a model in Hugging Face format."""
    # unlike os.path.isfile, Path.is_file raises for invalid names
    return os.path.isfile(path / "config.json")


def checkpoint_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Return the disk space of a run's checkpoints, each with trained weights and
    moments in float32, and an export in the model's format.
    """
    numbers = 3 * trained_parameters(config, shape) + shape.parameters()
    return KEPT * numbers * NUMBER_BYTES["float32"]


class Checkpoints:
    """The directory of one run's checkpoints."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"

    def staged(self, step: int, epoch: int) -> Path:
        """Return the directory in which this epoch of the trainer writes the checkpoint
        of a step.
        """
        path = self.path(step)
        return path.with_name(f"{path.name}{STAGED}{epoch}")

    def accept(self, step: int, epoch: int) -> None:
        """Let the complete staged checkpoint of the trainer's present epoch become that
        of its step, and remove what earlier epochs have staged.

        Raises OSError.
        """
        path, staged = self.path(step), self.staged(step, epoch)
        try:
            replace_directory(path, staged)
        except OSError:
            if path.exists():
                shutil.rmtree(staged, ignore_errors=True)
            raise
        for leftover in self.directory.glob(f"step-*{STAGED}*"):
            written_by = leftover.name.partition(STAGED)[2].partition(".")[0]
            if written_by.isdecimal() and int(written_by) < epoch:
                shutil.rmtree(leftover, ignore_errors=True)

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, ascending."""
        paths = set(self.directory.glob("step-*"))
        names = [path.name.removeprefix("step-") for path in paths]
        steps = {int(name) for name in names if name.isdecimal()}
        return sorted(step for step in steps if self.path(step) in paths)

    def export(self, step: int) -> Path:
        """Return the directory of a checkpoint's export, which need not exist."""
        return self.path(step) / EXPORT

    def exported(self) -> list[int]:
        """Return the steps with a complete checkpoint that has an export, ascending."""
        return [step for step in self.steps() if is_model(self.export(step))]

    def model(self) -> Path | None:
        """Return the export that users want first: that of `best`, else that of the
        last checkpoint with one. None if there is none.
        """
        best = self.directory.parent / "best" / EXPORT
        if is_model(best):
            return best
        steps = self.exported()
        return self.export(steps[-1]) if steps else None

    def prune(self, newest: int, keep: Iterable[int]) -> None:
        """Remove the complete checkpoints before `newest`, except those in `keep`.

        Later ones stay: this may run late, when the trainer has already written one.
        Each is renamed first, since this process may be killed during the removal.
        """
        keep = set(keep)
        for step in self.steps():
            if step < newest and step not in keep:
                old = self.path(step).with_name(f"{self.path(step).name}{PRUNED}")
                shutil.rmtree(old, ignore_errors=True)
                with contextlib.suppress(OSError):  # a leftover only takes space
                    self.path(step).rename(old)
                shutil.rmtree(old, ignore_errors=True)

    def return_replaced(self) -> None:
        """Give checkpoints their names again that were being replaced when the
        controller was killed, on a file system that cannot exchange two names. Passes
        OSErrors through.
        """
        for replaced in self.directory.glob(f"step-*{REPLACED_SUFFIX}"):
            path = replaced.with_name(replaced.name.removesuffix(REPLACED_SUFFIX))
            if not path.exists():
                replaced.rename(path)

    def clear_unfinished(self) -> None:
        """Remove incomplete directories that a killed run or a full disk has left.

        The present epoch of the trainer must not be writing.
        """
        for leftover in self.directory.glob(UNFINISHED):
            shutil.rmtree(leftover, ignore_errors=True)

    def mark_best(self, step: int) -> None:
        """Let `best`, beside the checkpoints' directory, point to a step. Raises
        OSError.
        """
        if not self.path(step).is_dir():
            raise FileNotFoundError(f"{self.path(step)} does not exist")
        link = self.directory.parent / "best"
        fresh = link.with_name("best.new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(self.path(step).relative_to(self.directory.parent))
        fresh.replace(link)


def with_model(config: RunConfig, *, weights: bool = True) -> RunConfig:
    """Fetch a model of the hub, and return the configuration with the commit of the
    download in the model's name. Without `weights`, fetch only what the checks read.

    Raises ConfigError.
    """
    path = config.model.path
    return config if path is None else _with_path(config, fetched(path, weights=weights))


def with_former_commits(config: RunConfig) -> RunConfig:
    """Return the configuration of a run that resumes with the commits of its model and
    of its data sets, whatever their names, and the branches that they name, mean on the
    hub by now. A name with a commit stays.

    Raises ConfigError.
    """
    run = RunDir(Path(config.run.dir) / config.run.name)
    names = [config.model.path, *(name for task in config.tasks for name in task.options.values())]
    if not run.config.exists() or not any(map(_may_move, names)):
        return config
    former = run.configuration()
    of_name = {task.name: task.options for task in former.tasks}
    tasks = []
    for task in config.tasks:
        before = of_name.get(task.name, {})
        options = {name: _former(value, before.get(name)) for name, value in task.options.items()}
        tasks.append(task.model_copy(update={"options": options}))
    config = config.model_copy(update={"tasks": tuple(tasks)})
    return _with_path(config, _former(config.model.path, former.model.path))


def _may_move(name: Any) -> bool:
    return isinstance(name, str) and is_hub_name(name) and PINNED.fullmatch(name) is None


def _former(now: Any, before: Any) -> Any:
    """Return the name that a setting had `before`, if that is the same name of the hub
    with a commit, and `now` has none. The user is told of a branch that is replaced.
    """
    if not _may_move(now) or not isinstance(before, str) or PINNED.fullmatch(before) is None:
        return now
    name, at, _ = now.partition("@")
    if name != before.partition("@")[0]:
        return now
    if at:
        print(f"{now} stays {before}, with which the run began", file=sys.stderr)
    return before


def _with_path(config: RunConfig, path: str | None) -> RunConfig:
    model = config.model.model_copy(update={"path": path})
    return config.model_copy(update={"model": model})


def model_directory(path: str) -> Path:
    """Return the directory of a model in Hugging Face format, at `path`.

    Raises ConfigError, which names the model where `path` is a run or a checkpoint of
    one.
    """
    directory = folder(path)
    rule = f"model.path must be a folder with config.json, got {path}"
    if how := gguf_of(directory):
        raise ConfigError(f"{rule}; {how}")
    if not os.path.isdir(directory):
        raise ConfigError(f"model.path must be a checkpoint directory, got {path!r}")
    if is_model(directory):
        return directory
    if is_model(directory / EXPORT):
        raise ConfigError(f"{rule}, a checkpoint of a run: its model is {directory / EXPORT}")
    run = Checkpoints(directory / "checkpoints")
    if run.steps():
        model = run.model()
        its = f"its model is {model}" if model is not None else "none of its checkpoints has one"
        raise ConfigError(f"{rule}, a run: {its}")
    siblings = Checkpoints(directory.parent)
    if directory in map(siblings.path, siblings.steps()):
        models = ", ".join(str(siblings.export(step)) for step in siblings.exported()) or "none"
        raise ConfigError(
            f"{rule}, a checkpoint of a run, which has no model; those of the run that have one: "
            f"{models}"
        )
    raise ConfigError(rule)
