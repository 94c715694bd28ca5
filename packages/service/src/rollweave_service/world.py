"""The world of a service: a live world without a trainer.

Invariant: a result is in the store before its delivery is announced.
"""

import asyncio
from collections.abc import Collection
from typing import Protocol

from rollweave.runtime.life import Wiring
from rollweave.runtime.live_world import LiveWorld
from rollweave.runtime.pump import Effects
from rollweave.schema import commands as c
from rollweave.schema.events import RunStarted, StopRequested, WorldLost

COMPACT_BYTES = 4 << 20
"""Minimum growth of the journal before it is replaced by a snapshot, in bytes: some
30,000 events, which replay in a second.
"""

COMPACT_S = 5.0
"""Seconds between two checks whether to compact the journal: a busy service writes a
megabyte a second.
"""


class ResultSink(Protocol):
    """The consumer of a service's results."""

    def delivered(self, command: c.Deliver) -> None:
        """Take a result, which is in the store if its trajectory was started.

        Answered by `RolloutAcknowledged`.
        """

    def warned(self, command: c.Warn) -> None:
        """Take a warning of a component."""


TRAINING_ONLY: Collection[type[c.Command]] = (
    c.DrawTask,
    c.CompareGroup,
    c.CancelComparison,
    c.FetchWeights,
    c.RestartRelay,
    c.RemoveRelay,
    c.TrainStep,
    c.MeasureGroups,
    c.PublishWeights,
    c.SaveCheckpoint,
    c.RestartTrainer,
    c.RecordEvaluation,
    c.MarkBest,
)
"""Commands that a service never gets."""


class ServiceWorld(LiveWorld):
    """All living parts of a service, except for its endpoints."""

    def __init__(self, wiring: Wiring, *, sink: ResultSink) -> None:
        super().__init__(wiring, warn=sink.warned)
        handlers = {**self.handlers(), c.Deliver: sink.delivered}
        self.effects = Effects(handlers, never=TRAINING_ONLY)

    async def run(self, first: RunStarted | WorldLost) -> str:
        """Run until the core issues `Finish`; return its error, or "".

        A service finishes once it was stopped and every result is acknowledged.
        """
        return await self.live(first)

    def started(self, first: RunStarted | WorldLost) -> None:
        del first
        self.tasks.spawn(self._compact(), "compact the journal")

    async def finished(self) -> None:
        self.rotate()  # otherwise the next life would replay it all

    def stop(self, *, drain: bool) -> None:
        """Accept no more rollouts, and end once all are done (`drain`) or cancelled."""
        self.pump.post(StopRequested(drain=drain))

    async def _compact(self) -> None:
        """Replace the journal by a snapshot whenever it has grown enough."""
        journal = self.life.journal
        while True:
            await asyncio.sleep(COMPACT_S)
            if journal.appended_bytes >= max(COMPACT_BYTES, journal.initial_bytes):
                self.rotate()
