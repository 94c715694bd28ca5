"""Folders that do not outlive their owner for long, even if the owner is killed: the
next start removes the folders of dead owners.

A folder is locked (`flock`) as long as a process of its owner has it open. The kernel
releases the lock when the last such process ends in any way, so no process id has to be
stored or compared. A folder that is not locked is removed.

Invariant: only its owner removes a folder that `create` returned. Every folder with a
prefix comes from here. Standard library alone.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


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
