"""`ipython`: one interpreter that persists from cell to cell, in a process that can be
killed. Needs Python 3.9 and its standard library alone.

The interpreter (`worker.py`) uses IPython if it is installed, and reports whether it
does. Its standard output and error are one pipe, which is read here, so that the output
is available even if the process has died.

Invariants: a cell has an empty standard input; when it runs out of time its process
group is interrupted, then killed, and the reply says so; messages from the interpreter
are bounded, and a message that does not answer the cell ends the interpreter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from .frames import Call, Deadline, Failed, FrameDecoder, FrameError, Refused, Result, Stop, pack
from .processes import end_session, fork, signal_group, start
from .shell import SURROUNDINGS
from .streams import (
    BackgroundReader,
    Child,
    Outbox,
    OutputBuffer,
    Session,
    TappedStream,
    Watch,
    converse,
)

START_S = 60.0
"""Maximum seconds until an interpreter has started: IPython consists of hundreds of
files, which may be read from a cold disk.
"""

INTERRUPTED_S = 4.0
"""Seconds from the interrupt of a cell to the kill of its interpreter, whose names are
then lost. The first traceback of IPython takes half a second of an idle core. Must be
less than `streams.BUSY_S`, in which a cancelled call ends.
"""

RECEIVE_BYTES = 1 << 18
"""Maximum number of bytes in one read from the socket."""

PRELOADED = "IPython.core.interactiveshell"
"""Module that, if imported before the server began, lets an interpreter start as a fork
of the server, in milliseconds instead of a third of a second.
"""

CELL_BYTES = 4 << 20
"""Maximum size of a cell in bytes."""

_PR_SET_DUMPABLE = 4


class Cells:
    """The action `ipython`, whose body is the cell."""

    def __init__(self, idle: BackgroundReader) -> None:
        self._session = Session(
            lambda stop: _Interpreter(idle, stop),
            "ipython runs one cell at a time, and one is running",
        )

    def __call__(self, call: Call) -> Result:
        """Run the cell, as `Session.run` does.

        `result` is the text of the last expression's value, or null; `error` has
        `name`, `message` and `traceback`, or is null. `died` is the exit status if the
        cell ended the interpreter (128 plus the number of a signal), else null. The
        state that may be lost is names and imports. `interpreter` is `ipython` or
        `python`.
        """
        if len(call.body) > CELL_BYTES:
            raise Refused(f"cell must have at most {CELL_BYTES} bytes, got {len(call.body)}")
        ran = self._session.run(call)
        answer = {"result": None, "error": None} if ran.answer is None else ran.answer
        kind = ran.program.kind
        return {**answer, **ran.fields, "died": ran.status, "interpreter": kind}, ran.body


class _Interpreter:
    """A process that runs `worker.py`."""

    def __init__(self, idle: BackgroundReader, stop: Stop) -> None:
        self._socket, child_socket = socket.socketpair()
        reader, writer = os.pipe()
        self.tap = TappedStream(reader, idle)
        try:
            self.process = (
                _fork(child_socket, writer)
                if PRELOADED in sys.modules
                else _spawn(child_socket, writer)
            )
        except OSError as error:
            self._socket.close()
            os.close(reader)
            raise Failed(f"python cannot be started: {error.strerror}") from error
        finally:
            child_socket.close()
            os.close(writer)
        self._watch = Watch(self.process)
        self._watch.on(reader, self._read)
        self._watch.on(self._socket.fileno(), self._listen)
        self._sending = self._socket.dup()  # a watch has one handler for each descriptor
        self._cells = Outbox(self._watch, self._sending.fileno())
        self._decoder = FrameDecoder()
        self._answers: dict[int, dict[str, Any]] = {}
        self._number = 0
        self.kind = self._start(stop)

    def _start(self, stop: Stop) -> str:
        output = OutputBuffer(4096)
        self.tap.open(output)
        hello, _ = converse(
            self._watch, lambda: self._answers.pop(0, None), Deadline(START_S), stop, []
        )
        if hello is None:
            raise Failed(
                f"python does not start: exit status {self.end()}: "
                f"{output.head.decode(errors='replace')}"
            )
        return str(hello.get("interpreter"))

    def run(
        self, cell: bytes, output: OutputBuffer, deadline: Deadline, stop: Stop
    ) -> tuple[dict[str, Any] | None, bool]:
        """Return the answer, or None if the interpreter has ended or must be ended; and
        whether the cell ran out of time.
        """
        self._number += 1
        self.tap.open(output)
        self._cells.send(pack({"id": self._number}, cell))
        answer, timed_out = converse(
            self._watch, self._find, deadline, stop, [self._interrupt], INTERRUPTED_S
        )
        if answer is not None:
            self.tap.rest()
        return answer, timed_out

    def end(self) -> int:
        """Kill the rest of the session, and close.

        Returns the exit status, or 128 plus the number of the signal that ended it.
        """
        status = end_session(self.process)
        self._watch.close()
        self.tap.close()
        self._socket.close()
        self._sending.close()
        return status if status >= 0 else 128 - status

    def _read(self) -> None:
        if not self.tap.read():
            self._watch.off(self.tap.fd)

    def _listen(self) -> None:
        """Receive answers. Kill the interpreter on invalid data and at the end of the
        stream; the watch then reports its end.
        """
        try:
            data = os.read(self._socket.fileno(), RECEIVE_BYTES)
            self._decoder.feed(data)
            while (frame := self._decoder.take()) is not None:
                self._answers[frame[0]["id"]] = frame[0]
                if len(self._answers) > 1:
                    raise FrameError("more than one answer")
        except (ConnectionResetError, FrameError):
            data = b""
        if not data:
            self._watch.off(self._socket.fileno())
            signal_group(self.process.pid, signal.SIGKILL)

    def _find(self) -> dict[str, Any] | None:
        answer = self._answers.pop(self._number, None)
        if answer is None:
            return None
        return {"result": answer.get("result"), "error": answer.get("error")}

    def _interrupt(self) -> None:
        signal_group(self.process.pid, signal.SIGINT)
        signal_group(self.process.pid, signal.SIGCONT)


def _spawn(sock: socket.socket, output: int) -> Child:
    return start(
        [
            sys.executable,
            os.path.dirname(os.path.abspath(__file__)),
            "--cells",
            "--fd",
            str(sock.fileno()),
        ],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(sock.fileno(),),
        env={**os.environ, **SURROUNDINGS},
    )


def _show() -> None:
    """Make the interpreter's files in /proc readable again, unlike the server's, since
    the interpreter runs the agent's own code.
    """
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def _fork(sock: socket.socket, output: int) -> Child:
    def become() -> None:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for fd in map(int, os.listdir("/proc/self/fd")):  # most importantly the channel
            if fd > 2 and fd != sock.fileno():
                with contextlib.suppress(OSError):
                    os.close(fd)
        os.environ.update(SURROUNDINGS)
        _show()
        from .worker import serve

        serve(sock)

    return fork(become)
