"""math-verify in processes that can be ended: says whether an answer is mathematically
equal to the expected answer.

Invariants: no answer benefits from making the judge fail: an answer that exceeds the
limits of processor time or memory, or ends the judge's process twice, counts as wrong,
and the verdict says why; a failure that the answer does not cause (no process, a busy
machine, an expected answer that cannot be read in time) is a `RewardError`, never a
verdict. No verdict is computed on an event loop.
"""

import asyncio
import atexit
import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from concurrent.futures import Future
from typing import IO, Any

from rollweave.envs.base import Score
from rollweave.envs.handlers.math_worker import TOO_LONG
from rollweave.io.child import status_text
from rollweave.schema.base import Struct
from rollweave.schema.errors import RewardError

COMMAND = (sys.executable, "-P", "-m", "rollweave.envs.handlers.math_worker")
"""Command of a judge's process, without the working directory on its import path."""

JUDGES = min(4, os.cpu_count() or 1)
"""Maximum number of judges' processes that this process starts; each takes about 100
MB.
"""

WAITING = 1024
"""Maximum number of answers that wait for a judge."""

WAIT_S = 50.0
"""Maximum seconds that an answer waits for its verdict: below the default of
`tasks.step_s`, so that this error is reported instead of an exceeded `step_s`.
"""

START_S = 60.0
"""Maximum seconds in which a judge's process must import its libraries."""

ANSWER_S = 40.0
"""Maximum seconds of one verdict. The process bounds its own processor time, so only a
process that gets no processor time reaches this limit.
"""

CONTROL = "0"
"""An answer that is judged after a failure of another answer, to show whether the other
answer alone is to blame.
"""

INHERITED = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "TMPDIR")
"""Environment variables of a judge's process; it needs no tokens."""

TAIL_BYTES = 500
"""Maximum bytes of a judge's output that an error quotes."""


_NO_VERDICT = f"the judge of mathematics had no verdict within {WAIT_S:g} s"


class Verdict(Struct, frozen=True, kw_only=True):
    """The result of a comparison. `reason` says why an answer was not compared."""

    equal: bool
    reason: str = ""

    @property
    def score(self) -> Score:
        """The score of an answer: 1 for the expected one, else 0."""
        return Score(reward=float(self.equal), success=self.equal, reason=self.reason)


def judge(given: str, expected: str) -> Verdict:
    """Return whether math-verify accepts the answer as the expected one, and block this
    thread until then. Raises RewardError.
    """
    verdict = _shared.pool.submit(given, expected)
    try:
        return verdict.result(WAIT_S)
    except TimeoutError:
        verdict.cancel()
        raise RewardError(_NO_VERDICT) from None


async def judged(given: str, expected: str) -> Verdict:
    """Return the verdict of `judge` without blocking the event loop. Raises
    RewardError.
    """
    try:
        async with asyncio.timeout(WAIT_S):
            return await asyncio.wrap_future(_shared.pool.submit(given, expected))
    except TimeoutError:
        raise RewardError(_NO_VERDICT) from None


class _DiedError(Exception):
    """The judge's process ended by itself, with this status, while it judged an answer.
    `compared` is true if the process had read the expected answer before.
    """

    def __init__(self, status: int, tail: str, *, compared: bool) -> None:
        super().__init__(f"its judge ended ({status_text(status)}){tail and f': {tail}'}")
        self.compared, self.took_too_long = compared, status == -signal.SIGXCPU


