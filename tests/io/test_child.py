"""An abandoned child is ended and reaped, and its side of the connection does not wait
for a parent that does not read.
"""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollweave.io.child import Child, spawn
from rollweave.io.parent import Outbox, Parent
from rollweave.io.wire import FrameDecoder
from tests.support.processes import process_state

ROOT = Path(__file__).parents[2]


def start(tmp_path: Path, *arguments: str) -> Child:
    return spawn(
        name="sleeper",
        module="tests.engine.clients.sleeper",
        log=tmp_path / "log",
        env={},
        on_frame=lambda _: None,
        on_gone=lambda _: None,
        arguments=arguments,
    )


def assert_reaped(pid: int) -> None:
    """No zombie is left either."""
    gc.collect()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)


@pytest.mark.extended
def test_an_unreferenced_child_ends_with_its_event_loop(tmp_path: Path) -> None:
    async def main() -> int:
        return start(tmp_path).pid

    assert_reaped(asyncio.run(main()))


def test_a_loop_may_end_while_a_child_is_reaped(tmp_path: Path) -> None:
    async def main() -> int:
        child = start(tmp_path)
        child.kill()
        await asyncio.sleep(0)  # the reaper begins, and is cancelled with the loop
        return child.pid

    assert_reaped(asyncio.run(main()))


async def test_the_children_of_a_killed_child_end_with_it(tmp_path: Path) -> None:
    child, log = start(tmp_path, "with a child"), tmp_path / "log"
    await asyncio.to_thread(until, lambda: log.exists() and "\n" in log.read_text())
    grandchild = int(log.read_text())
    child.kill()
    await child.gone()
    await asyncio.to_thread(until, lambda: process_state(grandchild)[0] in ("Z", "gone"))


PARENT = """
import asyncio, sys
from pathlib import Path
from rollweave.io.child import spawn

async def main():
    log = Path(sys.argv[1])
    child = spawn(name="one", module=sys.argv[2], log=log, env={}, on_frame=print, on_gone=print)
    print(child.pid, flush=True)
    await child.gone()

asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [True, False])
def test_a_child_that_is_still_importing_ends_with_its_parent(
    tmp_path: Path, stopped: bool
) -> None:
    """The child also ends if it is stopped and could not notice the end of its
    socket.
    """
    log = tmp_path / "log"
    command = [sys.executable, "-c", PARENT, str(log), "tests.engine.clients.endless_import"]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as parent,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(parent.kill)
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        _, began = process_state(child)
        until(lambda: log.exists() and "importing" in log.read_text())
        if stopped:
            os.kill(child, signal.SIGSTOP)
            until(lambda: process_state(child)[0] == "T")
        parent.kill()

    def over() -> bool:
        state, start = process_state(child)
        return state == "Z" or start != began

    until(over)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_outbox_does_not_wait_for_a_parent_that_does_not_read() -> None:
    ours, theirs = socket.socketpair()
    payloads = [bytes([number]) * (1 << 20) for number in range(16)]
    parent = Parent(theirs.detach())
    with ours, parent._socket:
        outbox = Outbox(parent)
        for payload in payloads:
            outbox.send(payload)  # far more than a socket holds
        decoder, received = FrameDecoder(), list[bytes]()
        while len(received) < len(payloads):
            received += decoder.feed(ours.recv(1 << 20))
        assert received == payloads
        outbox.close()
