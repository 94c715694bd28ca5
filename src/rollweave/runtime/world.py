"""The live world of one run: pump, pipeline, engines, trainer and their effects, wired
together under one task group.

Invariants: whatever ends the world (the core's `Finish`, an error, a signal) ends every
task, environment and process of it before `run` returns; what the user did not ask for
and the core did not decide is an error that passes through.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from rollweave.core.core import Core
from rollweave.core.policy.scheduling import scheduling
from rollweave.core.state import Phase
from rollweave.engine.clients.base import EngineBackend
from rollweave.record.journal import RunJournal
from rollweave.record.store import TrajectoryStore
from rollweave.record.trace import Trace
from rollweave.rollout.driver import MakeEpisode
from rollweave.runtime.base import LiveWorld
from rollweave.runtime.checkpoints import Checkpoints
from rollweave.runtime.clock import RunClock
from rollweave.runtime.control import Control
from rollweave.runtime.effects import Draws
from rollweave.runtime.links.relay import OpenRelay
from rollweave.runtime.links.trainer import TrainerBackend
from rollweave.runtime.metrics import Metrics, Progress
from rollweave.runtime.supervisors.engines import SILENCE_S
from rollweave.runtime.supervisors.predictor import OpenLink, PredictorSeat
from rollweave.runtime.supervisors.relays import Relays
from rollweave.runtime.supervisors.trainer import TrainerSeat
from rollweave.schema.commands import (
    Command,
    Deliver,
    MarkBest,
    RecordEvaluation,
    RemoveEngine,
    SaveCheckpoint,
    StartEngine,
    TrainStep,
    Warn,
)
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.sections import ModeName
from rollweave.schema.events import EngineSlot, Event, StopRequested
from rollweave.schema.serving import LoadSaved
from rollweave.schema.training import TrainMetrics
from rollweave.schema.work import Batch

COMPACT_BYTES = 4 << 20
"""Bytes of journal from which a checkpoint compacts it: some 40,000 events, which
replay in a few seconds.
"""


PHASES = {
    Phase.RUNNING: "training",
    Phase.DRAINING: "ending what is in flight",
    Phase.SAVING: "saving the last checkpoint",
    Phase.EVALUATING: "final evaluation",
    Phase.FINISHED: "ending",
}


class World(LiveWorld):
    """Everything of one run that lives. `run` returns the core's last word."""

    def __init__(
        self,
        config: RunConfig,
        *,
        core: Core,
        clock: RunClock,
        journal: RunJournal,
        store: TrajectoryStore,
        checkpoints: Checkpoints,
        metrics: Metrics,
        trace: Trace,
        draws: Draws,
        make_engine: Callable[[EngineSlot, int], EngineBackend],
        make_trainer: Callable[[int, bool], TrainerBackend],
        open_relay: OpenRelay,
        make_episode: MakeEpisode,
        open_predictor: OpenLink,
        progress: Progress,
        control: Path,
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
            keep_partial_turns=config.rollout.mode is ModeName.DECOUPLED,
            silence_s=SILENCE_S,
            machines=config.weights.relays,
            saved=functools.partial(_saved, checkpoints, config.published_dtype),
        )
        self._checkpoints, self._metrics = checkpoints, metrics
        self.ended_at = 0.0
        """The run's time when the core said `Finish`."""
        self._compact_bytes = compact_bytes
        self._progress = progress
        self._phase = Phase.RUNNING
        self.seat = TrainerSeat(
            make=make_trainer,
            tasks=self._tasks,
            post=self.pump.post,
            clock=clock.now,
            trace=trace,
            store=store,
            checkpoints=checkpoints,
            on_published=self.manifests.published,
            on_trained=self._trained,
            on_saved=self._compact,
        )
        self.relays = Relays(
            count=config.weights.relays,
            open_relay=open_relay,
            transport=config.weights.transport,
            manifests=self.manifests,
            tasks=self._tasks,
            post=self.pump.post,
            clock=clock.now,
            trace=trace,
        )
        self.predictor = PredictorSeat(open_predictor, post=self.pump.post, warned=self.warned)
        self._control = Control(
            control,
            config=config,
            state=lambda: core.state,
            post=self.pump.post,
            tasks=self._tasks,
            warned=self.warned,
        )
        self._predicts = scheduling(config.rollout).predicts
        self._effects = self._make_effects(
            seat=self.seat, relays=self.relays, predictor=self.predictor, draws=draws, listener=self
        )

    async def run(self, first: Event, *, engines: Sequence[EngineSlot], fresh: bool) -> str:
        """Begin with event `first`, and live until the core says `Finish`; its error,
        or "" where all went well.
        """
        with contextlib.closing(self._control):
            return await self._run(first, engines, fresh=fresh)

    async def _run(self, first: Event, engines: Sequence[EngineSlot], *, fresh: bool) -> str:
        async with self._tasks:
            try:
                self.pump.post(first)
                self.fleet.start(engines)
                self.relays.start()
                if fresh:
                    self.seat.start(0)
                if self._predicts:
                    self.predictor.start()
                self._control.open()
                await self.pump.run()
                await asyncio.gather(self.fleet.close(), self.relays.close(), self.seat.close())
            finally:
                await self.predictor.close()
                self._tasks.cancel_all()
        assert self._error is not None, "the pump ends with Finish"
        return self._error

    def stop(self) -> None:
        """The user asks for an orderly end."""
        self.pump.post(StopRequested())

    # Listener of the effects.

    def warned(self, command: Warn) -> None:
        self._metrics.warned(command)

    def evaluated(self, command: RecordEvaluation) -> None:
        self._metrics.evaluated(command)

    def best(self, command: MarkBest) -> None:
        try:
            self._checkpoints.mark_best(command.step)
        except OSError as error:
            self._metrics.warned(
                Warn(
                    component="checkpoints",
                    message=f"cannot mark step {command.step} best: {error}",
                )
            )
            return
        self._metrics.best(command)

    def delivered(self, command: Deliver) -> None:
        raise AssertionError(f"training delivers nothing: {command}")

    # What the parts call.

    def _execute(self, command: Command) -> None:
        if self.core.state.phase is not self._phase:
            self._phase = self.core.state.phase
            self._progress.phase(PHASES[self._phase])
        if isinstance(command, StartEngine | RemoveEngine):
            change = "starts" if isinstance(command, StartEngine) else "is removed"
            self._metrics.event("engine", engine=command.engine_id, change=change)
        if isinstance(command, SaveCheckpoint):
            # otherwise a power loss could leave a checkpoint that the journal does not
            # know
            self._journal.sync()
        super()._execute(command)

    def _finish(self, error: str) -> None:
        self.ended_at = self.clock.now()
        super()._finish(error)

    def _compact(self) -> None:
        """Let the journal begin with the core of this moment, so that it stays small
        and replays quickly.
        """
        self._journal.sync()
        if self._journal.size < self._compact_bytes:
            return
        try:
            self._journal.rotate(self.core.snapshot())
        except OSError as error:  # the journal goes on as it is
            self._metrics.warned(Warn(component="journal", message=f"cannot be compacted: {error}"))

    def _trained(self, command: TrainStep, batch: Batch, metrics: TrainMetrics) -> None:
        self._metrics.trained(command, batch, metrics)
        self._trace.flush()
        if command.part + 1 == command.parts:
            self._tasks.spawn(self._sample_engines(), "sample engines")

    async def _sample_engines(self) -> None:
        self._metrics.sampled(
            await self.fleet.sample(), self.predictor.stats() if self._predicts else None
        )


def _saved(checkpoints: Checkpoints, dtype: str, version: int, weights_id: int) -> LoadSaved:
    directory = str(checkpoints.path(version).absolute())
    return LoadSaved(version=version, weights_id=weights_id, directory=directory, dtype=dtype)
