"""The link to one rollout worker, which runs in a process, on this host or another: it
sends commands, and receives reports.

Invariants: `ready` raises once the worker is lost; `lost` is done, with the reason, after
death, silence, `kill` and `close` alike, and only once the process is reaped; no report
is delivered afterwards. Silence is measured as in `runtime/links/relay.py`.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from rollweave.io.child import Spawn
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.errors import RollweaveError
from rollweave.schema.rollouts import (
    BEAT_S,
    StopRolloutWorker,
    WorkerBeat,
    WorkerMessage,
    WorkerReady,
    WorkerReport,
    WorkerSpec,
)

SILENT_S = 30.0
"""Seconds without a heartbeat after which a worker counts as lost, and is killed: more
than asynchronous code of an environment may reasonably block the event loop.
"""

CLOSE_S = 8.0
"""Maximum time for a worker to end its attempts and sandboxes, in seconds."""

_decode = decoder_of(WorkerReport)


class RolloutWorkerLostError(RollweaveError):
    """The worker's process has ended, or was killed because it was silent."""


class WorkerLink(Protocol):
    """The link to one worker.

    All calls belong to the event loop's thread; none blocks.
    """

    @property
    def lost(self) -> asyncio.Future[str]:
        """The reason of the loss; done once the worker is gone."""

    @property
    def failure(self) -> Exception | None:
        """What the handling of a report raised, for which the worker was killed."""

    async def ready(self) -> WorkerReady:
        """Wait until the worker takes attempts. Raises `RolloutWorkerLostError`."""

    def send(self, command: WorkerMessage) -> None:
        """Send a command, in order. It is dropped if the worker is gone."""

    def kill(self) -> None:
        """End the worker now, without waiting; `lost` follows."""

    async def close(self) -> None:
        """Ask the worker to end, kill it if it does not, and return once it is gone."""


OnReport = Callable[[WorkerReport], None]


class ProcessWorker:
    """`WorkerLink` to `python -m module`, whose first frame is a `WorkerSpec`."""

    def __init__(
        self,
        spec: WorkerSpec,
        on_report: OnReport,
        *,
        spawn: Spawn,
        module: str,
        log: Path,
        env: Mapping[str, str],
        start_s: float,
        silent_s: float | None = None,
    ) -> None:
        self._id, self._on_report = spec.id, on_report
        self._silent_s = silent_s if silent_s is not None else SILENT_S
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = self._loop.create_future()
        self.failure: Exception | None = None
        self._ready: asyncio.Future[WorkerReady] = self._loop.create_future()
        self._missed = 0
        """Number of missed heartbeats in a row."""
        self._heard = False
        """Whether a frame has arrived since the last tick."""
        self._reason = ""
        self._child = spawn(
            name=spec.id,
            module=module,
            log=log,
            env=env,
            on_frame=self._on_frame,
            on_gone=self._on_gone,
        )
        self._timer = self._loop.call_later(
            start_s, self._give_up, f"was not ready within {start_s:g} s"
        )
        self._child.send(encode(spec))

    @property
    def pid(self) -> int:
        return self._child.pid

    async def ready(self) -> WorkerReady:
        return await asyncio.shield(self._ready)

    def send(self, command: WorkerMessage) -> None:
        if not self.lost.done():
            self._child.send(encode(command))

    def kill(self) -> None:
        self._give_up("was killed")

    async def close(self) -> None:
        self._reason = self._reason or "was closed"
        self.send(StopRolloutWorker())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._child.gone()
        self._child.kill()
        await self._child.gone()

    def _on_frame(self, payload: bytes) -> None:
        self._heard = True
        report = _decode(payload)
        if isinstance(report, WorkerBeat):
            return
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
            self._give_up(f"reported what cannot be handled: {error}")

    def _tick(self) -> None:
        """Count a missed heartbeat, unless a frame has arrived since the last tick."""
        self._missed = 0 if self._heard else self._missed + 1
        self._heard = False
        if self._missed * BEAT_S >= self._silent_s:
            self._give_up(f"sent nothing for {self._silent_s:g} s")
            return
        self._timer = self._loop.call_later(BEAT_S, self._tick)

    def _give_up(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._child.kill()

    def _on_gone(self, reason: str) -> None:
        self._timer.cancel()
        reason = f"{self._reason}: {reason}" if self._reason else reason
        if not self.lost.done():
            self.lost.set_result(f"worker {self._id} {reason}")
        if not self._ready.done():
            self._ready.set_exception(RolloutWorkerLostError(self.lost.result()))
            self._ready.exception()  # mark it as retrieved: a waiter is not required
