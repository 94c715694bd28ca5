"""Waiting for pipes and a child's end at once, and keeping the two ends of what comes.

Python 3.9, stdlib alone.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from .background import BackgroundReader
from .calls import Deadline, Stop

Answer = TypeVar("Answer")

CHUNK_BYTES = 1 << 16
"""Read at once: what a pipe holds."""

PIPE_BYTES = 1 << 20
"""The most that a pipe or terminal can hold: read at an end, so that a grandchild which
goes on writing keeps nobody.
"""

STEP_BYTES = 1 << 20
"""Read before time is looked at again."""

BETWEEN_BYTES = 1 << 16
"""OutputBuffer of what comes between two calls: its end."""

BUSY_S = 5.0
"""For a call whose caller has left to end: all its stages."""

STAGE_S = 1.0
"""For a command to end after it was interrupted, and again after it was killed: time to
tidy up.
"""

BLIND_MS = 20.0
"""Between looks whether a program has ended, where the system has no pidfd."""


class Child(Protocol):
    """A process that we started: a `subprocess.Popen`, or a fork."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def wait(self) -> int:
        """Reap it."""


def has_ended(process: Child) -> bool:
    """Has a child of ours ended? It is not reaped, so that its number stays its own."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class Watch:
    """Calls a handler for each descriptor that is ready.

    `ended`: the child has; `stopped`: the call should stop.
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
        """Unknown descriptors are ignored."""
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def has(self, fd: int) -> bool:
        return fd in self._handlers

    @contextlib.contextmanager
    def until(self, stop: Stop) -> Iterator[None]:
        """Within, `stopped` tells whether the call should stop."""
        self.stopped = False
        self.on(stop.fd, lambda: self._stop(stop))
        try:
            yield
        finally:
            self.off(stop.fd)

    def wait(self, left_ms: float) -> None:
        """Wait until something is ready, or the time is up, and handle it."""
        blind = self._pidfd < 0
        for fd, _ in self._poll.poll(min(left_ms, BLIND_MS) if blind else left_ms):
            handler = self._handlers.get(fd)  # an earlier handler may have taken it off
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
        """Bytes that are in neither."""
        return self._seen - len(self._head) - len(self.tail)


def read_some(fd: int, kept: OutputBuffer, most: int) -> bool:
    """Read what is there without blocking, until `most` bytes have come.

    False at the end of the stream.
    """
    while most > 0:
        try:
            data = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        kept.feed(data)
        most -= len(data)
    return True


class Outbox:
    """Writes into a pipe or socket as it takes it. Nobody minds if it is not read."""

    def __init__(self, watch: Watch, fd: int, sent: Callable[[], object] = lambda: None) -> None:
        os.set_blocking(fd, False)
        self._watch, self._fd, self._sent = watch, fd, sent
        self._unsent = memoryview(b"")

    def send(self, data: bytes) -> None:
        """Replaces what was not sent yet.

        `sent` is called when all is, or nobody will read it.
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
        except (BrokenPipeError, ConnectionResetError):  # the watch tells of the reader's end
            self._unsent = self._unsent[:0]
        if not self._unsent:
            self._watch.off(self._fd)
            self._sent()


class Tap:
    """A descriptor that is read for the call that runs, and between calls for itself,
    so that nobody blocks on it.
    """

    def __init__(self, fd: int, idle: BackgroundReader) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._idle = idle
        self._lock = threading.Lock()
        self._between = self._kept = OutputBuffer(0, BETWEEN_BYTES)
        self._resting = False

    def open(self, kept: OutputBuffer) -> None:
        """A call begins: what came since the last one is the first that it gets."""
        self._idle.unwatch(self.fd)
        with self._lock:
            self._resting = False
            kept.feed(self._between.tail)
            self._between, self._kept = OutputBuffer(0, BETWEEN_BYTES), kept

    def read(self) -> bool:
        """What is there, or a part of it if that is much; False at the end of the
        stream. To be called during a call.
        """
        return read_some(self.fd, self._kept, STEP_BYTES)

    def rest(self) -> None:
        """The call is over: what was written before is its own, what comes now is not."""
        read_some(self.fd, self._kept, PIPE_BYTES)
        with self._lock:
            self._kept, self._resting = self._between, True
        self._idle.watch(self.fd, self._trickle)

    def close(self) -> None:
        """The last that was written goes to the call that runs."""
        read_some(self.fd, self._kept, PIPE_BYTES)
        os.close(self.fd)

    def _trickle(self) -> None:
        with self._lock:
            if self._resting and not read_some(self.fd, self._between, STEP_BYTES):
                self._idle.unwatch(self.fd)


def converse(
    watch: Watch,
    found: Callable[[], Answer | None],
    deadline: Deadline,
    stop: Stop,
    stages: list[Callable[[], None]],
) -> tuple[Answer | None, bool]:
    """Wait for an answer; where time runs out, go through `stages`, each of which has
    `STAGE_S` to bring it about.

    The answer, or None where the child has ended or no stage is left; and whether time
    ran out.
    """
    timed_out = False
    with watch.until(stop):
        while (answer := found()) is None and not watch.ended:
            watch.wait(deadline.left_ms)
            if deadline.past or watch.stopped:
                timed_out, watch.stopped = True, False
                if not stages:
                    break
                stages.pop(0)()
                deadline = Deadline(STAGE_S)
    return answer, timed_out
