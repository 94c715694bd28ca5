"""The action server as a process, for tests: isolated and without site packages, as any
Python of a sandbox may run it.
"""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from rollweave_sandbox import inside
from rollweave_sandbox.channel import Channel

FOLDER = Path(inside.__file__).parent

PYTHON = (sys.executable, "-I", "-S")

BLIND = f"import os, runpy; del os.pidfd_open; runpy.run_path({str(FOLDER)!r}, run_name='__main__')"
"""Code that runs the server as on a system without pidfd."""


PRELOADED = (
    f"import IPython.core.interactiveshell, runpy; runpy.run_path({str(FOLDER)!r}, "
    "run_name='__main__')"
)
"""Code that runs the server as in a sandbox that is a fork of a process which has
imported much.
"""


def start(
    *, cwd: Path | None = None, code: str = ""
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """`code` is run instead of the folder. Packages are there for PRELOADED alone."""
    own_end, other_end = socket.socketpair()
    program = ("-c", code) if code else (str(FOLDER),)
    with other_end:
        process = subprocess.Popen(
            [
                *(PYTHON[:2] if code == PRELOADED else PYTHON),
                *program,
                "--fd",
                str(other_end.fileno()),
            ],
            pass_fds=(other_end.fileno(),),
            cwd=cwd,
        )
    return process, own_end


@contextlib.asynccontextmanager
async def served(*, cwd: Path | None = None, code: str = "") -> AsyncIterator[Channel]:
    """A channel to a server, which has ended, on its own, when this ends."""
    process, own_end = start(cwd=cwd, code=code)
    channel = Channel(own_end)
    try:
        yield channel
    finally:
        channel.close()
        try:
            status = process.wait(20)
        finally:
            process.kill()
            process.wait()
        assert status in (0, -9)


async def wait_for_end(pid: int) -> None:
    """Return when a process, which need not be ours, has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), 20)
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
