"""The process of a worker of one of the user's roles: `python -m
rollweave.runtime.entrypoints.role`, started by `runtime/roles/role.py`.
"""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

from rollweave.envs import registry
from rollweave.runtime.roles.serving import serve_worker
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


if __name__ == "__main__":
    serve_worker(load)
    # nothing outlives the process, and the interpreter may take long to unload
    sys.stdout.flush()
    os._exit(0)
