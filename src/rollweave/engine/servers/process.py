"""The process of an inference server, the error that ended it, and the check that an
interpreter has a server that can be an engine, without importing it, which takes
seconds.

Invariants: the server gets a free port of the loopback interface, and a token that only
this process and its children know; it ends when this process ends, which its program
ensures.
"""

import asyncio
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rollweave.io.child import status_text
from rollweave.schema.errors import ConfigError, EngineError
from rollweave.schema.serving import EngineSpec, ServerSpec
from rollweave.weights.checkpoint import ModelShape

HOST = "127.0.0.1"

PLUGIN = Path(__file__).with_name("plugin")
"""Folder of the modules that run in servers, which import nothing of this package."""

LOG = Path("/proc/self/fd/2")
"""The log of this process, to which the server writes, too."""

LOG_BYTES = 1 << 20
"""Maximum bytes of a log that are searched for an error."""

ERROR = re.compile(
    r"^(?:\([^)]*\) |\[[^\]]*\] )?([A-Z]\w*(?:Error|Exception): .+)$"  # (process) or [time]
    r"|^\S+: (error: .+)$",  # of argparse
    re.MULTILINE,
)
ERROR_CHARS = 500
"""Maximum number of characters of an error that is reported."""

OURS = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
"""Environment variables that a server does not inherit: with our module path, it would
find versions of its requirements that are not meant for it.
"""

TOKENIZERS = ("tokenizer.json", "tokenizer.model")


class Server(Protocol):
    """A server at `url` that requires `token`. If it `preempts`, a request takes the
    slot of a running one of lower priority, and priorities can change.
    """

    url: str
    token: str
    preempts: bool

    def on_ready(self) -> None:
        """Clean up once the server and all of its children have started."""

    async def ended(self) -> str:
        """Wait for the end of the server, and return the reason."""

    def kill(self) -> None:
        """End the server, or give it up if it is not ours. This does not wait."""


class ServerProcess:
    """The process of a server called `name`, which starts at once: `python` with the
    arguments that `arguments` returns for a port, and the environment that
    `environment` returns for a token. Raises EngineError if it cannot start.
    """

    preempts = False

    def __init__(
        self,
        name: str,
        python: str,
        arguments: Callable[[int], Sequence[str]],
        environment: Callable[[str], Mapping[str, str]],
    ) -> None:
        self._name, self.token = name, secrets.token_urlsafe(32)
        # No process that requests any port gets this one until the server binds it.
        with socket.socket() as reserved:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind((HOST, 0))
            port = int(reserved.getsockname()[1])
            self.url = f"http://{HOST}:{port}"
            self._log_bytes = LOG.stat().st_size
            try:
                self._process = subprocess.Popen(
                    [os.path.expanduser(python), *arguments(port)],
                    stdin=subprocess.DEVNULL,
                    env=environment(self.token),
                )
            except OSError as error:
                raise EngineError(f"{python} cannot be run: {error}") from error

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def on_ready(self) -> None:
        """Clean up once the server and all of its children have started."""

    async def ended(self) -> str:
        """Wait for the end of the process, and return the reason."""
        status = await asyncio.to_thread(self._process.wait)
        return f"{self._name} ended: {first_error(LOG, self._log_bytes) or status_text(status)}"

    def kill(self) -> None:
        """Kill the server and its children. This does not wait."""
        if self._process.poll() is None:
            self._process.kill()


def free_port(host: str) -> int:
    """Return a port of an address of this host that is free now."""
    with socket.socket() as unused:
        unused.bind((host, 0))
        return int(unused.getsockname()[1])


def settings_of(spec: EngineSpec) -> ServerSpec:
    """Return the settings of the server of an engine that has one."""
    assert spec.server is not None, "an engine without a server"
    return spec.server


def max_context(spec: EngineSpec, shape: ModelShape) -> int:
    """Return the maximum length of a sequence, which must fit in the cache."""
    return min(shape.context, spec.kv_tokens)


def command_line(
    options: Mapping[str, object], switches: Iterable[str], args: Iterable[str]
) -> list[str]:
    """Return a server's arguments. The user's `args` come last, and take precedence."""
    return [
        *(part for name, value in options.items() for part in (f"--{name}", str(value))),
        *(f"--{name}" for name in switches),
        *args,
    ]


def inherited() -> dict[str, str]:
    """Return the variables of this process that a server inherits."""
    return {name: value for name, value in os.environ.items() if name not in OURS}


def has_tokenizer(model: str) -> bool:
    """Return whether a checkpoint has a tokenizer that a server can load."""
    return any(Path(model, name).exists() for name in TOKENIZERS)


def first_error(log: Path, start: int) -> str:
    """Return the first error in a log behind byte `start`, "" if there is none. It is
    the cause of those that follow, in one process of the server after the other.
    """
    if not log.is_file():
        return ""  # it may be a terminal
    try:
        with log.open("rb") as file:
            file.seek(start)
            match = ERROR.search(file.read(LOG_BYTES).decode(errors="replace"))
    except OSError:
        return ""
    return (match[1] or match[2])[:ERROR_CHARS] if match else ""


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
