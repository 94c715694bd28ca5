"""The live world of one training run: pump, pipeline, engines, trainer and their
effects, wired together under one task group.

Invariants: however the world ends (by the core's `Finish`, an error or a signal), all
its tasks, environments and processes end before `run` returns; an error that neither
the user nor the core caused passes through.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

from rollweave.core.policy.scheduling import scheduling
from rollweave.core.policy.waiting import Wait
from rollweave.core.state import Phase
from rollweave.runtime.checkpoints import Checkpoints
from rollweave.runtime.control import Control
from rollweave.runtime.drawing import TaskDrawer
from rollweave.runtime.effects import (
    Effects,
    Handlers,
    prediction_handlers,
    training_handlers,
)
from rollweave.runtime.links.relay import OpenRelay
from rollweave.runtime.metrics import Metrics, Progress
from rollweave.runtime.status import StatusFile
from rollweave.runtime.supervisors.engines import REPLY_S
from rollweave.runtime.supervisors.predictor import OpenPredictor, PredictorSupervisor
from rollweave.runtime.supervisors.relays import RelaySupervisor
from rollweave.runtime.supervisors.trainer import MakeTrainer, TrainerSupervisor
from rollweave.runtime.waiting import name_long_waits
from rollweave.runtime.wiring import RolloutRuntime, Wiring
from rollweave.schema import commands as c
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.events import Event, RunStarted, StopRequested, WorldLost
from rollweave.schema.hosts import RankSlot
from rollweave.schema.serving import LoadCheckpoint
from rollweave.schema.status import RunStatus
from rollweave.schema.training import TrainMetrics
from rollweave.schema.work import Batch, Purpose, Task

COMPACT_BYTES = 4 << 20
"""Minimum size of the journal before a checkpoint compacts it, in bytes: some 40,000
events, which replay in a few seconds.
"""

PHASES = {
    Phase.RUNNING: "training",
    Phase.DRAINING: "finishing rollouts in flight",
    Phase.SAVING: "saving the last checkpoint",
    Phase.EVALUATING: "final evaluation",
    Phase.FINISHED: "ending",
}


class World:
    """All living parts of a training run."""

    def __init__(
        self,
        wiring: Wiring,
        *,
        checkpoints: Checkpoints,
        metrics: Metrics,
        progress: Progress,
        control: Path,
        status: Path,
        draw: Callable[[str, int, Purpose], Task],
        make_trainer: MakeTrainer,
        open_relay: OpenRelay,
        open_predictor: OpenPredictor,
        compact_bytes: int = COMPACT_BYTES,
    ) -> None:
        """`control` is the path of the control socket, `status` that of the status
        file; `draw` is as in `runtime/drawing.py`.
        """
        config = wiring.config
        self._wiring, self._core, self._journal = wiring, wiring.core, wiring.journal
        self._checkpoints, self._metrics, self._progress = checkpoints, metrics, progress
        self._compact_bytes = compact_bytes
        self._status = StatusFile(status, self._now)
        self.ended_at = 0.0
        """Run time at which the core issued `Finish`."""
        self._phase, self._has_begun = Phase.RUNNING, False
        self._rollouts = RolloutRuntime(
            wiring,
            execute=self._execute,
            warn=metrics.warned,
            keep_partial_turns=config.rollout.mode is ModeName.DECOUPLED,
            reply_s=REPLY_S,
            relayed=config.weights.relays > 0 or config.cluster is not None,
            checkpoint=functools.partial(_saved_weights, checkpoints, config.published_dtype),
        )
        tasks, post, clock = self._rollouts.tasks, self._rollouts.pump.post, wiring.clock.now
        self._trainer = TrainerSupervisor(
            make=make_trainer,
            tasks=tasks,
            post=post,
            clock=clock,
            trace=wiring.trace,
            store=wiring.store,
            checkpoints=checkpoints,
            on_published=self._rollouts.manifests.published,
            on_trained=self._on_trained,
            on_saved=self._compact,
        )
        self._relays = RelaySupervisor(
            hosts=wiring.hosts,
            open_relay=open_relay,
            transport=config.weights.transport,
            manifests=self._rollouts.manifests,
            tasks=tasks,
            post=post,
            clock=clock,
            trace=wiring.trace,
        )
        self._predictor = PredictorSupervisor(
            open_predictor, tasks=tasks, post=post, warn=metrics.warned
        )
        self._control = Control(
            control,
            config=config,
            state=lambda: wiring.core.state,
            post=post,
            tasks=tasks,
            warn=metrics.warned,
        )
        self._predicts = scheduling(config.rollout, config.ablation).predicts
        drawer = TaskDrawer(draw, tasks=tasks, post=post)
        drawn_by = self._rollouts.workers.draw if config.workers.count else drawer.draw
        self._effects = Effects(self._handlers(drawn_by), never=(c.Deliver,))

    async def run(self, first: RunStarted | WorldLost, *, fresh: bool) -> str:
        """Run from event `first` until the core emits `Finish`; return its error, or
        "".
        """
        with contextlib.closing(self._control):
            try:
                return await self._run(first, fresh=fresh)
            finally:
                self._status.end()

    @property
    def post(self) -> Callable[[Event], None]:
        """Post an event from outside, such as the loss of a host."""
        return self._rollouts.pump.post

    async def _run(self, first: RunStarted | WorldLost, *, fresh: bool) -> str:
        rollouts = self._rollouts
        async with rollouts.tasks:
            try:
                rollouts.pump.post(first, functools.partial(self._begin, first) if fresh else None)
                rollouts.engines.start(first.engines)
                rollouts.workers.start(first.workers)
                self._relays.start(first.relays)
                if self._predicts:
                    self._predictor.start()
                self._control.open()
                rollouts.tasks.spawn(self._name_long_waits(), "name long waits")
                rollouts.tasks.spawn(self._status.keep(), "keep the status file")
                await rollouts.pump.run()
                await asyncio.gather(
                    rollouts.engines.close(),
                    rollouts.workers.close(),
                    self._relays.close(),
                    self._trainer.close(),
                )
            finally:
                await self._predictor.close()
                rollouts.tasks.cancel_all()
        assert rollouts.error is not None, "the pump ends with Finish"
        return rollouts.error

    async def _name_long_waits(self) -> None:
        await name_long_waits(
            self._waits,
            clock=self._wiring.clock.now,
            report=lambda component, line: self._metrics.event(
                "waiting", component=component, message=line
            ),
        )

    def _waits(self) -> list[Wait]:
        progress = self._relays.progress()
        return [
            *self._core.waits(progress, start_s=self._wiring.config.watchdog.start_s),
            *self._rollouts.waits(),
        ]

    def _now(self) -> RunStatus:
        return self._core.status(self._wiring.clock.now(), self._waits())

    def stop(self) -> None:
        """End the run in order, as the user asks."""
        self._rollouts.pump.post(StopRequested())

    # Commands.

    def _execute(self, command: c.Command) -> None:
        phase = self._core.state.phase
        begins = not self._has_begun and isinstance(command, c.StartTurn)
        if self._wiring.config.run.steps:
            if phase is not self._phase or (begins and phase is Phase.RUNNING):
                self._progress.phase(PHASES[phase])
        elif begins:  # such a run also drains, saves and ends, but has nothing to save
            self._progress.phase("evaluating")
        self._phase, self._has_begun = phase, self._has_begun or begins
        self._effects.execute(command)

    def _handlers(self, draw: Callable[[c.DrawTask], None]) -> Handlers:
        return {
            **self._rollouts.handlers(),
            **prediction_handlers(pipeline=self._rollouts.pipeline, predictor=self._predictor),
            **training_handlers(
                trainer=self._trainer,
                relays=self._relays,
                comparisons=self._rollouts.comparisons,
                draw=draw,
            ),
            c.StartEngine: self._start_engine,
            c.RemoveEngine: self._remove_engine,
            c.RestartTrainer: self._restart_trainer,
            c.SaveCheckpoint: self._save,
            c.RecordEvaluation: self._metrics.evaluated,
            c.MarkBest: self._mark_best,
            c.Warn: self._metrics.warned,
            c.Finish: self._finish,
        }

    def _start_engine(self, command: c.StartEngine) -> None:
        self._metrics.event("engine", engine=command.engine_id, change="starts")
        self._rollouts.engines.add(command)

    def _remove_engine(self, command: c.RemoveEngine) -> None:
        self._metrics.event("engine", engine=command.engine_id, change="is removed")
        self._rollouts.engines.remove(command)

    # An epoch of the trainer begins once it is on the disk. Otherwise a run that is
    # resumed after a power loss could count it again, while ranks of the former one
    # still run on other hosts, and write under the same names.

    def _begin(self, first: RunStarted | WorldLost) -> None:
        self._journal.sync()
        self._trainer.start(0, ranks=first.ranks or (RankSlot(),))

    def _restart_trainer(self, command: c.RestartTrainer) -> None:
        self._journal.sync()
        self._trainer.restart(command)

    def _save(self, command: c.SaveCheckpoint) -> None:
        # otherwise a power loss could leave a checkpoint that the journal does not know
        self._journal.sync()
        self._trainer.save(command)

    def _mark_best(self, command: c.MarkBest) -> None:
        try:
            self._checkpoints.mark_best(command.step)
        except OSError as error:
            text = f"cannot mark step {command.step} best: {error}"
            self._metrics.warned(c.Warn(component="checkpoints", message=text))
            return
        self._metrics.best(command)

    def _finish(self, command: c.Finish) -> None:
        self.ended_at = self._wiring.clock.now()
        self._rollouts.finish(command.error)

    # Callbacks of the supervisors.

    def _compact(self) -> None:
        """Replace the journal by a snapshot of the core, so that it stays small and
        replays quickly.
        """
        self._journal.sync()
        if self._journal.size < self._compact_bytes:
            return
        try:
            self._journal.rotate(self._core.snapshot())
        except OSError as error:  # the journal stays as it is
            text = f"cannot be compacted: {error}"
            self._metrics.warned(c.Warn(component="journal", message=text))

    def _on_trained(self, command: c.TrainStep, batch: Batch, metrics: TrainMetrics) -> None:
        self._metrics.trained(command, batch, metrics)
        self._wiring.trace.flush()
        if command.part + 1 == command.parts:
            self._rollouts.tasks.spawn(self._sample_engines(), "sample engines")

    async def _sample_engines(self) -> None:
        stats = await self._rollouts.engines.sample()
        self._metrics.sampled(stats, self._predictor.stats() if self._predicts else None)


def _saved_weights(
    checkpoints: Checkpoints, dtype: str, version: int, publication_id: int
) -> LoadCheckpoint:
    """Locate weights that a checkpoint has."""
    directory = str(checkpoints.path(version).absolute())
    return LoadCheckpoint(
        version=version, publication_id=publication_id, directory=directory, dtype=dtype
    )
