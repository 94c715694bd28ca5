"""Directories that appear complete or not at all.

Invariant: `new_directory` either renames a fully written and synced directory to its name, or leaves nothing and
whatever had that name before untouched. Unfinished ones carry the suffix `.partial-…` and are cleared by the next writer.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

PARTIAL = ".partial-"


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory to fill; on success it becomes `path`, replacing a former one. OSErrors pass through."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f"{path.name}{PARTIAL}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = path.with_name(f"{path.name}{PARTIAL}{os.getpid()}")
    try:
        partial.mkdir()
        yield partial
        _sync_tree(partial)
        if path.exists():
            # Linux cannot replace a non-empty directory in one step: move the former one aside, then away.
            former = path.with_name(f"{path.name}{PARTIAL}former")
            path.rename(former)
            partial.rename(path)
            shutil.rmtree(former)
        else:
            partial.rename(path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


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
