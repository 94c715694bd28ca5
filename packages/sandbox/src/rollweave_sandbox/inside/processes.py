"""Starts programs, passes them input, bounds their output and time, and kills them by
process group. Needs Python 3.9 and its standard library alone.

Invariants: each program leads a separate session; every wait has a deadline; after a
program has ended, a grandchild that keeps an inherited pipe open delays nothing; output
beyond the bound is read and discarded.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import IO, Any

from .frames import BODY_BYTES, DEFAULT_LIMIT, Call, Refused, Result
from .streams import (
    CHUNK_BYTES,
    PIPE_BYTES,
    Child,
    Outbox,
    OutputBuffer,
    Watch,
    has_ended,
    read_some,
)

_alive: dict[int, Child] = {}
_guard = threading.Lock()


def reset_signals() -> None:
    """Reset signals as `rollweave.io.boot` does, so that no program that is
    started here inherits an ignored or blocked signal.

    The interpreter itself ignores SIGPIPE and SIGXFSZ; `subprocess` restores these.
    """
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def start(argv: list[str], **how: Any) -> subprocess.Popen[bytes]:
    """Start a program in a new session, and register it for `kill_all` until `end`."""
    with _guard:
        process = subprocess.Popen(argv, start_new_session=True, **how)
        _alive[process.pid] = process
    return process


def fork(become: Callable[[], object]) -> Child:
    """Fork this process into a new session, where `become` is called and the fork then
    ends; register the fork as `start` does.

    The fork lacks our other threads, and locks that they held stay locked. `become`
    must need neither the threads nor the locks.
    """
    with _guard:
        pid = os.fork()
        if not pid:
            try:
                os.setsid()
                become()
            finally:
                os._exit(1)
        process = _alive[pid] = Forked(pid)
    return process


class Forked:
    """A forked process, with the interface of `subprocess.Popen` that is used here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def end(process: Child) -> int:
    """Kill a program's process group unless the program has ended, and reap it.

    Returns its exit status.
    """
    with _guard:
        _alive.pop(process.pid, None)
        if not has_ended(process):
            signal_group(process.pid, signal.SIGKILL)
    return process.wait()


def end_session(process: Child) -> int:
    """Kill and reap a program, and kill the rest of its session, such as background
    jobs.

    Returns its exit status.
    """
    signal_group(process.pid, signal.SIGKILL)
    for pid in _session(process.pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return end(process)


def signal_group(group: int, number: int) -> None:
    """Send a signal to a process group, if it exists.

    While its leader is an unreaped child of ours, its number cannot be reused.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def kill_all() -> None:
    """Kill every program that was started and has not ended."""
    with _guard:
        for process in _alive.values():
            signal_group(process.pid, signal.SIGKILL)
            for pid in _session(process.pid):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)


def _session(leader: int) -> list[int]:
    """Return the processes in the session of `leader`. The session is field 6 of
    /proc/PID/stat, after a name that may contain any bytes.
    """
    pids: list[int] = []
    entries: list[str] = []
    with contextlib.suppress(OSError):  # /proc may be missing
        entries = os.listdir("/proc")
    for entry in entries:
        if entry.isdigit():
            with (
                contextlib.suppress(OSError, IndexError),
                open(f"/proc/{entry}/stat", "rb") as file,
            ):
                if int(file.read().rpartition(b")")[2].split()[3]) == leader:
                    pids.append(int(entry))
    return pids


def execute(call: Call) -> Result:
    """`exec`: run `argv` in `cwd`, with `env` added to our environment and the body as
    standard input; kill it after `timeout_s`.

    The body of the reply is `split` bytes of standard output, then standard error, each
    truncated after `output_limit` bytes.
    """
    argv, cwd, env = call.texts("argv"), call.optional("cwd"), call.mapping("env")
    if not argv:
        raise Refused("argv must have at least a program, got []")
    limit = call.integer("output_limit", DEFAULT_LIMIT, most=BODY_BYTES // 2)
    deadline = call.deadline()
    pipe = subprocess.PIPE
    process = start(
        argv,
        cwd=cwd,
        env=None if env is None else {**os.environ, **env},
        stdin=pipe if call.body else subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
    )
    out, err = OutputBuffer(limit), OutputBuffer(limit)
    watch = Watch(process)
    try:
        with watch.until(call.stop):
            reads = [
                _gather(watch, stream, output)
                for stream, output in ((process.stdout, out), (process.stderr, err))
            ]
            if process.stdin is not None:
                Outbox(watch, process.stdin.fileno(), process.stdin.close).send(call.body)
            while not (watch.ended or watch.stopped or deadline.past):
                watch.wait(deadline.left_ms)
            seconds = deadline.spent_s
    finally:
        status = end(process)
        for read in reads:
            read(PIPE_BYTES)
        watch.close()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    return {
        "rc": status,
        "timed_out": not watch.ended,
        "truncated": bool(out.dropped or err.dropped),
        "seconds": seconds,
        "split": len(out.head),
    }, out.head + err.head


def _gather(watch: Watch, stream: IO[bytes] | None, output: OutputBuffer) -> Callable[[int], None]:
    """Read a pipe whenever it is readable. Return a function that reads the available
    data, up to a number of bytes.
    """
    assert stream is not None
    fd = stream.fileno()
    os.set_blocking(fd, False)

    def read(most: int) -> None:
        if watch.has(fd) and not read_some(fd, output, most):
            watch.off(fd)

    watch.on(fd, functools.partial(read, CHUNK_BYTES))
    return read
