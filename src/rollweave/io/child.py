"""The parent's side of a child process: frames over an inherited socket pair, a log
file for its output, and a handle to kill it.

Invariants: the child ends when the parent ends in any way (`io/boot`, and end of file
on the socket); `on_gone` is called exactly once, after the process is reaped, with its
exit status and the tail of its log, and no frame is delivered afterwards. This module
does not interpret the frames.
"""

import asyncio
import contextlib
import functools
import os
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from types import MappingProxyType
from typing import IO, Protocol

from rollweave.io.boot import COMMAND
from rollweave.io.framing import FramedSocket
from rollweave.io.wire import Seal
from rollweave.schema.text import visible

EXIT_S = 2.0
"""Seconds that a child's interpreter has to shut down after its socket ends, before it
is killed.
"""

TAIL_BYTES = 2000
"""Maximum bytes of the log that an error quotes: the last frames of a traceback."""

_spawned: "weakref.WeakSet[Popen[bytes]]" = weakref.WeakSet()


class ChildProcess(Protocol):
    """A process that this process has started, on this host or another, and the
    connection to it.

    All calls belong to the event loop's thread; only `gone` waits.
    """

    @property
    def name(self) -> str:
        """The name of the process in logs and errors."""

    @property
    def pid(self) -> int:
        """The process id on its host; 0 while the id is not known."""

    def send(self, payload: bytes) -> None:
        """Queue one frame. It is dropped if the process is gone."""

    def kill(self) -> None:
        """Kill the process immediately. `on_gone` follows."""

    async def gone(self) -> None:
        """Return once `on_gone` was called."""


class Spawn(Protocol):
    """Starts a process of one program, on this host (`child_of`) or on another host."""

    def __call__(
        self,
        *,
        name: str,
        log: Path,
        on_frame: Callable[[bytes], None],
        on_gone: Callable[[str], None],
    ) -> ChildProcess:
        """Start the process. See `spawn`."""


class Child:
    """One child process, made by `spawn`.

    All calls belong to the event loop's thread.
    """

    def __init__(
        self,
        name: str,
        process: Popen[bytes],
        ours: socket.socket,
        log: Path,
        on_frame: Callable[[bytes], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self.name = name
        self._process = process
        self._log = log
        self._on_gone = on_gone
        self._error = ""
        self._gone = asyncio.Event()
        self._reaper: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        # A child that is garbage collected, or whose event loop ends, leaves no
        # process.
        weakref.finalize(self, _forget, process, ours)
        self._frames = FramedSocket(ours, on_frame=on_frame, on_end=self._on_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, payload: bytes) -> None:
        """Queue one frame. It is dropped if the child is gone."""
        self._frames.send(payload)

    def kill(self) -> None:
        """Send SIGKILL immediately, also to its children. `on_gone` follows."""
        if not self._gone.is_set():
            self._error = self._error or "killed"
            kill_group(self._process)
            self._frames.close()

    async def gone(self) -> None:
        """Return once the process is reaped and `on_gone` was called."""
        await self._gone.wait()

    def _on_end(self, error: str) -> None:
        if error:
            self._error = self._error or error
            kill_group(self._process)
        self._reaper = self._loop.create_task(self._reap(), name=f"reap {self.name}")

    async def _reap(self) -> None:
        try:
            status = await exit_status(self._process, within_s=EXIT_S)
        finally:
            _end(self._process)  # the task may have been cancelled before the thread began
        try:
            self._on_gone(why_it_ended(status, self._log, self._error))
        finally:
            self._gone.set()


async def exit_status(process: "Popen[bytes]", *, within_s: float | None) -> int:
    """Wait for a process and return its exit status; kill the process if it does not
    end within `within_s` seconds.

    Waits on a thread, which does not block the event loop and works on every system.
    The thread is not one of the loop's own threads, whose number is limited.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def wait() -> None:
        try:
            status = process.wait(within_s)
        except TimeoutExpired:
            kill_group(process)
            status = process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(report, status)

    def report(status: int) -> None:
        if not ended.done():
            ended.set_result(status)

    threading.Thread(target=wait, daemon=True, name=f"wait for {process.pid}").start()
    return await ended


def why_it_ended(status: int, log: Path, error: str = "") -> str:
    """Describe the end of a process by its exit status and the tail of its log."""
    reason = f"{error or 'ended'} ({status_text(status)})"
    tail = log_tail(log)
    return f"{reason}; end of {log}:\n{tail}" if tail else reason


def kill_group(process: "Popen[bytes]") -> None:
    """Kill a process that `start_process` has started, and its children. Do nothing if
    the process has ended, or is a child of the process from which this process was
    forked.
    """
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            # the process leads a group because of `start_new_session`
            os.killpg(process.pid, signal.SIGKILL)


def _end(process: "Popen[bytes]") -> None:
    """Kill and reap a process unless it is reaped. A killed process ends immediately,
    so reaping does not wait.
    """
    if process.returncode is None:
        kill_group(process)
        process.wait()


def kill_all() -> None:
    """Kill every child and its process group, because this process ends immediately.

    May be called from any thread.
    """
    for process in list(_spawned):
        kill_group(process)


def _forget(process: "Popen[bytes]", ours: socket.socket) -> None:
    ours.close()
    _end(process)


def spawn(
    *,
    name: str,
    module: str,
    log: Path,
    env: Mapping[str, str],
    on_frame: Callable[[bytes], None],
    on_gone: Callable[[str], None],
    arguments: Sequence[str] = (),
) -> Child:
    """Start `-m module <fds> <our pid> *arguments` by `io/boot`. Its output is appended
    to `log`.

    `env` is added to our environment. The callbacks run on the event loop. Raises
    OSError if no process can be made.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = start_process(theirs, module=module, log=log, env=env, arguments=arguments)
    except BaseException:
        ours.close()
        raise
    return Child(name, process, ours, log, on_frame, on_gone)


def child_of(
    module: str, *, env: Mapping[str, str] = MappingProxyType({}), arguments: Sequence[str] = ()
) -> Spawn:
    """Return a function that starts `-m module` on this host as `spawn` does."""
    return functools.partial(spawn, module=module, env=env, arguments=arguments)


def start_process(
    connection: socket.socket,
    *,
    module: str,
    log: Path,
    env: Mapping[str, str],
    arguments: Sequence[str] = (),
    seal: Seal | None = None,
) -> "Popen[bytes]":
    """Start `-m module` as `spawn` does. It inherits `connection`, which the caller
    then closes, and gets the connection's `seal`.

    Raises OSError.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as opened:
        output = opened.enter_context(log.open("ab"))
        inherited = [connection.fileno()]
        if seal is not None:  # in a pipe: command lines and environments can be read
            inherited.append(opened.enter_context(_filled_pipe(seal.state())).fileno())
        process = Popen(
            [*COMMAND, "-m", module, ",".join(map(str, inherited)), str(os.getpid()), *arguments],
            stdin=DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=inherited,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                **env,
            },
        )
    _spawned.add(process)
    return process


def _filled_pipe(content: bytes) -> IO[bytes]:
    """Return the reading end of a pipe with this content, which must be a few bytes."""
    reading, writing = os.pipe()
    with open(writing, "wb") as end:
        end.write(content)
    return open(reading, "rb")


def log_tail(log: Path) -> str:
    """Return the last lines of a log as visible text, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            return visible(file.read().decode(errors="replace").strip())
    except OSError:
        return ""


def status_text(returncode: int) -> str:
    """Describe an exit status."""
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"signal {-returncode}"
