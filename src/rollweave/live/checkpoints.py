"""Checkpoints of a run: `checkpoints/step-NNNNNN/` with the trainer's files and `core.msgpack`, complete or not there.

Invariants: a directory called `step-…` holds the trainer's whole state and the core's snapshot of that moment; the snapshot
names the journal segment that begins right after it, so that recovery is snapshot plus journal. `best` is a link to one of
them. What is unfinished has another name and is cleared at the next start.
"""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec

from rollweave.schema.base import Noun

CORE_FILE = "core.msgpack"
SAVING = "saving-"
FORMER = "former-"


class CoreSnapshot(Noun, frozen=True, kw_only=True):
    """The core at run time `at`; events from journal segment `segment` on came after it. `state` is the core's own format."""

    step: int
    segment: int
    at: float
    state: bytes


class Checkpoints:
    """The directory of one run's checkpoints."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"

    def saving_path(self, step: int) -> Path:
        """Where the trainer writes step `step`, until `complete` gives it its name."""
        return self.directory / f"{SAVING}{step:06d}"

    def complete(self, step: int, snapshot: CoreSnapshot) -> None:
        """Add the snapshot to what the trainer saved and give the whole its name. Raises OSError and leaves no trace."""
        saving, final = self.saving_path(step), self.path(step)
        former = self.directory / f"{FORMER}{step:06d}"
        try:
            _write_durably(saving / CORE_FILE, msgspec.msgpack.encode(snapshot))
            shutil.rmtree(former, ignore_errors=True)
            if final.exists():  # the same step of a lineage that was lost
                final.rename(former)
            saving.rename(final)
            _sync_directory(self.directory)
        except OSError:
            if former.exists() and not final.exists():
                former.rename(final)
            self.discard(step)
            raise
        shutil.rmtree(former, ignore_errors=True)

    def discard(self, step: int) -> None:
        """Remove what was written of a checkpoint that failed."""
        shutil.rmtree(self.saving_path(step), ignore_errors=True)

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        names = [path.name.removeprefix("step-") for path in self.directory.glob("step-*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def prune(self, keep: Iterable[int]) -> None:
        """Remove all complete checkpoints but these."""
        kept = set(keep)
        for step in self.steps():
            if step not in kept:
                shutil.rmtree(self.path(step), ignore_errors=True)

    def mark_best(self, step: int) -> None:
        """Point `best`, beside the checkpoints' directory, to step `step`. Raises OSError."""
        link = self.directory.parent / "best"
        fresh = link.with_name("best.new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(self.path(step).relative_to(self.directory.parent))
        fresh.replace(link)

    def recover(self) -> None:
        """After a crash: give a checkpoint that was being replaced its name back, and clear what is unfinished."""
        for former in self.directory.glob(f"{FORMER}*"):
            final = self.directory / f"step-{former.name.removeprefix(FORMER)}"
            if not final.exists():
                former.rename(final)
        for leftover in [*self.directory.glob(f"{SAVING}*"), *self.directory.glob(f"{FORMER}*")]:
            shutil.rmtree(leftover, ignore_errors=True)

    def newest_snapshot(self) -> CoreSnapshot | None:
        """The snapshot after which the fewest journal segments follow."""
        found = [msgspec.msgpack.decode((self.path(step) / CORE_FILE).read_bytes(), type=CoreSnapshot) for step in self.steps()]
        return max(found, key=lambda snapshot: snapshot.segment, default=None)


def _write_durably(path: Path, payload: bytes) -> None:
    with path.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
