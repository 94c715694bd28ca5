"""The predictor of the live world: executes the core's commands about lengths, in a
process of its own.

Invariants: nothing here blocks, and nobody waits for an answer; a question is answered
at most once, by one `PredictionReady` with a finite number. A predictor that dies,
talks nonsense or is silent for too long is started again, a bounded number of times,
with nothing harvested; then predictions stop, and the core goes on with its last ones.
"""

import asyncio
import contextlib
import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from rollweave.io.child import spawn
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.commands import FitPredictor, Harvest, Predict, Warn
from rollweave.schema.errors import WireError
from rollweave.schema.events import PredictionReady
from rollweave.schema.prediction import (
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

QUESTIONS = 1024
"""Questions that may wait for an answer; more are dropped.

A predictor that far behind would answer too late.
"""

WORDS = 16_384
"""Words of any kind that may wait to be taken; more are dropped: two batches of
trajectories that end while it hangs.
"""

SILENT_S = 600.0
"""Seconds that a predictor may leave words waiting before it is killed: the longest fit
takes minutes (Heddle §4.1).
"""

RESTARTS = 3
"""Restarts in one life of a run.

Predictions are worth little while it learns anew, and worth nothing if it dies of them.
"""

LATENCIES = 4096
"""Newest answers of which the 99th percentile is taken: forty are beyond it."""

JOIN_S = 5.0
"""Seconds that a predictor in a thread has to finish what it computes."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment of its process: cores belong to engines and trainer."""

_decode = decoder_of(PredictorReport)


class Link(Protocol):
    """The way to one predictor.

    Reports come until the loss, which comes once; none comes after `kill`.
    """

    def send(self, word: PredictorMessage) -> None:
        """Queue one word."""

    def kill(self) -> None:
        """End it now; its loss follows."""

    async def joined(self) -> None:
        """Return once it has ended."""


OpenLink = Callable[[Callable[[PredictorReport], None], Callable[[str], None]], Link]
"""Starts a predictor: (on_report, on_lost) → the way to it.

Both are called on the event loop. Raises OSError.
"""


def in_process(
    spec: PredictorSpec, *, log: Path, module: str = "rollweave.runtime.entrypoints.predictor"
) -> OpenLink:
    """As a child process, `python -m module`."""
    return lambda on_report, on_lost: ProcessLink(spec, log, module, on_report, on_lost)


def in_thread(spec: PredictorSpec) -> OpenLink:
    """In a thread of this process: for debugging, and for tests."""
    return lambda on_report, on_lost: ThreadLink(spec, on_report, on_lost)


class ProcessLink:
    """`Link` to a child process, which takes a `PredictorSpec` as its first frame."""

    def __init__(
        self,
        spec: PredictorSpec,
        log: Path,
        module: str,
        on_report: Callable[[PredictorReport], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._child = spawn(
            name="predictor",
            module=module,
            log=log,
            env=ONE_THREAD,
            on_frame=lambda payload: on_report(_decode(payload)),
            on_gone=on_lost,
        )
        self._child.send(encode(spec))

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, word: PredictorMessage) -> None:
        self._child.send(encode(word))

    def kill(self) -> None:
        self._child.kill()

    async def joined(self) -> None:
        await self._child.gone()


class ThreadLink:
    """`Link` to a daemon thread.

    After `kill` its reports are ignored, even while it still computes.
    """

    def __init__(
        self,
        spec: PredictorSpec,
        on_report: Callable[[PredictorReport], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_report, self._on_lost = on_report, on_lost
        self._killed = False
        self._words: queue.SimpleQueue[PredictorMessage] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._main, args=(spec,), name="predictor", daemon=True
        )
        self._thread.start()

    def send(self, word: PredictorMessage) -> None:
        self._words.put(word)

    def kill(self) -> None:
        if not self._killed:
            self._killed = True
            self._words.put(StopPredictor())
            self._loop.call_soon(self._on_lost, "killed")

    async def joined(self) -> None:
        await asyncio.to_thread(self._thread.join, JOIN_S)

    def _main(self, spec: PredictorSpec) -> None:
        reason = "ended"
        try:
            from rollweave.runtime.entrypoints.predictor import (
                serve,  # scikit-learn stays out of a controller that does not need it
            )

            serve(spec, self._words, lambda report: self._call(lambda: self._on_report(report)))
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
        self._call(lambda: self._on_lost(reason))

    def _call(self, deliver: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(lambda: None if self._killed else deliver())


class _Asked(NamedTuple):
    command: Predict
    at: float


class PredictorSeat:
    """The run's predictor.

    `open_link` starts one; `warned` is told when it is lost, and what was done about
    it.
    """

    def __init__(
        self,
        open_link: OpenLink,
        *,
        post: Callable[[PredictionReady], None],
        warned: Callable[[Warn], None],
        silent_s: float = SILENT_S,
    ) -> None:
        self._open_link, self._post, self._warned, self._silent_s = (
            open_link,
            post,
            warned,
            silent_s,
        )
        self._loop = asyncio.get_running_loop()
        self._link: Link | None = None
        self._closed = False
        # questions without an answer, by the number of their word
        self._open: dict[int, _Asked] = {}
        self._sent = self._taken = 0  # words to the predictor that lives now
        self._patience: asyncio.TimerHandle | None = None
        self._silent = ""
        self._seconds: deque[float] = deque(maxlen=LATENCIES)
        self._seconds_sum = 0.0
        self._stats = PredictorStats()
        self._before = PredictorStats()  # of predictors that are gone

    def start(self) -> None:
        """Begin in the background: what is asked before it is ready waits like
        everything else.
        """
        self._begin()

    def predict(self, command: Predict, context: LengthContext) -> None:
        """Ask about `context`, which is the command's with what the world knows. →
        PredictionReady, perhaps.
        """
        if self._link is None or len(self._open) >= QUESTIONS or self._waiting >= WORDS:
            self._count(dropped=1)
            return
        self._count(asked=1)
        number = self._sent + 1
        self._open[number] = _Asked(command, self._loop.time())
        self._say(
            PredictionRequest(
                number=number,
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                context=context,
            )
        )

    def harvest(self, command: Harvest) -> None:
        """An attempt is over."""
        self._tell(
            RecordLength(
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                output_tokens=command.output_tokens,
            )
        )

    def fit(self, command: FitPredictor) -> None:
        """A step is trained."""
        del command
        self._tell(Fit())

    def stats(self) -> PredictorStats:
        """Over this life of the run."""
        if not self._seconds:
            return self._stats
        ranked = sorted(self._seconds)
        return msgspec.structs.replace(
            self._stats,
            mean_ms=1e3 * self._seconds_sum / self._stats.answered,
            p99_ms=1e3 * ranked[math.ceil(0.99 * len(ranked)) - 1],
        )

    async def close(self) -> None:
        """End it. There is nothing that it could save."""
        self._closed = True
        link = self._link
        if link is not None:
            link.kill()
            await link.joined()

    @property
    def _waiting(self) -> int:
        return self._sent - self._taken

    def _begin(self) -> None:
        self._sent = self._taken = 0
        try:
            self._link = self._open_link(self._reported, self._lost)
        except OSError as error:
            self._warn(f"cannot be started: {error}; lengths are not predicted any more")

    def _tell(self, word: PredictorMessage) -> None:
        if self._link is None or self._waiting >= WORDS:
            self._count(dropped=1)
        else:
            self._say(word)

    def _say(self, word: PredictorMessage) -> None:
        assert self._link is not None, "checked by whoever asks"
        self._sent += 1
        if self._patience is None:
            self._patience = self._loop.call_later(self._silent_s, self._gave_no_sign)
        self._link.send(word)

    def _reported(self, report: PredictorReport) -> None:
        if self._closed:
            return
        if not self._taken <= report.processed <= self._sent:
            raise WireError(
                f"report.processed must be from {self._taken} to {self._sent}, got "
                f"{report.processed}"
            )
        self._taken = report.processed
        self._rest()
        if self._waiting > 0:
            self._patience = self._loop.call_later(self._silent_s, self._gave_no_sign)
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
            asked = self._open.pop(answer.number, None)
            if asked is not None:
                self._answered(asked, now - asked.at, answer.remaining_tokens)
        while self._open and next(iter(self._open)) <= report.processed:
            self._open.pop(next(iter(self._open)))
            self._count(lost=1)

    def _answered(self, asked: _Asked, seconds: float, remaining_tokens: float) -> None:
        self._count(answered=1)
        self._seconds.append(seconds)
        self._seconds_sum += seconds
        command = asked.command
        self._post(
            PredictionReady(
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                turn=command.turn,
                remaining_tokens=remaining_tokens,
            )
        )

    def _gave_no_sign(self) -> None:
        self._patience = None
        if self._link is not None:
            self._silent = f"said nothing for {self._silent_s:g} s, "
            self._link.kill()

    def _lost(self, reason: str) -> None:
        self._link = None
        self._rest()
        reason, self._silent = self._silent + reason, ""
        self._count(lost=len(self._open))
        self._open.clear()
        self._before = self._stats = msgspec.structs.replace(self._stats, pairs=0)
        if self._closed:
            return
        if self._stats.restarts >= RESTARTS:
            self._warn(
                f"{reason}; it was started again {RESTARTS} times: lengths are not "
                "predicted any more"
            )
            return
        self._count(restarts=1)
        self._warn(
            f"{reason}; started again ({self._stats.restarts} of {RESTARTS} times), with "
            "nothing harvested"
        )
        self._begin()

    def _rest(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _warn(self, message: str) -> None:
        self._warned(Warn(component="predictor", message=message))

    def _count(self, **more: int) -> None:
        self._stats = msgspec.structs.replace(
            self._stats,
            **{name: getattr(self._stats, name) + count for name, count in more.items()},
        )
