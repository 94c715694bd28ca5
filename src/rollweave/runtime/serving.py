"""The live world of a service: core, rollout pipeline and engines, without a trainer.

Invariants: those of `runtime/world.py`; a result is in the store before its delivery is
announced.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Protocol

from rollweave.core.policy.scheduling import scheduling
from rollweave.runtime.effects import TRAINING_ONLY, Effects, Handlers, prediction_handlers
from rollweave.runtime.status import StatusFile
from rollweave.runtime.supervisors.predictor import OpenPredictor, PredictorSupervisor
from rollweave.runtime.wiring import RolloutRuntime, Wiring
from rollweave.schema import commands as c
from rollweave.schema.errors import DiskError
from rollweave.schema.events import RunStarted, StopRequested, WorldLost
from rollweave.schema.status import RunStatus

COMPACT_BYTES = 4 << 20
"""Minimum growth of the journal before it is replaced by a snapshot, in bytes: some
30,000 events, which replay in a second.
"""


class ResultSink(Protocol):
    """The consumer of a service's results."""

    def delivered(self, command: c.Deliver) -> None:
        """Take a result, which is in the store if its trajectory was started.

        Answered by `RolloutAcknowledged`.
        """

    def warned(self, command: c.Warn) -> None:
        """Take a warning of a component."""


class ServiceWorld:
    """All living parts of a service, except for its endpoints."""

    def __init__(
        self,
        wiring: Wiring,
        *,
        sink: ResultSink,
        open_predictor: OpenPredictor,
        status: Path,
        compact_bytes: int = COMPACT_BYTES,
    ) -> None:
        """`status` is the path of the status file."""
        self._clock, self._status = wiring.clock.now, StatusFile(status, self._now)
        self.core, self._journal = wiring.core, wiring.journal
        self._start_s = wiring.config.watchdog.start_s
        self._compact_bytes = compact_bytes
        self._rollouts = RolloutRuntime(wiring, execute=self._execute, warn=sink.warned)
        self.pump = self._rollouts.pump
        self._predictor = PredictorSupervisor(
            open_predictor, tasks=self._rollouts.tasks, post=self.pump.post, warn=sink.warned
        )
        self._predicts = scheduling(wiring.config.rollout, wiring.config.ablation).predicts
        handlers: Handlers = {
            **self._rollouts.handlers(),
            **prediction_handlers(pipeline=self._rollouts.pipeline, predictor=self._predictor),
            c.Deliver: sink.delivered,
            c.Warn: sink.warned,
            c.Finish: lambda command: self._rollouts.finish(command.error),
        }
        self._effects = Effects(handlers, never=TRAINING_ONLY)

    async def run(self, first: RunStarted | WorldLost) -> str:
        """Run until the core issues `Finish`; return its error, or "".

        A service finishes once it was stopped and every result is acknowledged.
        """
        rollouts = self._rollouts
        async with rollouts.tasks:
            try:
                self.pump.post(first)
                rollouts.engines.start(first.engines)
                rollouts.workers.start(first.workers)
                if self._predicts:
                    self._predictor.start()
                rollouts.tasks.spawn(self._status.keep(), "keep the status file")
                await self.pump.run()
                await asyncio.gather(rollouts.engines.close(), rollouts.workers.close())
                with contextlib.suppress(DiskError):  # then the next life replays it all
                    self._journal.rotate(self.core.snapshot())
            finally:
                self._status.end()
                await self._predictor.close()
                rollouts.tasks.cancel_all()
        return rollouts.error or ""

    def _now(self) -> RunStatus:
        waiting = self.core.waits({}, start_s=self._start_s)
        return self.core.status(self._clock(), [*waiting, *self._rollouts.waits()])

    def stop(self, *, drain: bool) -> None:
        """Accept no more rollouts, and end once all are done (`drain`) or cancelled."""
        self.pump.post(StopRequested(drain=drain))

    def compact(self) -> None:
        """Replace the journal by a snapshot if it has grown enough. Raises
        DiskError.
        """
        if self._journal.appended_bytes >= max(self._compact_bytes, self._journal.initial_bytes):
            self._journal.rotate(self.core.snapshot())

    def _execute(self, command: c.Command) -> None:
        self._effects.execute(command)
