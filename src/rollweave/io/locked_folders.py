"""Folders and files that do not outlive their owner for long, even if the owner is
killed: the next start removes what dead owners left.

A folder or file is locked (`flock`) as long as a process of its owner has it open. The
kernel releases the lock when the last such process ends in any way, so no process id
has to be stored or compared. What is not locked is removed.

Invariants: only its owner removes a folder that `create` returned; every folder with a
prefix comes from here; only a process that gets the lock of a temporary file or folder
removes it, since the owner is then dead. The names of temporary files and folders next
to their final paths contain the machine's name, because locks on a shared file system
may not reach other machines. Standard library alone.
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


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a folder for temporary files, and remove it at the end of the context. Stale
    folders with the same prefix are removed first. Raises OSError.
    """
    parent = tempfile.gettempdir()
    remove_stale(parent, prefix)
    folder, lock = create(parent, prefix)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def create(parent: str, prefix: str) -> tuple[str, int]:
    """Make a folder in `parent`, whose name begins with `prefix`; return it with the
    descriptor that locks it. Raises OSError.
    """
    while True:
        folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
        with contextlib.suppress(FileNotFoundError):  # removed before it was locked
            lock = try_lock(folder)
            if lock is not None:
                if os.path.isdir(folder):
                    return folder, lock
                os.close(lock)


def remove_stale(parent: str, prefix: str) -> None:
    """Remove our user's folders in `parent` whose names begin with `prefix` and whose
    owners are dead.
    """
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(prefix):
                with contextlib.suppress(OSError):
                    _remove_if_dead(entry.path)


def _remove_if_dead(folder: str) -> None:
    lock = try_lock(folder)
    if lock is not None:
        try:
            if os.fstat(lock).st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def try_lock(folder: str) -> int | None:
    """Lock the folder and return the descriptor, or None if another process has locked
    the folder. Raises OSError.
    """
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _prefix() -> str:
    return f".new-{socket.gethostname()}-"


@contextlib.contextmanager
def unfinished_folder(place: Path) -> Iterator[Path]:
    """Make a folder in `place`, and remove it afterwards unless it was renamed."""
    while True:
        made = Path(tempfile.mkdtemp(dir=place, prefix=_prefix()))
        fd = os.open(made, _OPEN)
        if _lock(fd):
            break
        os.close(fd)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        os.close(fd)


@contextlib.contextmanager
def unfinished_file(place: Path) -> Iterator["tempfile._TemporaryFileWrapper[bytes]"]:
    """Make a file in `place`, and remove it afterwards unless it was renamed."""
    while True:
        file = tempfile.NamedTemporaryFile(dir=place, prefix=_prefix(), delete=False)  # noqa: SIM115
        if _lock(file.fileno()):
            break
        file.close()
    try:
        with file:
            yield file
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.name)


def _lock(fd: int) -> bool:
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
