"""The directory of one run, and the right to write to it.

Invariants: at most one controller holds a run directory (an advisory lock that dies with its process); a fresh run never
writes into a directory that holds something; whatever is inside is named here and nowhere else.
"""

import contextlib
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from rollweave.codec.config import dumps
from rollweave.codec.disk import replace_file, writing
from rollweave.schema.config import RunConfig
from rollweave.schema.errors import ConfigError


class RunDir:
    """Paths below `runs/<name>`. `claim` takes the lock; `release` gives it back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.journal = path / "journal.bin"
        self.trajectories = path / "trajectories"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.model = path / "model"
        self.metrics = path / "metrics.jsonl"
        self.trace = path / "trace.json"
        self.summary = path / "summary.json"
        self.lock = path / "lock"
        self.control = path / "control.sock"
        self._fd = -1

    @classmethod
    def claim(cls, config: RunConfig, *, resume: bool, replace: Sequence[str] = ()) -> Self:
        """Make or take over the run's directory; the files `replace` of a former run are deleted once the lock is ours.

        Raises `ConfigError` where it is in use, or not as `resume` expects; `DiskError` where it cannot be written.
        """
        run = cls((Path(config.run.dir) / config.run.name).absolute())  # whatever becomes of the working directory
        if resume and not run.config.exists():
            raise ConfigError(f"--resume: {run.path} must hold a run, found no config.toml")
        if file := next((path for path in (run.path, *run.path.parents) if path.exists() and not path.is_dir()), None):
            raise ConfigError(f"run.dir and run.name must be of a directory, or of none yet, got the file {file}")
        with writing(run.path):
            run.path.mkdir(parents=True, exist_ok=True)
            run._take_lock()
            for name in replace:
                (run.path / name).unlink(missing_ok=True)
        if not resume and run.holds_something():
            run.release()
            if run.config.exists():
                raise ConfigError(f"run.name: {run.path} holds a run already; go on with --resume, or choose another name")
            raise ConfigError(f"run.name: {run.path} must be empty or hold a run, found other files and no config.toml")
        with writing(run.path):
            run.logs.mkdir(exist_ok=True)
            run.checkpoints.mkdir(exist_ok=True)
        return run

    def holds_something(self) -> bool:
        """True if a run has written here: anything but the lock and directories that are empty."""
        return self.path.exists() and any(entry != self.lock and not _empty_directory(entry) for entry in self.path.iterdir())

    def write_config(self, config: RunConfig) -> None:
        """Write `config.toml`, whole or not at all. Raises DiskError."""
        replace_file(self.config, dumps(config).encode())

    def release(self) -> None:
        """Give the lock back. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take_lock(self) -> None:
        fd = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise ConfigError(f"run.name: {self.path} is in use by another controller, process {holder}") from None
        self._fd = fd
        with contextlib.suppress(OSError):  # a full disk: the lock holds without our name
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _empty_directory(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())
