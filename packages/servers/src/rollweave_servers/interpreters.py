"""The check that an interpreter of the user has a package, without importing it, which
may take seconds.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from rollweave.io.child import status_text
from rollweave.schema.errors import ConfigError

LIMIT_S = 60.0
"""Maximum seconds to ask an interpreter, most of which the disk takes."""

SCRIPT = """
import importlib.metadata, importlib.util, json, pathlib, sys
package, names, needed, beside = json.loads(sys.argv[1])
spec = importlib.util.find_spec(package)
if spec is None or not spec.submodule_search_locations:
    print(json.dumps({"version": None, "lacks": []}))
    sys.exit()
root = pathlib.Path(spec.submodule_search_locations[0])
version = "unknown"
for name in names:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
lacks = [f"the package {name}" for name in beside if importlib.util.find_spec(name) is None]
for folder, words in needed.items():
    files = sorted((root / folder).rglob("*.py"))
    text = "".join(file.read_text(errors="replace") for file in files)
    lacks += [word for word in words if word not in text]
print(json.dumps({"version": version, "lacks": lacks}))
"""


def installed_version(
    name: str,
    python: str,
    *,
    package: str,
    distributions: Sequence[str],
    needed: Mapping[str, Sequence[str]],
    beside: Sequence[str] = (),
) -> str:
    """Return the version of the server `name` that the interpreter has. `needed` are
    words that the modules in a folder of its package must mention, and `beside` are
    packages that it must have as well.

    Raises ConfigError, whose text is the broken rule, if it has none, or one of a
    version that lacks what this engine needs.
    """
    problem = f"must be an interpreter that has {name}"
    program = shutil.which(os.path.expanduser(python))
    if program is None:
        raise ConfigError(f"{problem}, got {python!r}, which is no program")
    try:
        answer = subprocess.run(
            [program, "-I", "-c", SCRIPT, json.dumps([package, distributions, needed, beside])],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        ).stdout
        report = json.loads(answer)
        version, lacks = report["version"], report["lacks"]
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{problem}, got {python!r}, which did not answer within {LIMIT_S:g} s"
        ) from None
    except subprocess.CalledProcessError as error:
        reason = "\n".join(error.stderr.strip().splitlines()[-1:]) or status_text(error.returncode)
        raise ConfigError(f"{problem}, got {python!r}, which failed: {reason:.200}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{problem}, got {python!r}: {error!s:.200}") from None
    if version is None:
        raise ConfigError(f"{problem}, got {python!r}, which has none")
    if lacks:
        raise ConfigError(
            f"must have {name} with {', '.join(lacks)}, got version {version} in {python!r}"
        )
    return str(version)
