"""Bench `tools`: the cost of one tool call to an agent, beside the usual ways of making
it (ProRL Agent §3.2.3).

A command is `echo hi`, a cell is `1+1`. Our calls are end to end: from the host through
the channel to the server, its shell or interpreter, and back with the output; `pty` is
the part from the server's receipt of the command until it has all output. The peers are
tmux (`send-keys`, and `wait-for` until the command has signaled: its output is not even
fetched), a new `bash -c`, and a Jupyter kernel through jupyter_client. All take turns
in small blocks in one run; figures are medians, in milliseconds.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.contract import Figure, Result
from rollweave.sandbox import inside
from rollweave.sandbox.channel import Channel
from rollweave.sandbox.tools import Bash, IPython

CALLS, QUICK_CALLS = 500, 60
"""Calls of each contender."""

BLOCK = 10
"""Calls of one contender before the next takes its turn."""

COMMAND, CELL = "echo hi", "1+1"

PEER_S = 60.0
"""Maximum seconds for a peer to answer or start: far longer than any takes."""

CONDITIONS = {
    "bash_over_tmux": "tmux by ours from end to end, output included; tmux's output is not "
    "fetched. The aim is 20",
    "pty_over_tmux": "tmux by our terminal alone, as the server measures it: command in, all "
    "output there. The aim is 40",
    "ipython_over_jupyter": "a Jupyter kernel through jupyter_client (ZMQ on loopback) by ours "
    "from end to end. The aim is 15",
    "bash_over_spawn": "a new `bash -c` on the host by ours from end to end",
    "sandbox": "none around the server: namespaces do not change the cost of a process's pipes",
}

Contender = Callable[[], list[float]]
"""A function that returns the milliseconds of each of `BLOCK` calls."""


def bench_tools(*, quick: bool) -> Result:
    """Return times of all installed contenders; the others are None, with the missing
    program.
    """
    conditions: dict[str, Any] = dict(CONDITIONS)
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(_ours())
        contenders: dict[str, Contender] = {"spawn": lambda: _timed(_spawn), **ours}
        for name, peer in (("tmux", _tmux), ("jupyter", _jupyter)):
            try:
                contenders[name] = stack.enter_context(peer())
            except FileNotFoundError as missing:
                conditions[f"{name}_ms"] = str(missing)
        if "ipython" not in ours:
            conditions["ipython_ms"] = "IPython is not installed: the extra `tools`"
        times = take_turns(contenders, QUICK_CALLS if quick else CALLS)
    conditions["calls"] = (
        f"{len(times['spawn'])} of each, in blocks of {BLOCK} that take turns; medians"
    )
    return Result(bench="tools", figures=figures(times), conditions=conditions)


def take_turns(contenders: dict[str, Contender], calls: int) -> dict[str, list[float]]:
    """Return the milliseconds of at least `calls` calls of each contender, in blocks;
    the first block of each is an uncounted warm-up.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(1 + -(-calls // BLOCK)):
        for name, run in contenders.items():
            block = run()
            if number:
                times[name] += block
    return times


def figures(times: dict[str, list[float]]) -> dict[str, Figure]:
    """Return medians, and our speed-up; None for missing measurements."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    names = ("bash", "pty", "tmux", "spawn", "ping", "ipython", "jupyter")
    figures_by_name: dict[str, Figure] = {f"{name}_ms": medians.get(name) for name in names}
    for ours, peer in (
        ("bash", "tmux"),
        ("pty", "tmux"),
        ("bash", "spawn"),
        ("ipython", "jupyter"),
    ):
        both = ours in medians and peer in medians
        figures_by_name[f"{ours}_over_{peer}"] = medians[peer] / medians[ours] if both else None
    return figures_by_name


def _timed(call: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(BLOCK):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e3)
    return times


@contextlib.contextmanager
def _ours() -> Iterator[dict[str, Contender]]:
    """Start a server outside of any sandbox, with our clients."""
    folder = Path(inside.__file__).parent
    mine, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(folder), "--fd", str(theirs.fileno())], pass_fds=(theirs.fileno(),)
        )
    with asyncio.Runner() as runner:
        tools = _Tools(runner, mine)
        try:
            contenders: dict[str, Contender] = {
                "bash": tools.bash,
                "pty": tools.pty,
                "ping": tools.ping,
            }
            if tools.has_ipython():
                contenders["ipython"] = tools.ipython
            yield contenders
        finally:
            tools.close()
            process.wait(PEER_S)


class _Tools:
    """Blocks of calls in one event loop that persists between blocks."""

    def __init__(self, runner: asyncio.Runner, sock: socket.socket) -> None:
        self._runner = runner
        self._pty_ms: list[float] = []
        self._channel, self._bash, self._ipython = runner.run(self._open(sock))

    async def _open(self, sock: socket.socket) -> tuple[Channel, Bash, IPython]:
        channel = Channel(sock)
        return channel, Bash(channel), IPython(channel)

    def bash(self) -> list[float]:
        return self._runner.run(self._bash_block())

    def pty(self) -> list[float]:
        """Return the part of the calls that `bash` has just made."""
        return self._pty_ms

    def ping(self) -> list[float]:
        return self._runner.run(self._ping_block())

    def ipython(self) -> list[float]:
        return self._runner.run(self._ipython_block())

    def has_ipython(self) -> bool:
        return self._runner.run(self._ipython.run(CELL)).interpreter == "ipython"

    def close(self) -> None:
        self._runner.run(self._close())

    async def _close(self) -> None:
        self._channel.close()

    async def _bash_block(self) -> list[float]:
        times, self._pty_ms = [], []
        for _ in range(BLOCK):
            began = time.perf_counter()
            result = await self._bash.run(COMMAND)
            times.append((time.perf_counter() - began) * 1e3)
            self._pty_ms.append(result.seconds * 1e3)
            assert (result.output, result.exit_code) == ("hi\n", 0)
        return times

    async def _ping_block(self) -> list[float]:
        times = []
        for _ in range(BLOCK):
            began = time.perf_counter()
            await self._channel.call("ping", timeout_s=PEER_S)
            times.append((time.perf_counter() - began) * 1e3)
        return times

    async def _ipython_block(self) -> list[float]:
        times = []
        for _ in range(BLOCK):
            began = time.perf_counter()
            result = await self._ipython.run(CELL)
            times.append((time.perf_counter() - began) * 1e3)
            assert result.result == "2"
        return times


def _spawn() -> None:
    done = subprocess.run(
        ["bash", "--norc", "-c", COMMAND], capture_output=True, check=True, stdin=subprocess.DEVNULL
    )
    assert done.stdout == b"hi\n"


@contextlib.contextmanager
def _tmux() -> Iterator[Contender]:
    """Start a separate tmux server on a private socket.

    Raises FileNotFoundError where tmux is not installed.
    """
    if shutil.which("tmux") is None:
        raise FileNotFoundError("tmux is not installed: `apt-get install tmux`")
    with tempfile.TemporaryDirectory() as folder:
        tmux = ["tmux", "-S", f"{folder}/socket", "-f", "/dev/null"]

        def run(*arguments: str) -> None:
            subprocess.run(
                [*tmux, *arguments], check=True, stdin=subprocess.DEVNULL, timeout=PEER_S
            )

        def call() -> None:
            run("send-keys", "-t", "s", f"{COMMAND}; {' '.join(tmux)} wait-for -S done", "Enter")
            run("wait-for", "done")

        run("new-session", "-d", "-s", "s", "-x", "160", "-y", "50", "bash --norc --noprofile")
        try:
            yield lambda: _timed(call)
        finally:
            run("kill-server")


@contextlib.contextmanager
def _jupyter() -> Iterator[Contender]:
    """Start a kernel.

    Raises FileNotFoundError where jupyter_client or ipykernel is not installed.
    """
    if any(importlib.util.find_spec(name) is None for name in ("jupyter_client", "ipykernel")):
        raise FileNotFoundError(
            "jupyter_client and ipykernel are not installed: `pip install ipykernel`"
        )
    manager_of = importlib.import_module("jupyter_client.manager")
    with open(os.devnull, "w") as nowhere:
        manager, client = manager_of.start_new_kernel(
            startup_timeout=PEER_S, stdout=nowhere, stderr=nowhere
        )
        results: list[str] = []

        def keep(message: dict[str, Any]) -> None:
            if message["msg_type"] == "execute_result":
                results.append(message["content"]["data"]["text/plain"])

        def call() -> None:
            results.clear()
            client.execute_interactive(CELL, allow_stdin=False, timeout=PEER_S, output_hook=keep)
            assert results == ["2"]

        try:
            yield lambda: _timed(call)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
