"""An interpreter that has what `rollweave_servers` expects of SGLang: a package whose
server is `sglang_server.py`.
"""

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packages.servers.tests.vllm_server import SECRET, running
from rollweave.schema.serving import ServerSpec
from rollweave_servers.process import PLUGIN
from rollweave_servers.sglang import NEEDED, SPARE_TOKENS

ROOT = Path(__file__).parents[3]

SGLANG_START_S = 120.0
"""Maximum seconds until the server is ready on a busy machine."""


def sglang_python(directory: Path, *, without: str = "") -> str:
    """Write an interpreter with this package in `directory`. Its version lacks the word
    `without`.
    """
    site = directory / "site"
    package = site / "sglang"
    for folder, words in NEEDED.items():
        (package / folder).mkdir(parents=True)
        (package / folder / "module.py").write_text(
            "\n".join(word for word in words if word != without)
        )
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(
        "from packages.servers.tests.sglang_server import main\n\nif __name__ == '__main__':\n    main()\n"
    )
    (package / "srt" / "entrypoints" / "http_server.py").write_text(
        "from packages.servers.tests.sglang_server import VERSION as __version__, app\n"
        "from packages.servers.tests.sglang_server import state as _global_state\n"
    )
    info = site / "sglang-0.5.23.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    program = directory / "python"
    path = f"{site}:{ROOT}"
    # -I ignores PYTHONPATH
    program.write_text(
        f'#!/bin/sh\n[ "$1" = -I ] && shift\n'
        f'PYTHONPATH={shlex.quote(path)} exec {shlex.quote(sys.executable)} "$@"\n'
    )
    program.chmod(0o755)
    return str(program)


def sglang_spec(
    directory: Path, *args: str, control_s: float = 60.0, degree: int = 1
) -> ServerSpec:
    """Return the server of an engine, on an interpreter that is written to
    `directory`.
    """
    return ServerSpec(
        kind="sglang",
        python=sglang_python(directory),
        args=args,
        degree=degree,
        start_s=SGLANG_START_S,
        control_s=control_s,
    )


@contextlib.contextmanager
def start_sglang_server(
    directory: Path, model: Path, port: int, *args: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a server with the program for its user, and yield it once it is healthy;
    kill it at the end. Its interpreter is written to `directory`.
    """
    options = {
        "model-path": model,
        "port": port,
        "dtype": "float32",
        "device": "cpu",
        "context-length": 512 + SPARE_TOKENS,
        "max-running-requests": 16,
        "max-total-tokens": 16384,
    }
    command = [
        sglang_python(directory),
        str(PLUGIN / "rollweave_sglang.py"),
        *(f"--{name}={value}" for name, value in options.items()),
        *args,
    ]
    variables = {**os.environ, "ROLLWEAVE_SGLANG_TOKEN": SECRET}
    with running(command, variables, port, SECRET, SGLANG_START_S) as process:
        yield process
