"""The parent's side of a child process: frames over an inherited socket pair, a log
file for its output, and a handle to kill it.

Invariants: the child ends when the parent ends in any way (`io/boot`, and end of file
on the socket); `on_gone` is called exactly once, after the process is reaped, with its
exit status and the tail of its log, and no frame is delivered afterwards. This module
does not interpret the frames.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired

from rollweave.io.boot import COMMAND
from rollweave.io.wire import FrameDecoder, frame
from rollweave.schema.errors import WireError

EXIT_S = 2.0
"""Seconds that a child's interpreter has to shut down after its socket ends, before it
is killed.
"""

TAIL_BYTES = 2000
"""Maximum bytes of the log that an error quotes: the last frames of a traceback."""

RECEIVE_BYTES = 1 << 18
"""Maximum number of bytes read from the socket at once."""

UNREAD_BYTES = 1 << 30
"""Maximum number of bytes queued for a child that does not read: more than any batch,
less than memory.
"""

_spawned: "weakref.WeakSet[Popen[bytes]]" = weakref.WeakSet()


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
        self._socket = ours
        self._log = log
        self._on_frame, self._on_gone = on_frame, on_gone
        self._decoder = FrameDecoder()
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._error = ""
        self._closed = False
        self._gone = asyncio.Event()
        self._reaper: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        # A child that is garbage collected, or whose event loop ends, leaves no
        # process.
        weakref.finalize(self, _forget, process, ours)
        ours.setblocking(False)
        self._loop.add_reader(ours, self._readable)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, payload: bytes) -> None:
        """Queue one frame, which is sent with all others of this turn of the event
        loop.

        It is dropped if the child is gone.
        """
        if self._closed:
            return
        if not self._unsent:
            self._loop.call_soon(self._flush)
        for piece in frame(payload):
            self._unsent.append(memoryview(piece))
            self._unsent_bytes += len(piece)
        if self._unsent_bytes > UNREAD_BYTES:
            self._fail(f"does not read: more than {UNREAD_BYTES} bytes wait")

    def kill(self) -> None:
        """Send SIGKILL at once. `on_gone` follows."""
        if not self._gone.is_set():
            self._fail("killed")

    async def gone(self) -> None:
        """Return once the process is reaped and `on_gone` was called."""
        await self._gone.wait()

    def _readable(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close()
            return
        try:
            for payload in self._decoder.feed(data):
                if not self._closed:
                    self._on_frame(payload)
        except WireError as error:
            self._fail(f"sent an invalid frame: {error}")

    def _flush(self) -> None:
        if not self._closed:
            self._writable()

    def _writable(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.sendmsg(list(itertools.islice(self._unsent, 64)))
                self._unsent_bytes -= sent
                while sent:
                    piece = self._unsent.popleft()
                    if sent < len(piece):
                        self._unsent.appendleft(piece[sent:])
                    sent -= min(sent, len(piece))
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._writable)
            return
        except OSError:
            self._close()  # the reader would detect the end, too, but later
            return
        self._loop.remove_writer(self._socket)

    def _fail(self, error: str) -> None:
        self._error = self._error or error
        self._process.kill()
        self._close()

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._unsent.clear()
        self._reaper = self._loop.create_task(self._reap(), name=f"reap {self.name}")

    async def _reap(self) -> None:
        """Wait for the process on a thread, which does not block the loop and works on
        every system.
        """
        try:
            status = await asyncio.to_thread(self._wait)
        finally:
            _end(self._process)  # the task may have been cancelled before the thread began
        reason = f"{self._error or 'ended'} ({_status(status)})"
        tail = log_tail(self._log)
        try:
            self._on_gone(f"{reason}; end of {self._log}:\n{tail}" if tail else reason)
        finally:
            self._gone.set()

    def _wait(self) -> int:
        try:
            return self._process.wait(EXIT_S)
        except TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _end(process: "Popen[bytes]") -> None:
    """Kill and reap a process unless it is reaped; a killed process ends at once."""
    if process.returncode is None:
        process.kill()
        process.wait()


def kill_all() -> None:
    """Kill every child and its process group, because this process ends at once.

    May be called from any thread.
    """
    for process in list(_spawned):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                # it leads a group because of `start_new_session`
                os.killpg(process.pid, signal.SIGKILL)


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
    """Start `-m module <socket fd> <our pid> *arguments` by `io/boot`. Its output is
    appended to `log`.

    `env` is added to our environment. The callbacks run on the event loop. Raises
    OSError if no process can be made.
    """
    ours, theirs = socket.socketpair()
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("ab") as output, theirs:
            process = Popen(
                [*COMMAND, "-m", module, str(theirs.fileno()), str(os.getpid()), *arguments],
                stdin=DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    **env,
                },
            )
    except BaseException:
        ours.close()
        raise
    _spawned.add(process)
    return Child(name, process, ours, log, on_frame, on_gone)


def log_tail(log: Path) -> str:
    """Return the last lines of a log, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""


def _status(returncode: int) -> str:
    if returncode >= 0:
        return f"exit status {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"signal {-returncode}"
