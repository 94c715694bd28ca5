"""The directories of our source: of Rollweave and of this distribution. They may lie in
different folders, as in a checkout.
"""

from pathlib import Path

from rollweave.package import DIRECTORY

DIRECTORIES = (DIRECTORY, Path(__file__).parent)


def main_of(module: str, *, forget: bool = False) -> str:
    """Return a program that runs the `main` of one of our modules, in an interpreter
    that may have no folder of packages. With `forget`, `main` itself imports nothing
    from our folders.
    """
    folders = list(dict.fromkeys(str(directory.parent) for directory in DIRECTORIES))
    forgotten = f"del sys.path[:{len(folders)}]; " if forget else ""
    return f"import sys; sys.path[:0] = {folders!r}; from {module} import main; {forgotten}main()"
