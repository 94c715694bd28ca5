"""The link to the process of one rollout worker, on this host or another: it sends
commands, and receives reports.

Invariants: those of `runtime/links/process.py`; no report is delivered after the loss.
Silence is measured as in `runtime/links/relay.py`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rollweave.io.child import Spawn
from rollweave.io.wire import decoder_of, encode
from rollweave.runtime.links.process import Link, ProcessLink
from rollweave.schema.errors import RollweaveError
from rollweave.schema.rollouts import (
    BEAT_S,
    RolloutWorkerCommand,
    StopRolloutWorker,
    WorkerReady,
    WorkerReport,
    WorkerSpec,
)

SILENT_S = 30.0
"""Seconds without a heartbeat after which a worker counts as lost, and is killed:
longer than code of an environment should ever block the event loop.
"""

CLOSE_S = 8.0
"""Maximum time for a worker to end its attempts and sandboxes, in seconds."""

_decode = decoder_of(WorkerReport)


class RolloutWorkerLostError(RollweaveError):
    """The worker's process has ended, or was killed because it was silent."""


class WorkerLink(Link, Protocol):
    """The link to one worker."""

    @property
    def failure(self) -> Exception | None:
        """The exception that the handling of a report raised; the worker was then
        killed.
        """

    async def ready(self) -> WorkerReady:
        """Wait until the worker takes attempts. Raises `RolloutWorkerLostError`."""

    def send(self, command: RolloutWorkerCommand) -> None:
        """Send a command, in order. It is dropped if the worker is gone."""


OnReport = Callable[[WorkerReport], None]


class ProcessWorker(ProcessLink[WorkerReady]):
    """`WorkerLink` to a process, whose first frame is a `WorkerSpec`."""

    def __init__(
        self,
        spec: WorkerSpec,
        on_report: OnReport,
        *,
        spawn: Spawn,
        log: Path,
        start_s: float,
        silent_s: float | None = None,
    ) -> None:
        super().__init__(
            "worker",
            spec.id,
            spec,
            spawn=spawn,
            log=log,
            start_s=start_s,
            stop=StopRolloutWorker(),
            close_s=CLOSE_S,
            lost_error=RolloutWorkerLostError,
        )
        self._on_report = on_report
        self._silent_s = silent_s if silent_s is not None else SILENT_S
        self.failure: Exception | None = None
        self._missed = 0
        """Number of missed heartbeats in a row."""
        self._received = False
        """True if a frame has arrived since the last tick."""

    def send(self, command: RolloutWorkerCommand) -> None:
        if not self.lost.done():
            self._child.send(encode(command))

    def _on_frame(self, payload: bytes) -> None:
        self._received = True
        report = _decode(payload)
        if isinstance(report, WorkerReady):
            self._timer.cancel()
            self._tick()
            if not self._ready.done():
                self._ready.set_result(report)
            return
        try:
            self._on_report(report)
        except Exception as error:
            self.failure = self.failure or error
            self._give_up(f"sent a report that cannot be handled: {error}")

    def _tick(self) -> None:
        """Count a missed heartbeat, unless a frame has arrived since the last tick."""
        self._missed = 0 if self._received else self._missed + 1
        self._received = False
        if self._missed * BEAT_S >= self._silent_s:
            self._give_up(f"sent nothing for {self._silent_s:g} s")
            return
        self._timer = self._loop.call_later(BEAT_S, self._tick)
