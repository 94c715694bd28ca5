"""The process of an inference server, and the error that ended it.

Invariants: the server gets a free port of the loopback interface, and a token that only
this process and its children know; it ends when this process ends, which its program
ensures.
"""

import asyncio
import os
import re
import secrets
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rollweave.io.child import status_text
from rollweave.schema.errors import EngineError
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
