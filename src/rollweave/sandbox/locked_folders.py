"""Folders that do not outlive their owner for long, even if it is killed: the next
start removes those of dead owners.

A folder is locked (`flock`) as long as a process of its owner has it open. The kernel
releases the lock when the last of them has ended, however it ends, so no process id has
to be stored or compared. A folder that is not locked is removed.

Invariant: only its owner removes a folder that `create` returned. Standard library alone.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile

PREFIX = "rollweave-sandboxes-"
"""Prefix of our folders' names."""


def create(parent: str) -> tuple[str, int]:
    """Make a folder in `parent`; return it with the descriptor that locks it.

    Raises OSError.
    """
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        with contextlib.suppress(FileNotFoundError):  # removed before it was locked
            lock = try_lock(folder)
            if lock is not None:
                if os.path.isdir(folder):
                    return folder, lock
                os.close(lock)


def remove_stale(parent: str) -> None:
    """Remove our user's folders in `parent` whose owners are dead."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX):
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
    it. Raises OSError.
    """
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
