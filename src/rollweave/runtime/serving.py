"""The live world of a service: the core, the rollout pipeline and engines, without a
trainer.

Invariants: as of `runtime/world.py`; what is delivered is in the store before anybody
hears of it.
"""

import contextlib
from collections.abc import Callable
from typing import NoReturn, Protocol

from rollweave.core.core import Core
from rollweave.engine.clients.base import EngineBackend
from rollweave.record.journal import RunJournal
from rollweave.record.store import TrajectoryStore
from rollweave.record.trace import Trace
from rollweave.rollout.driver import MakeEpisode
from rollweave.runtime.base import LiveWorld
from rollweave.runtime.clock import RunClock
from rollweave.schema.commands import Deliver, MarkBest, RecordEvaluation, Warn
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import DiskError
from rollweave.schema.events import EngineSlot, RunStarted, StopRequested, WorldLost

COMPACT_BYTES = 4 << 20
"""Bytes that the journal grows by before it begins anew with a snapshot: some 30,000
events, which replay in a second.
"""


class Customers(Protocol):
    """Whoever asked for rollouts."""

    def delivered(self, command: Deliver) -> None:
        """It is over, and in the store if it was started.

        To be answered by `RolloutAcknowledged`.
        """

    def warned(self, command: Warn) -> None:
        """A component ails."""


class ServiceWorld(LiveWorld):
    """Everything of a service that lives, but its doors.

    `run` returns when it was stopped, and all is delivered and taken.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        core: Core,
        clock: RunClock,
        journal: RunJournal,
        store: TrajectoryStore,
        trace: Trace,
        make_engine: Callable[[EngineSlot, int], EngineBackend],
        make_episode: MakeEpisode,
        customers: Customers,
        compact_bytes: int = COMPACT_BYTES,
    ) -> None:
        super().__init__(
            config,
            core=core,
            clock=clock,
            journal=journal,
            store=store,
            trace=trace,
            make_engine=make_engine,
            make_episode=make_episode,
        )
        self._compact_bytes = compact_bytes
        nobody = _Nobody()
        self._effects = self._make_effects(
            seat=nobody,
            relays=nobody,
            predictor=nobody,
            draws=nobody,
            listener=_Listener(customers),
        )

    async def run(self, first: RunStarted | WorldLost) -> str:
        """Live until the core says `Finish`; its error, or ""."""
        async with self._tasks:
            try:
                self.pump.post(first)
                self.fleet.start(first.engines)
                await self.pump.run()
                await self.fleet.close()
                with contextlib.suppress(DiskError):  # the next life replays it all then
                    self._journal.rotate(self.core.snapshot())
            finally:
                self._tasks.cancel_all()
        return self._error or ""

    def stop(self, *, drain: bool) -> None:
        """Take nothing more, and end when what there is is done, or cancelled."""
        self.pump.post(StopRequested(drain=drain))

    def compact(self) -> None:
        """Let the journal begin with the core of this moment, if it has grown by more
        than that takes. Raises DiskError.
        """
        if self._journal.grown >= max(self._compact_bytes, self._journal.begun):
            self._journal.rotate(self.core.snapshot())


class _Nobody:
    """In the place of whoever trains, passes weights on, predicts and draws tasks: a
    service asks for none of it.
    """

    def _never(self, *commands: object) -> NoReturn:
        raise AssertionError(f"a service does not train: {commands}")

    train = measure = publish = save = restart = take = remove = predict = harvest = fit = draw = (
        _never
    )


class _Listener:
    def __init__(self, customers: Customers) -> None:
        self.delivered, self.warned = customers.delivered, customers.warned

    def evaluated(self, command: RecordEvaluation) -> NoReturn:
        raise AssertionError(f"a service evaluates nothing: {command}")

    def best(self, command: MarkBest) -> NoReturn:
        raise AssertionError(f"a service has no checkpoints: {command}")
