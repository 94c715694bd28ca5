"""Loads the class of a role in the process that executes its methods."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

from rollweave.envs import registry
from rollweave.runtime.roles.worker import Worker

SCRIPT_MODULE = "__rollweave_script__"
"""Name under which a script is imported; as `__main__` it would start its workers
again.
"""


def load(reference: str) -> type[Worker]:
    """Return the class at "package.module:Class" or "path/of/script.py:Class".

    Raises ConfigError, and the exceptions of the script.
    """
    path, _, name = reference.rpartition(":")
    if "/" in path:
        _import_script(Path(path))
        path = SCRIPT_MODULE
    worker: type[Worker] = registry.load(f"{path}:{name}", what="worker")
    return worker


def _import_script(path: Path) -> None:
    """Import a script, with its folder on the import path, as when Python runs it."""
    sys.path.insert(0, str(path.parent.absolute()))
    loader = importlib.machinery.SourceFileLoader(SCRIPT_MODULE, str(path.absolute()))
    spec = importlib.util.spec_from_loader(SCRIPT_MODULE, loader)
    assert spec is not None, "there is a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT_MODULE] = module
    loader.exec_module(module)
