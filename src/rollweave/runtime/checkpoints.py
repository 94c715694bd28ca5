"""Checkpoints of a run: `checkpoints/step-NNNNNN/`, written whole or not at all by the
trainer, and `best`, a link to one.

Invariant: a directory called `step-…` is complete. Which of them counts is the core's
knowledge, kept in the journal.
"""

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

UNFINISHED = "step-*.partial-*"
"""What a trainer leaves behind when it is killed while writing (`train/files.py`), and
what was being removed.
"""

PRUNED = ".partial-pruned"


class Checkpoints:
    """The directory of one run's checkpoints."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        names = [path.name.removeprefix("step-") for path in self.directory.glob("step-*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def prune(self, keep: Iterable[int]) -> None:
        """Remove all complete checkpoints but these.

        Each loses its name first: we may be killed on the way.
        """
        kept = set(keep)
        for step in self.steps():
            if step not in kept:
                old = self.path(step).with_name(f"{self.path(step).name}{PRUNED}")
                shutil.rmtree(old, ignore_errors=True)
                with contextlib.suppress(OSError):  # whatever cannot be removed only takes room
                    self.path(step).rename(old)
                shutil.rmtree(old, ignore_errors=True)

    def clear_unfinished(self) -> None:
        """Remove what was being written or removed when the run was killed, or the disk
        was full. Nobody may be writing.
        """
        for leftover in self.directory.glob(UNFINISHED):
            shutil.rmtree(leftover, ignore_errors=True)

    def mark_best(self, step: int) -> None:
        """Point `best`, beside the checkpoints' directory, to step `step`.

        Raises OSError.
        """
        if not self.path(step).is_dir():
            raise FileNotFoundError(f"{self.path(step)} is not there")
        link = self.directory.parent / "best"
        fresh = link.with_name("best.new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(self.path(step).relative_to(self.directory.parent))
        fresh.replace(link)