class _Process:
    """A process that runs `math_worker`, and judges one pair of answers at a time."""

    def __init__(self) -> None:
        """Raises RewardError if the process cannot be started."""
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._received = b""
        env = {name: os.environ[name] for name in INHERITED if name in os.environ}
        env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        try:
            self._child = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**env, "PYTHONHASHSEED": "0"},
            )
        except OSError as error:
            self._log.close()
            raise RewardError(f"no process for the judge of mathematics: {error}") from error
        _shared.children.add(self._child)
        try:
            self._line(START_S)
        except _DiedError as error:
            raise RewardError(f"mathematics cannot be judged: {error}") from error

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def ask(self, given: str, expected: str) -> Verdict:
        """Return the verdict of the process. Raises _DiedError, RewardError."""
        assert self._child.stdin is not None, "it was started with pipes"
        with contextlib.suppress(OSError):  # the process has died, and will write no line
            self._child.stdin.write(json.dumps([given, expected]).encode() + b"\n")
            self._child.stdin.flush()
        if problem := self._line(ANSWER_S):
            raise _expected_error(expected, problem)
        equal, reason = self._line(ANSWER_S, compared=True)
        return Verdict(equal=equal, reason=reason)

    def close(self) -> None:
        """Kill the process. Idempotent."""
        self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout, self._log):
            with contextlib.suppress(OSError):  # for what could not be written
                stream.close()  # type: ignore[union-attr]

    def _line(self, within_s: float, *, compared: bool = False) -> Any:
        """Return the next line of the process. A process without a line is closed.
        Raises _DiedError, RewardError.
        """
        assert self._child.stdout is not None, "it was started with pipes"
        poll, deadline = select.poll(), time.monotonic() + within_s
        poll.register(self._child.stdout, select.POLLIN)
        while b"\n" not in self._received:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                self.close()
                raise RewardError(f"the judge of mathematics was silent for {within_s:g} s")
            data = os.read(self._child.stdout.fileno(), 1 << 16)
            if not data:
                error = _DiedError(self._child.wait(), self._tail(), compared=compared)
                self.close()
                raise error
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def _tail(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - TAIL_BYTES))
        return self._log.read().decode(errors="replace").strip()


class _Judge:
    """A judge, whose process is replaced when it has ended."""

    def __init__(self) -> None:
        self._process: _Process | None = None

    def verdict(self, given: str, expected: str) -> Verdict:
        """Return the verdict about a pair. Raises RewardError for a failure that the
        answer does not cause.
        """
        try:
            verdict = self._repeated(given, expected)
            control = self._ask(CONTROL, expected) if verdict.reason else verdict
        except _DiedError as died:
            raise _expected_error(expected, str(died)) from died
        if control.reason:  # no answer can be compared with the expected one
            raise _expected_error(expected, control.reason)
        return verdict

    def _repeated(self, given: str, expected: str) -> Verdict:
        """Ask once more if the process dies. Raises _DiedError if it dies twice before
        the answer is compared.
        """
        for last in (False, True):
            try:
                return self._ask(given, expected)
            except _DiedError as died:
                if died.compared and died.took_too_long:
                    return Verdict(equal=False, reason=TOO_LONG)
                if last and not died.compared:
                    raise
        return Verdict(equal=False, reason="the answer ended its judge twice")

    def _ask(self, given: str, expected: str) -> Verdict:
        if self._process is not None and not self._process.alive:
            self._process.close()
            self._process = None
        self._process = self._process or _Process()
        return self._process.ask(given, expected)


class _Pool:
    """The judges of this process, each on a thread, and their queue."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[str, str, Future[Verdict]]] = queue.Queue(WAITING)
        self._lock = threading.Lock()
        self._judges = self._free = 0

    def submit(self, given: str, expected: str) -> "Future[Verdict]":
        """Queue a pair. Raises RewardError if too many wait."""
        verdict: Future[Verdict] = Future()
        try:
            self._waiting.put_nowait((given, expected, verdict))
        except queue.Full:
            raise RewardError(f"more than {WAITING} answers wait for the judges") from None
        with self._lock:
            if self._free < self._waiting.qsize() and self._judges < JUDGES:
                self._judges += 1
                threading.Thread(target=self._work, name="math judge", daemon=True).start()
        return verdict

    def _work(self) -> None:
        judge = _Judge()
        while True:
            with self._lock:
                self._free += 1
            given, expected, verdict = self._waiting.get()
            with self._lock:
                self._free -= 1
            if not verdict.set_running_or_notify_cancel():
                continue
            try:
                verdict.set_result(judge.verdict(given, expected))
            except BaseException as error:
                verdict.set_exception(error)


def _expected_error(expected: str, problem: str) -> RewardError:
    return RewardError(f"the expected answer {expected!r:.80} cannot be judged: {problem}")


class _Shared:
    """The pool of this process, and the processes that it has started."""

    def __init__(self) -> None:
        self.reset()
        # A forked process has no threads, and must not use the processes of its parent.
        os.register_at_fork(after_in_child=self.reset)
        atexit.register(self.kill)

    def reset(self) -> None:
        self.pool = _Pool()
        self.children = weakref.WeakSet[subprocess.Popen[bytes]]()

    def kill(self) -> None:
        """End all processes immediately; without this call they end after their
        answers.
        """
        for child in list(self.children):
            child.kill()


_shared = _Shared()
