"""Waiting for pipes and a child's end at the same time, and keeping the first and last
bytes of output. Between calls, the output of background jobs is read, so that no job
blocks on a full pipe. Needs Python 3.9 and its standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from .frames import BODY_BYTES, DEFAULT_LIMIT, Call, Deadline, Refused, Stop

Answer = TypeVar("Answer")
P = TypeVar("P", bound="Program")

CHUNK_BYTES = 1 << 16
"""Number of bytes in one read: the usual capacity of a pipe."""

PIPE_BYTES = 1 << 20
"""Maximum capacity of a pipe or terminal in bytes. No more bytes are read after a
command's end, so that a grandchild that keeps writing delays nothing.
"""

STEP_BYTES = 1 << 20
"""Maximum number of bytes read before the deadline is checked again."""

BETWEEN_BYTES = 1 << 16
"""Maximum number of bytes that are kept of the output between two calls. The last bytes
are kept.
"""

BUSY_S = 5.0
"""Maximum seconds until a cancelled call has ended, with all its stages."""

STAGE_S = 1.0
"""Seconds that a command has to end after it was interrupted, so that it can clean up.
It has as many seconds again after it was killed.
"""

BLIND_MS = 20.0
"""Milliseconds between checks for a program's end on systems without pidfd."""


class Child(Protocol):
    """A child process: a `subprocess.Popen`, or a fork."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def wait(self) -> int:
        """Reap the process; return its exit status."""


def has_ended(process: Child) -> bool:
    """Return whether a child of ours has ended. The child is not reaped, so that its
    number is not reused.
    """
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class Watch:
    """Calls a handler for each descriptor that is ready.

    `ended` says that the child has ended, `stopped` that the call was cancelled.
    """

    def __init__(self, process: Child) -> None:
        self.ended = self.stopped = False
        self._process = process
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except (AttributeError, OSError):  # an old Python or kernel, or a seccomp filter
            self._pidfd = -1
        else:
            self.on(self._pidfd, self._end)

    def on(self, fd: int, handler: Callable[[], object], events: int = select.POLLIN) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, events)

    def off(self, fd: int) -> None:
        """Stop watching `fd`; an unknown descriptor is ignored."""
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def has(self, fd: int) -> bool:
        return fd in self._handlers

    @contextlib.contextmanager
    def until(self, stop: Stop) -> Iterator[None]:
        """Set `stopped` in this context once the call is cancelled."""
        self.stopped = False
        self.on(stop.fd, lambda: self._stop(stop))
        try:
            yield
        finally:
            self.off(stop.fd)

    def wait(self, left_ms: float) -> None:
        """Wait until a descriptor is ready or the time is up, and call its handler."""
        blind = self._pidfd < 0
        for fd, _ in self._poll.poll(min(left_ms, BLIND_MS) if blind else left_ms):
            handler = self._handlers.get(fd)  # an earlier handler may have removed it
            if handler is not None:
                handler()
        if blind and has_ended(self._process):
            self.ended = True

    def close(self) -> None:
        if self._pidfd >= 0:
            self.off(self._pidfd)
            os.close(self._pidfd)

    def _end(self) -> None:
        self.ended = True

    def _stop(self, stop: Stop) -> None:
        self.stopped = True
        self.off(stop.fd)


class OutputBuffer:
    """The first `head` and the last `tail` bytes of a stream."""

    def __init__(self, head: int, tail: int = 0) -> None:
        self._head_limit, self._tail_limit = head, tail
        self._head = bytearray()
        self._tail = bytearray()
        self._seen = 0

    def feed(self, data: bytes) -> None:
        self._seen += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data and self._tail_limit:
            self._tail += data
            if len(self._tail) > 2 * self._tail_limit + CHUNK_BYTES:
                del self._tail[: -self._tail_limit]

    @property
    def head(self) -> bytes:
        return bytes(self._head)

    @property
    def tail(self) -> bytes:
        return bytes(self._tail[-self._tail_limit :]) if self._tail_limit else b""

    @property
    def dropped(self) -> int:
        """Number of bytes that are neither in the head nor in the tail."""
        return self._seen - len(self._head) - len(self.tail)


def read_some(fd: int, output: OutputBuffer, most: int) -> bool:
    """Read the available data without blocking, until `most` bytes are read.

    Returns False at the end of the stream.
    """
    while most > 0:
        try:
            data = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        output.feed(data)
        most -= len(data)
    return True


class Outbox:
    """Writes into a pipe or socket without blocking; unread data is no error."""

    def __init__(self, watch: Watch, fd: int, sent: Callable[[], object] = lambda: None) -> None:
        os.set_blocking(fd, False)
        self._watch, self._fd, self._sent = watch, fd, sent
        self._unsent = memoryview(b"")

    def send(self, data: bytes) -> None:
        """Send `data` instead of any unsent data.

        `sent` is called when all data is sent, or the reader is gone.
        """
        self._unsent = memoryview(data)
        self._write()
        if self._unsent:
            self._watch.on(self._fd, self._write, select.POLLOUT)

    def _write(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._fd, self._unsent) :]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):  # the watch detects the reader's end
            self._unsent = self._unsent[:0]
        if not self._unsent:
            self._watch.off(self._fd)
            self._sent()


class TappedStream:
    """A descriptor that is read for the current call and, between calls, in the
    background, so that no writer blocks on it.
    """

    def __init__(self, fd: int, idle: BackgroundReader) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._idle = idle
        self._lock = threading.Lock()
        self._between = self._current = OutputBuffer(0, BETWEEN_BYTES)
        self._resting = False

    def open(self, output: OutputBuffer) -> None:
        """Begin a call, whose output starts with the data since the last call."""
        self._idle.unwatch(self.fd)
        with self._lock:
            self._resting = False
            output.feed(self._between.tail)
            self._between, self._current = OutputBuffer(0, BETWEEN_BYTES), output

    def read(self) -> bool:
        """Read available data, at most `STEP_BYTES`, during a call. Returns False at
        the end of the stream.
        """
        return read_some(self.fd, self._current, STEP_BYTES)

    def rest(self) -> None:
        """End the call: data written so far belongs to this call, later data to the
        next call.
        """
        read_some(self.fd, self._current, PIPE_BYTES)
        with self._lock:
            self._current, self._resting = self._between, True
        self._idle.watch(self.fd, self._trickle)

    def close(self) -> None:
        """Read the remaining data for the current call, and close."""
        read_some(self.fd, self._current, PIPE_BYTES)
        os.close(self.fd)

    def _trickle(self) -> None:
        with self._lock:
            if self._resting and not read_some(self.fd, self._between, STEP_BYTES):
                self._idle.unwatch(self.fd)


def converse(
    watch: Watch,
    poll_answer: Callable[[], Answer | None],
    deadline: Deadline,
    stop: Stop,
    stages: list[Callable[[], None]],
    stage_s: float = STAGE_S,
) -> tuple[Answer | None, bool]:
    """Wait for an answer. When time runs out, run the `stages` one after another. Each
    stage has `stage_s` seconds to cause an answer.

    Returns the answer, or None if the child has ended or no stage is left; and whether
    time ran out.
    """
    timed_out = False
    with watch.until(stop):
        while (answer := poll_answer()) is None and not watch.ended:
            watch.wait(deadline.left_ms)
            if deadline.past or watch.stopped:
                timed_out, watch.stopped = True, False
                if not stages:
                    break
                stages.pop(0)()
                deadline = Deadline(stage_s)
    return answer, timed_out


class BackgroundReader:
    """File descriptors, each with a function that is called when the descriptor is
    readable.

    `watch` and `unwatch` may be called while another thread waits.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, read: Callable[[], None]) -> None:
        """Have the waiting thread call `read`, which must not block, whenever `fd` is
        readable.
        """
        self._readers[fd] = read
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`; an unknown descriptor is ignored.

        A call of `read` on another thread may still be running afterwards.
        """
        if self._readers.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def wait(self, fd: int) -> None:
        """Read the other descriptors until the watched `fd` is readable."""
        while True:
            happened = self._epoll.poll()
            for ready, _ in happened:
                read = self._readers.get(ready)
                if read is not None:
                    read()
            if any(ready == fd for ready, _ in happened):
                return


class Program(Protocol):
    """A program that persists from call to call, such as a shell."""

    @property
    def process(self) -> Child: ...

    @property
    def tap(self) -> TappedStream: ...

    def run(
        self, text: bytes, output: OutputBuffer, deadline: Deadline, stop: Stop
    ) -> tuple[Any, bool]:
        """Return the program's answer to `text`, or None if the program has ended or
        must be ended; and whether the call ran out of time.
        """

    def end(self) -> int:
        """Kill the program, and return its exit status."""


class Ran(Generic[P]):
    """The result of a call: the program's answer or, if the call ended the program, the
    exit status; the common fields of a reply, and its body.
    """

    def __init__(
        self, program: P, answer: Any, status: int | None, fields: dict[str, Any], body: bytes
    ) -> None:
        self.program, self.answer, self.status = program, answer, status
        self.fields, self.body = fields, body


class Session(Generic[P]):
    """The calls of one program, which take turns. A program that has ended is replaced
    at the next call.
    """

    def __init__(self, start: Callable[[Stop], P], busy: str) -> None:
        """`start` starts the program; `busy` is the error of a call whose turn does not
        come.
        """
        self._start, self._busy = start, busy
        self._turn = threading.Lock()
        self._program: P | None = None

    def run(self, call: Call) -> Ran[P]:
        """Run the body of the call. The body of the reply is the first `split` bytes of
        the output, then the last bytes, with `dropped` bytes left out between them.

        `restarted` says that the program's state was lost, before this call or by it.
        """
        limit = call.integer("output_limit", DEFAULT_LIMIT, most=BODY_BYTES // 2)
        if not self._turn.acquire(timeout=BUSY_S):
            raise Refused(self._busy)
        try:
            output = OutputBuffer(limit - limit // 2, limit // 2)
            lost = self._retire(output)
            if self._program is None:
                self._program = self._start(call.stop)
            program, status = self._program, None
            deadline = call.deadline()  # the start does not count as the call's time
            answer, timed_out = program.run(call.body, output, deadline, call.stop)
            if answer is None:
                status, lost = program.end(), True
                self._program = None
        finally:
            self._turn.release()
        fields = {
            "timed_out": timed_out,
            "restarted": lost,
            "dropped": output.dropped,
            "seconds": deadline.spent_s,
            "split": len(output.head),
        }
        return Ran(program, answer, status, fields, output.head + output.tail)

    def _retire(self, output: OutputBuffer) -> bool:
        """Discard a program that has died since the last call, and put its last output
        at the start of this call's output. Return whether it had died.
        """
        if self._program is None or not has_ended(self._program.process):
            return False
        self._program.tap.open(output)
        self._program.end()
        self._program = None
        return True
