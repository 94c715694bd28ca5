"""Programs that are started, fed, bounded and, in time, killed by their process group. Python 3.9, stdlib alone.

Invariants: a program is a session of its own; no wait is without a deadline; what a grandchild does with an inherited pipe
keeps nobody waiting once the program itself has ended; output beyond the bound is read and thrown away.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

from .calls import DEFAULT_LIMIT, Call, Refused, Result
from .frames import BODY_BYTES

CHUNK_BYTES = 1 << 16
"""Read at once: what a pipe holds."""

LEFTOVER_BYTES = 1 << 20
"""Read after a program has ended: the most that a pipe can hold, so that a grandchild that goes on writing ends nothing."""

BLIND_MS = 20.0
"""Between looks whether a program has ended, where the system has no pidfd."""

_alive: dict[int, subprocess.Popen[bytes]] = {}
_guard = threading.Lock()


@contextlib.contextmanager
def started(argv: list[str], **how: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A program in a session of its own, which `kill_all` knows; at the end its process group is killed unless it has ended."""
    with _guard:
        process = subprocess.Popen(argv, start_new_session=True, **how)
        _alive[process.pid] = process
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> int:
    """Kill the process group of a program that has not ended, and reap it. Its exit status."""
    with _guard:
        if process.returncode is None and process.poll() is None:
            kill_group(process.pid)
        _alive.pop(process.pid, None)
    return process.wait()


def kill_group(pid: int) -> None:
    """SIGKILL to the process group that an unreaped child of ours leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def kill_all() -> None:
    """Kill every program that was started and has not ended."""
    with _guard:
        for process in _alive.values():
            if process.returncode is None:
                kill_group(process.pid)


class Exit:
    """When a child ends: `fd` is readable then, or -1 where the system cannot say; then look every `slice_ms`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        try:
            self.fd = os.pidfd_open(process.pid)
        except (AttributeError, OSError):
            self.fd = -1

    def slice_ms(self, left_ms: float) -> float:
        return left_ms if self.fd >= 0 else min(left_ms, BLIND_MS)

    def known(self) -> bool:
        """Has it ended?"""
        return self._process.poll() is not None

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Kept:
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


def execute(call: Call) -> Result:
    """`exec`: run `argv` in `cwd`, with `env` added to ours and the body as standard input; the body of the reply is `split`
    bytes of standard output, then standard error, each cut after `output_limit` bytes. After `timeout_s` it is killed."""
    argv, cwd, env = call.texts("argv"), call.optional("cwd"), call.mapping("env")
    if not argv:
        raise Refused("argv must have at least a program, got []")
    limit = call.integer("output_limit", DEFAULT_LIMIT, most=BODY_BYTES // 2)
    deadline = call.deadline()
    pipe = subprocess.PIPE
    with started(
        argv,
        cwd=cwd,
        env=None if env is None else {**os.environ, **env},
        stdin=pipe if call.body else subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
    ) as process:
        run = _Run(process, call, limit)
        timed_out = False
        try:
            while not run.ended:
                if deadline.past or run.stopped:
                    timed_out = True
                    break
                run.step(deadline.left_ms)
            seconds = deadline.spent_s
            status = end(process)
            run.leftovers()
        finally:
            run.close()
    out, err = run.out, run.err
    return {
        "rc": status,
        "timed_out": timed_out,
        "truncated": bool(out.dropped or err.dropped),
        "seconds": seconds,
        "split": len(out.head),
    }, out.head + err.head


class _Run:
    """The pipes of one program. `Popen` closes nothing by itself: `close` does."""

    def __init__(self, process: subprocess.Popen[bytes], call: Call, limit: int) -> None:
        self.out, self.err = Kept(limit), Kept(limit)
        self.ended = self.stopped = False
        self._process, self._stop = process, call.stop.fd
        self._exit = Exit(process)
        self._unsent = memoryview(call.body)
        self._poll = select.poll()
        self._readers = {_pipe(process.stdout): self.out, _pipe(process.stderr): self.err}
        self._stdin = None if process.stdin is None else _pipe(process.stdin)
        for fd in self._readers:
            self._poll.register(fd, select.POLLIN)
        if self._stdin is not None:
            self._poll.register(self._stdin, select.POLLOUT)
        self._poll.register(self._stop, select.POLLIN)
        if self._exit.fd >= 0:
            self._poll.register(self._exit.fd, select.POLLIN)

    def step(self, left_ms: float) -> None:
        """Wait for something to happen, and deal with it."""
        happened = self._poll.poll(self._exit.slice_ms(left_ms))
        for fd, _ in happened:
            if fd in self._readers:
                self._read(fd)
            elif fd == self._stdin:
                self._feed()
        fds = {fd for fd, _ in happened}
        self.stopped = self._stop in fds
        if self._exit.fd in fds or self._exit.fd < 0:
            self.ended = self._exit.known()

    def leftovers(self) -> None:
        """What the program wrote before it ended; nobody waits for a grandchild that holds the pipe."""
        for fd in list(self._readers):
            left = LEFTOVER_BYTES
            while left > 0 and (count := self._read(fd)):
                left -= count

    def close(self) -> None:
        self._exit.close()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _read(self, fd: int) -> int:
        kept = self._readers.get(fd)
        if kept is None:
            return 0
        try:
            data = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return 0
        if data:
            kept.feed(data)
        else:
            self._poll.unregister(fd)
            del self._readers[fd]
        return len(data)

    def _feed(self) -> None:
        assert self._stdin is not None
        assert self._process.stdin is not None
        try:
            self._unsent = self._unsent[os.write(self._stdin, self._unsent[:CHUNK_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it reads no more, which is its own affair
            self._unsent = self._unsent[:0]
        if not self._unsent:
            self._poll.unregister(self._stdin)
            self._stdin = None
            self._process.stdin.close()


def _pipe(stream: Any | None) -> int:
    """The descriptor of our end of a pipe, which never blocks."""
    assert stream is not None
    fd: int = stream.fileno()
    os.set_blocking(fd, False)
    return fd
