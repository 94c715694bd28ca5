"""Directories that appear complete or not at all.

Invariant: `new_directory` either renames a fully written and synced directory to its
name, or leaves nothing behind and an existing directory of that name untouched.
Unfinished ones carry the suffix `.partial-…` and are removed by the next writer.
"""

import contextlib
import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

PARTIAL = ".partial-"

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Constants from <linux/fcntl.h> and <linux/fs.h>, because Python's os does not have
the call.
"""


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory to fill; on success it becomes `path`, replacing an
    existing one. Passes OSErrors through.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for sibling in path.parent.iterdir():
        if sibling.name.startswith(path.name + PARTIAL):
            shutil.rmtree(sibling, ignore_errors=True)
    partial = path.with_name(f"{path.name}{PARTIAL}{os.getpid()}")
    try:
        partial.mkdir()
        yield partial
        _sync_tree(partial)
        if path.exists():
            _exchange(partial, path)
            shutil.rmtree(partial)
        else:
            partial.rename(path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _exchange(one: Path, other: Path) -> None:
    """Swap two directories' names in one step, so that each name always refers to a
    complete one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(other))


def _sync_tree(root: Path) -> None:
    for directory, _, names in os.walk(root):
        for name in names:
            _sync(Path(directory, name))
        _sync(Path(directory))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
