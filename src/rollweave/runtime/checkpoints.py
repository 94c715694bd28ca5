"""The checkpoints of a run: `checkpoints/step-NNNNNN/`, which the trainer writes
completely or not at all, and `best`, a link to one of them.

Invariant: a directory named `step-…` is complete. The core decides which of them to
resume from, and the journal records it.
"""

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

UNFINISHED = "step-*.partial-*"
"""Pattern of the directories that a trainer was writing when it was killed
(`train/files.py`), and of those that were being removed.
"""

PRUNED = ".partial-pruned"
"""Suffix of a checkpoint that is being removed."""


class Checkpoints:
    """The directory of one run's checkpoints."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Return the steps with a complete checkpoint, ascending."""
        paths = set(self.directory.glob("step-*"))
        names = [path.name.removeprefix("step-") for path in paths]
        steps = {int(name) for name in names if name.isdecimal()}
        return sorted(step for step in steps if self.path(step) in paths)

    def prune(self, newest: int, keep: Iterable[int]) -> None:
        """Remove the complete checkpoints before `newest`, except those in `keep`.

        Later ones stay: this may run late, when the trainer has already written one. Each
        is renamed first, since this process may be killed during the removal.
        """
        keep = set(keep)
        for step in self.steps():
            if step < newest and step not in keep:
                old = self.path(step).with_name(f"{self.path(step).name}{PRUNED}")
                shutil.rmtree(old, ignore_errors=True)
                with contextlib.suppress(OSError):  # a leftover only takes space
                    self.path(step).rename(old)
                shutil.rmtree(old, ignore_errors=True)

    def clear_unfinished(self) -> None:
        """Remove incomplete directories that a killed run or a full disk has left.

        No trainer may be writing.
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
