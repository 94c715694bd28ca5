"""Run the predictor of lengths in a child process, and execute the core's commands
about it.

Invariants: nothing here blocks, and no component needs a prediction; a request is
answered at most once, by one `PredictionReady` with a finite number. A predictor that
dies, sends an invalid report or is silent for too long is restarted, without its
observations, a bounded number of times. After that predictions stop, and the core keeps
its last ones.
"""

import asyncio
import contextlib
import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from rollweave.io.child import spawn
from rollweave.io.wire import decoder_of, encode
from rollweave.runtime.supervisors.supervisor import Link, Supervised, Supervisor
from rollweave.runtime.tasks import Tasks
from rollweave.schema.commands import FitPredictor, Harvest, Predict, Warn
from rollweave.schema.errors import WireError
from rollweave.schema.events import PredictionReady
from rollweave.schema.training import (
    Fit,
    LengthContext,
    PredictionRequest,
    PredictorMessage,
    PredictorReport,
    PredictorSpec,
    PredictorStats,
    RecordLength,
    StopPredictor,
)

MAX_REQUESTS = 1024
"""Maximum number of unanswered requests; more are dropped.

A predictor that far behind would answer too late.
"""

MAX_MESSAGES = 16_384
"""Maximum number of unprocessed messages of any kind; more are dropped.

A hung predictor may leave two batches of ended trajectories unprocessed.
"""

SILENT_S = 600.0
"""Seconds without a report, while messages wait, after which the predictor is killed:
the longest fit takes minutes (Heddle §4.1).
"""

MAX_RESTARTS = 3
"""Maximum number of restarts in one life of a run.

Predictions are worth little until a new predictor is fitted, and nothing if it keeps
dying.
"""

LATENCIES = 4096
"""Number of newest answers of which the 99th percentile is taken: forty lie beyond
it.
"""

JOIN_S = 5.0
"""Maximum time for a predictor in a thread to finish what it computes, in seconds."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment of the process: the cores belong to engines and trainer."""

_decode = decoder_of(PredictorReport)


class PredictorLink(Link, Protocol):
    """The connection to one predictor. No report follows `kill` or the loss."""

    def send(self, message: PredictorMessage) -> None:
        """Queue one message."""


OpenPredictor = Callable[[Callable[[PredictorReport], None]], PredictorLink]
"""Start a predictor whose reports go to the callback, on the event loop.

Raises OSError.
"""


class ProcessPredictor:
    """`PredictorLink` to a child process, `python -m module`, whose first frame is a
    `PredictorSpec`.
    """

    def __init__(
        self,
        spec: PredictorSpec,
        on_report: Callable[[PredictorReport], None],
        *,
        log: Path,
        module: str = "rollweave.runtime.entrypoints.predictor",
    ) -> None:
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._child = spawn(
            name="predictor",
            module=module,
            log=log,
            env=ONE_THREAD,
            on_frame=lambda payload: on_report(_decode(payload)),
            on_gone=self.lost.set_result,
        )
        self._child.send(encode(spec))

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, message: PredictorMessage) -> None:
        self._child.send(encode(message))

    def kill(self) -> None:
        self._child.kill()

    async def close(self) -> None:
        """Kill the process, which has nothing to save, and wait for its end."""
        self._child.kill()
        await self._child.gone()


