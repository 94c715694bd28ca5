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
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollweave.io.boot import ORPHANED
from rollweave.io.child import TAIL_BYTES, Child, spawn, status_text, why_it_ended
from rollweave.io.parent import Outbox, Parent
from rollweave.io.wire import FrameDecoder, Seal, frame
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


def test_the_end_of_a_process_is_described(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert why_it_ended(0, log) == "ended (exit status 0)"
    log.write_bytes(b"left out\n" + b"\xff" + b"\n" + b"x" * (TAIL_BYTES - 3) + b"\n")
    tail = f"\N{REPLACEMENT CHARACTER}\n{'x' * (TAIL_BYTES - 3)}"
    reason = f"killed (signal SIGKILL); end of {log}:\n{tail}"
    assert why_it_ended(-9, log, "killed") == reason
    assert [*map(status_text, (1, -1, -99))] == ["exit status 1", "signal SIGHUP", "signal 99"]


async def test_a_child_answers_and_its_end_is_told_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "echoes.py").write_text(
        "import os, sys\n"
        "from rollweave.io.parent import Parent\n"
        "parent = Parent.from_arguments()\n"
        "parent.send_all([parent.receive(), os.environ['OWN'].encode(), sys.argv[3].encode()])\n"
        "print(parent.receive().decode(), file=sys.stderr)\n"
        "sys.exit(3)\n"
    )
    frames, gone, log = asyncio.Queue[bytes](), list[str](), tmp_path / "logs" / "log"
    child = spawn(
        name="echo",
        module="echoes",
        log=log,
        env={"OWN": "own", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        on_frame=frames.put_nowait,
        on_gone=gone.append,
        arguments=("argument",),
    )
    child.send(b"one")
    assert [await frames.get() for _ in range(3)] == [b"one", b"own", b"argument"]
    child.send(b"farewell")
    await child.gone()
    child.kill()  # has no effect
    assert gone == [f"ended (exit status 3); end of {log}:\nfarewell"]


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
    assert child._frames.closed
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


@pytest.mark.parametrize("sealed", [True, False])
def test_a_parent_sends_and_receives_frames_in_order(
    monkeypatch: pytest.MonkeyPatch, sealed: bool
) -> None:
    """What was received before a thread listens comes first; the end of the connection
    ends the process.
    """
    exits = list[int]()

    def leave(status: int) -> None:
        exits.append(status)
        if status == ORPHANED:
            raise SystemExit

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr("rollweave.io.parent.FRAME_BYTES", len(b"three"))
    ours, theirs = socket.socketpair()
    keys = (b"a" * 32, b"b" * 32)
    seal, other = (Seal(*keys), Seal(*keys[::-1])) if sealed else (None, None)
    parent = Parent(theirs.detach(), other)
    with ours, parent._socket:

        def write(*payloads: bytes) -> None:
            for payload in payloads:
                ours.sendall(b"".join(frame(payload, seal.code(payload) if seal else b"")))

        write(b"one", b"two", b"three")
        assert parent.receive() == b"one"
        frames = parent.queue()
        assert [frames.get(timeout=30), frames.get(timeout=30)] == [b"two", b"three"]
        write(b"four")
        assert frames.get(timeout=30) == b"four"
        parent.send(b"answer")
        received = FrameDecoder().feed(ours.recv(1000))
        assert [seal.opened(each) if seal else each for each in received] == [b"answer"]
        ours.shutdown(socket.SHUT_WR)
        for thread in [each for each in threading.enumerate() if each.name == "parent"]:
            thread.join()
        assert exits == [ORPHANED, 1]


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
