"""`python3 [-I] [-S] .../inside --fd N`: serve the connected socket N. Python 3.9,
stdlib alone.

The folder becomes the package `inside` by its path, and leaves `sys.path`: no module of
its parent or its own can shadow, or be shadowed by, what the agent's code imports.
"""

import importlib.util
import os.path
import sys


def load() -> None:
    """Make `import inside` mean this folder, whatever it and its parents are called."""
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
