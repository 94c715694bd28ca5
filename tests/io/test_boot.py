"""No program of the package keeps signals ignored or blocked that its parent ignored or
blocked, or passes them on.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from packages.sandbox.tests.action_server import served
from rollweave.io.child import spawn
from tests.support.sandboxes import NAMES, SPEC, opened

IGNORED = (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGTSTP,
    signal.SIGUSR1,
)
BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR2)

SHOW = ["grep", "-E", "SigBlk|SigIgn", "/proc/self/status"]


@pytest.fixture
def hostile() -> Iterator[None]:
    """Start this process as a supervisor that blocks and ignores signals does."""
    former = {number: signal.signal(number, signal.SIG_IGN) for number in IGNORED}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def sets(status: str) -> tuple[set[int], set[int]]:
    """Return the blocked and the ignored signals in lines of /proc/PID/status.

    Signals 32 and 33 do not count: glibc keeps them for itself and refuses to change
    their dispositions, so a parent that ignores them passes that on, and no Python code
    can reset it.
    """
    fields = dict(
        line.split(":") for line in status.splitlines() if line.startswith(("SigBlk", "SigIgn"))
    )
    masks = [int(fields[name], 16) for name in ("SigBlk", "SigIgn")]
    blocked, ignored = (
        {number for number in signal.valid_signals() if mask >> (number - 1) & 1} for mask in masks
    )
    return blocked, ignored


def test_reset_signals_resets_all_but_those_to_keep(hostile: None) -> None:
    code = f"""
import signal, subprocess
from rollweave.io.boot import reset_signals
reset_signals(keep=(signal.SIGHUP,))
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
subprocess.run({SHOW!r}, check=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert sets(done.stdout) == (set(), {signal.SIGHUP})


@pytest.mark.parametrize(
    "begin",
    [
        "runpy.run_module('rollweave.cli.main', run_name='__main__')",
        "from rollweave.cli.entry import main; main()",
    ],
)
def test_sigint_ends_the_command_line_however_it_was_started(hostile: None, begin: str) -> None:
    """A script runs `rollweave … &`; SIGHUP stays ignored, which is the purpose of
    `nohup`.
    """
    show = "typer.Typer.__call__ = lambda *_: print(open('/proc/self/status').read())"
    command = [sys.executable, "-c", f"import runpy, typer; {show}; {begin}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    blocked, ignored = sets(done.stdout)
    assert blocked == set()
    assert ignored & set(IGNORED) == {signal.SIGHUP}


async def test_child_processes_start_with_default_signals(hostile: None, tmp_path: Path) -> None:
    """Engines, trainers, relays, predictors and environments: all are started by
    `spawn`.
    """
    (tmp_path / "shows.py").write_text("print(open('/proc/self/status').read())\n")
    ended = asyncio.Event()
    child = spawn(
        name="shows",
        module="shows",
        log=tmp_path / "log",
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        on_frame=lambda _: None,
        on_gone=lambda _: ended.set(),
    )
    await child.gone()
    blocked, ignored = sets((tmp_path / "log").read_text())
    assert blocked == set()
    assert not ignored & set(IGNORED)


@pytest.mark.variants
@pytest.mark.parametrize("name", NAMES)
async def test_programs_in_a_sandbox_start_with_default_signals(hostile: None, name: str) -> None:
    async with opened(name) as backend:
        sandbox = await backend.start(SPEC)
        result = await sandbox.exec(SHOW)
        assert sets(result.stdout.decode()) == (set(), set())
        await sandbox.stop()


async def test_programs_of_the_inner_server_start_with_default_signals(hostile: None) -> None:
    """This also holds if no supervisor has started the server."""
    async with served() as channel:
        reply = await channel.call("exec", timeout_s=60.0, argv=SHOW)
        assert sets(reply.body.decode()) == (set(), set())