class ThreadPredictor:
    """`PredictorLink` to a daemon thread, for debugging and tests.

    After `kill` its reports are ignored, even while it still computes.
    """

    def __init__(self, spec: PredictorSpec, on_report: Callable[[PredictorReport], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = self._loop.create_future()
        self._on_report = on_report
        self._messages: queue.SimpleQueue[PredictorMessage] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._main, args=(spec,), name="predictor", daemon=True
        )
        self._thread.start()

    def send(self, message: PredictorMessage) -> None:
        self._messages.put(message)

    def kill(self) -> None:
        if not self.lost.done():
            self._messages.put(StopPredictor())
            self.lost.set_result("killed")

    async def close(self) -> None:
        self.kill()
        await asyncio.to_thread(self._thread.join, JOIN_S)

    def _main(self, spec: PredictorSpec) -> None:
        reason = "ended"
        try:
            # scikit-learn stays out of a controller that does not need it
            from rollweave.runtime.entrypoints.predictor import serve

            serve(spec, self._messages, lambda report: self._call(self._on_report, report))
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
        self._call(self.lost.set_result, reason)

    def _call(self, deliver: Callable[..., None], argument: object) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(lambda: None if self.lost.done() else deliver(argument))


class _Request(NamedTuple):
    command: Predict
    sent_at: float


@dataclass(slots=True, eq=False, kw_only=True)
class PredictorProcess(Supervised[PredictorLink]):
    """One epoch of the predictor."""

    unsent: list[PredictorMessage] = field(default_factory=list)
    """Messages that wait for the process's start."""


class PredictorSupervisor(Supervisor[PredictorProcess, None]):
    """The predictor of a run.

    `open_predictor` starts a process; `warn` receives each loss and its consequence.
    """

    def __init__(
        self,
        open_predictor: OpenPredictor,
        *,
        tasks: Tasks,
        post: Callable[[PredictionReady], None],
        warn: Callable[[Warn], None],
        silent_s: float = SILENT_S,
    ) -> None:
        super().__init__(tasks)
        self._open, self._post, self._warn = open_predictor, post, warn
        self.silent_s = silent_s
        self._loop = asyncio.get_running_loop()
        self._process: PredictorProcess | None = None
        """The process to send to; None before `start`, after `close` and without
        restarts left.
        """
        self._requests: dict[int, _Request] = {}
        """Unanswered requests, by the number of their message."""
        self._sent = self._processed = 0
        """Numbers of messages to the current process."""
        self._timeout: asyncio.TimerHandle | None = None
        self._silence = ""
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._latency_sum = 0.0
        self._stats = PredictorStats()
        self._before = PredictorStats()
        """Statistics of former processes."""

    def start(self) -> None:
        """Start the predictor in the background; messages wait until it is ready."""
        self._begin_epoch(0)

    def predict(self, command: Predict, context: LengthContext) -> None:
        """Ask for a prediction in `context`: the command's, completed by the world.

        Answered by `PredictionReady`, or not at all.
        """
        if len(self._requests) >= MAX_REQUESTS or not self._accepts():
            self._count(dropped=1)
            return
        self._count(requests=1)
        number = self._sent + 1
        self._requests[number] = _Request(command, self._loop.time())
        self._send(
            PredictionRequest(
                number=number,
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                context=context,
            )
        )

    def harvest(self, command: Harvest) -> None:
        """Pass the length of an ended attempt on."""
        self._send_or_drop(
            RecordLength(
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                output_tokens=command.output_tokens,
            )
        )

    def fit(self, command: FitPredictor) -> None:
        """Fit the predictor, after a training step."""
        del command
        self._send_or_drop(Fit())

    def stats(self) -> PredictorStats:
        """Return the statistics of this life of the run."""
        if not self._latencies:
            return self._stats
        ranked = sorted(self._latencies)
        return msgspec.structs.replace(
            self._stats,
            mean_ms=1e3 * self._latency_sum / self._stats.answered,
            p99_ms=1e3 * ranked[math.ceil(0.99 * len(ranked)) - 1],
        )

    async def close(self) -> None:
        """End the predictor, which has nothing to save."""
        self._process = None
        self._stop_timeout()
        await super().close()

    def _begin_epoch(self, epoch: int) -> None:
        self._sent = self._processed = 0
        self._process = PredictorProcess(name="predictor", epoch=epoch)
        self._begin(self._process)

    async def _start(self, process: PredictorProcess) -> None:
        process.link = self._open(self._on_report)
        for message in process.unsent:
            process.link.send(message)
        process.unsent.clear()

    def _accepts(self) -> bool:
        return self._process is not None and self._unprocessed < MAX_MESSAGES

    @property
    def _unprocessed(self) -> int:
        return self._sent - self._processed

    def _send_or_drop(self, message: PredictorMessage) -> None:
        if self._accepts():
            self._send(message)
        else:
            self._count(dropped=1)

    def _send(self, message: PredictorMessage) -> None:
        assert self._process is not None, "the caller checks it"
        self._sent += 1
        if self._timeout is None:
            self._timeout = self._loop.call_later(self.silent_s, self._on_silence)
        if self._process.link is None:
            self._process.unsent.append(message)
        else:
            self._process.link.send(message)

    def _on_report(self, report: PredictorReport) -> None:
        if self._process is None:
            return
        if not self._processed <= report.processed <= self._sent:
            raise WireError(
                f"report.processed must be from {self._processed} to {self._sent}, got "
                f"{report.processed}"
            )
        self._processed = report.processed
        self._stop_timeout()
        if self._unprocessed > 0:
            self._timeout = self._loop.call_later(self.silent_s, self._on_silence)
        now, before = self._loop.time(), self._before
        self._stats = msgspec.structs.replace(
            self._stats,
            failed=before.failed + report.failed,
            fits=before.fits + report.fits,
            fit_s=before.fit_s + report.fit_s,
            pairs=report.pairs,
        )
        for answer in report.answers:
            if not math.isfinite(answer.remaining_tokens):
                continue
            request = self._requests.pop(answer.number, None)
            if request is not None:
                self._on_answer(request, now - request.sent_at, answer.remaining_tokens)
        while self._requests and next(iter(self._requests)) <= report.processed:
            self._requests.pop(next(iter(self._requests)))
            self._count(lost=1)

    def _on_answer(self, request: _Request, seconds: float, remaining_tokens: float) -> None:
        self._count(answered=1)
        self._latencies.append(seconds)
        self._latency_sum += seconds
        command = request.command
        self._post(
            PredictionReady(
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                turn=command.turn,
                remaining_tokens=remaining_tokens,
            )
        )

    def _on_silence(self) -> None:
        self._timeout = None
        if self._process is not None and self._process.link is not None:
            self._silence = f"no report for {self.silent_s:g} s, "
            self._process.link.kill()

    def _on_lost(self, process: PredictorProcess, error: Exception | str) -> None:
        self._process = None
        self._stop_timeout()
        reason, self._silence = f"{self._silence}{error}", ""
        self._count(lost=len(self._requests))
        self._requests.clear()
        self._before = self._stats = msgspec.structs.replace(self._stats, pairs=0)
        if isinstance(error, OSError):
            self._report_loss(f"cannot be started: {reason}; lengths are no longer predicted")
            return
        if self._stats.restarts >= MAX_RESTARTS:
            self._report_loss(
                f"{reason}; it was restarted {MAX_RESTARTS} times: lengths are no longer predicted"
            )
            return
        self._count(restarts=1)
        self._report_loss(
            f"{reason}; restarted ({self._stats.restarts} of {MAX_RESTARTS} times), without "
            "its observations"
        )
        self._begin_epoch(process.epoch + 1)

    def _stop_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    def _report_loss(self, message: str) -> None:
        self._warn(Warn(component="predictor", message=message))

    def _count(self, **more: int) -> None:
        self._stats = msgspec.structs.replace(
            self._stats,
            **{name: getattr(self._stats, name) + count for name, count in more.items()},
        )
