"""Directories that appear complete or not at all.

Invariant: `new_directory` either renames a fully written and synced directory to its
name, or leaves nothing behind and an existing directory of that name untouched.
Unfinished directories carry the suffix `.partial-…` and are removed by the next writer
of the same name, or when the run is resumed.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rollweave.io.disk import replace_directory, sync

PARTIAL = ".partial-"


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory to fill; on success it becomes `path`, replacing an
    existing directory. Passes OSErrors through.
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
        replace_directory(path, partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _sync_tree(root: Path) -> None:
    for directory, _, names in os.walk(root):
        for name in names:
            sync(Path(directory, name))
        sync(Path(directory))
