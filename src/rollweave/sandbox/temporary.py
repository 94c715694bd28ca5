"""Temporary files and folders next to their final paths. Files and folders of killed
owners are removed.

Invariant: the process that makes a temporary file or folder holds a lock on it, and
only a process that gets the lock removes it, since the owner is then dead. The names
contain the machine's name, because locks on a shared file system may not reach other
machines.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def _prefix() -> str:
    return f".new-{socket.gethostname()}-"


@contextlib.contextmanager
def temporary_folder(place: Path) -> Iterator[Path]:
    """Make a folder in `place`, and remove it afterwards unless it was renamed."""
    while True:
        made = Path(tempfile.mkdtemp(dir=place, prefix=_prefix()))
        fd = os.open(made, _OPEN)
        if lock(fd):
            break
        os.close(fd)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(fd)


@contextlib.contextmanager
def temporary_file(place: Path) -> Iterator["tempfile._TemporaryFileWrapper[bytes]"]:
    """Make a file in `place`, and remove it afterwards unless it was renamed."""
    while True:
        file = tempfile.NamedTemporaryFile(dir=place, prefix=_prefix(), delete=False)  # noqa: SIM115
        if lock(file.fileno()):
            break
        file.close()
    try:
        with file:
            yield file
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.name)


def lock(fd: int) -> bool:
    """Lock a new file or folder. Return False if another process has removed it as a
    leftover.
    """
    # On a file system without locks, nothing is removed as a leftover.
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX)
    return os.fstat(fd).st_nlink > 0


def remove_leftovers(place: Path) -> None:
    """Remove temporary files and folders that killed processes left in `place`."""
    for path in place.glob(f"{_prefix()}*"):
        # The file may be removed already, locked by its owner, or another user's.
        with contextlib.suppress(OSError):
            fd = os.open(path, _OPEN)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            finally:
                os.close(fd)
