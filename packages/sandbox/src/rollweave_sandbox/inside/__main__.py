"""`python3 [-I] [-S] .../inside --fd N` serves the connected socket N. Needs Python 3.9
and its standard library alone.

The folder becomes the package `inside` by its path and is removed from `sys.path`, so
that no module in it or its parent can shadow, or be shadowed by, a module that the
agent's code imports.
"""

import importlib.util
import os.path
import sys


def load() -> None:
    """Make `import inside` mean this folder, regardless of its path."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.util.spec_from_file_location(
        "inside", f"{here}/__init__.py", submodule_search_locations=[here]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {here}")
    package = importlib.util.module_from_spec(spec)
    sys.modules["inside"] = package
    spec.loader.exec_module(package)
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]


if __name__ == "__main__":
    load()
    importlib.import_module("inside.server").main(sys.argv[1:])
