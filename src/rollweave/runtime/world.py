"""The live world of one training run, which has a trainer, relays and the run's control
socket. Its invariants are those of `runtime/live_world.py`.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping

from rollweave.core.state import Phase
from rollweave.runtime.checkpoints import Checkpoints
from rollweave.runtime.control import Control
from rollweave.runtime.life import Wiring
from rollweave.runtime.live_world import LiveWorld
from rollweave.runtime.metrics import Metrics, Progress
from rollweave.runtime.pump import Effects, Handlers
from rollweave.runtime.supervisors.engines import REPLY_S
from rollweave.runtime.supervisors.relays import RelaySupervisor
from rollweave.runtime.supervisors.trainer import TrainerSupervisor
from rollweave.runtime.tasks import TaskDrawer, name_long_waits
from rollweave.schema import commands as c
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.events import RunStarted, StopRequested, WorldLost
from rollweave.schema.hosts import RankSlot
from rollweave.schema.serving import LoadCheckpoint
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


class World(LiveWorld):
    """All living parts of a training run."""

    def __init__(
        self,
        wiring: Wiring,
        *,
        metrics: Metrics,
        progress: Progress,
        draw: Callable[[str, int, Purpose], Task],
        compact_bytes: int = COMPACT_BYTES,
    ) -> None:
        """`draw` is as in `runtime/tasks.py`."""
        life, processes, config = wiring.life, wiring.processes, wiring.life.config
        self._checkpoints = Checkpoints(life.run.checkpoints)
        self._checkpoints.clear_unfinished()
        self._metrics, self._progress = metrics, progress
        self._compact_bytes = compact_bytes
        self.ended_at = 0.0
        """Run time at which the core issued `Finish`."""
        self._phase, self._has_begun = Phase.RUNNING, False
        super().__init__(
            wiring,
            warn=metrics.warned,
            keep_partial_turns=config.rollout.mode is ModeName.DECOUPLED,
            reply_s=REPLY_S,
            relayed=config.relayed,
            checkpoint=functools.partial(_saved_weights, self._checkpoints, config.model.dtype),
        )
        tasks, post, clock = self.tasks, self.pump.post, life.clock.now
        self._trainer = TrainerSupervisor(
            make=processes.trainer,
            tasks=tasks,
            post=post,
            clock=clock,
            trace=life.trace,
            store=life.store,
            checkpoints=self._checkpoints,
            on_published=self.manifests.published,
            on_trained=self._on_trained,
            on_saved=self._compact,
            warn=lambda line: metrics.warned(c.Warn(component="weights", message=line)),
            shared=config.cluster is not None,
        )
        self._relays = RelaySupervisor(
            hosts=processes.hosts,
            open_relay=processes.relay,
            transport=config.weights.transport,
            manifests=self.manifests,
            tasks=tasks,
            post=post,
            clock=clock,
            trace=life.trace,
        )
        self._control = Control(
            life.run.control,
            config=config,
            state=lambda: self.core.state,
            post=post,
            tasks=tasks,
            warn=metrics.warned,
        )
        drawer = TaskDrawer(draw, tasks=tasks, post=post)
        drawn_by = self.workers.draw if config.workers.maximum else drawer.draw
        self.effects = Effects(self._handlers(drawn_by), never=(c.Deliver,))

    async def run(self, first: RunStarted | WorldLost) -> str:
        """Run from event `first` until the core emits `Finish`; return its error, or
        "".
        """
        fresh = isinstance(first, RunStarted)
        with contextlib.closing(self._control):
            return await self.live(first, functools.partial(self._begin, first) if fresh else None)

    def started(self, first: RunStarted | WorldLost) -> None:
        self._relays.start(first.relays)
        self._control.open()
        self.tasks.spawn(self._name_long_waits(), "name long waits")

    async def finished(self) -> None:
        await asyncio.gather(self._relays.close(), self._trainer.close())

    async def _name_long_waits(self) -> None:
        await name_long_waits(
            self.waits,
            clock=self.life.clock.now,
            report=lambda component, line: self._metrics.event(
                "waiting", component=component, message=line
            ),
        )

    def fetched(self) -> Mapping[str, tuple[int, int]]:
        return self._relays.progress()

    def stop(self) -> None:
        """End the run in order, as the user asks."""
        self.pump.post(StopRequested())

    # Commands.

    def execute(self, command: c.Command) -> None:
        phase = self.core.state.phase
        begins = not self._has_begun and isinstance(command, c.StartTurn)
        if self.config.run.steps:
            if phase is not self._phase or (begins and phase is Phase.RUNNING):
                self._progress.phase(PHASES[phase])
        elif begins:  # such a run also drains, saves and ends, but has nothing to save
            self._progress.phase("evaluating")
        self._phase, self._has_begun = phase, self._has_begun or begins
        super().execute(command)

    def _handlers(self, draw: Callable[[c.DrawTask], None]) -> Handlers:
        return {
            **self.handlers(),
            c.DrawTask: draw,
            c.CompareGroup: self.comparisons.start,
            c.CancelComparison: self.comparisons.cancel,
            c.FetchWeights: self._relays.fetch,
            c.RestartRelay: self._relays.restart,
            c.RemoveRelay: self._relays.remove,
            c.TrainStep: self._trainer.train,
            c.MeasureGroups: self._trainer.measure,
            c.PublishWeights: self._trainer.publish,
            c.StartEngine: self._start_engine,
            c.RemoveEngine: self._remove_engine,
            c.RestartTrainer: self._restart_trainer,
            c.SaveCheckpoint: self._save,
            c.RecordEvaluation: self._metrics.evaluated,
            c.MarkBest: self._mark_best,
            c.Finish: self._finish,
        }

    def _start_engine(self, command: c.StartEngine) -> None:
        self._metrics.event("engine", engine=command.engine_id, change="starts")
        self.engines.add(command)

    def _remove_engine(self, command: c.RemoveEngine) -> None:
        self._metrics.event("engine", engine=command.engine_id, change="is removed")
        self.engines.remove(command)

    # An epoch of the trainer begins once it is on the disk. Otherwise a run that is
    # resumed after a power loss could count it again, while ranks of the former one
    # still run on other hosts, and write under the same names.

    def _begin(self, first: RunStarted | WorldLost) -> None:
        self.life.journal.sync()
        self._trainer.start(0, ranks=first.ranks or (RankSlot(),))

    def _restart_trainer(self, command: c.RestartTrainer) -> None:
        self.life.journal.sync()
        self._trainer.restart(command)

    def _save(self, command: c.SaveCheckpoint) -> None:
        # otherwise a power loss could leave a checkpoint that the journal does not know
        self.life.journal.sync()
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
        self.ended_at = self.life.clock.now()
        self.finish(command)

    # Callbacks of the supervisors.

    def _compact(self) -> None:
        self.life.journal.sync()
        if self.life.journal.size >= self._compact_bytes:
            self.rotate()

    def _on_trained(self, command: c.TrainStep, batch: Batch, metrics: TrainMetrics) -> None:
        self._metrics.trained(command, batch, metrics)
        self.life.trace.flush()
        if command.part + 1 == command.parts:
            self.tasks.spawn(self._sample_engines(), "sample engines")

    async def _sample_engines(self) -> None:
        stats = await self.engines.sample()
        self._metrics.sampled(stats, self.predictor.stats() if self.predicts else None)


def _saved_weights(
    checkpoints: Checkpoints, dtype: str, version: int, publication_id: int
) -> LoadCheckpoint:
    """Locate weights that a checkpoint has."""
    directory = str(checkpoints.path(version).absolute())
    return LoadCheckpoint(
        version=version, publication_id=publication_id, directory=directory, dtype=dtype
    )
