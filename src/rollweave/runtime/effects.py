"""Execute commands of the core in the live world: a table from the type of a command to
its handler.

Invariants: a handler neither blocks nor raises for what happens in the world; the part
that cannot do its work posts the event of the failure. After `Finish` nothing is
executed.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_args

from rollweave.rollout.pipeline import Pipeline
from rollweave.rollout.rewards import Comparisons
from rollweave.runtime.supervisors.engines import EngineSupervisor
from rollweave.runtime.supervisors.predictor import PredictorSupervisor
from rollweave.runtime.supervisors.relays import RelaySupervisor
from rollweave.runtime.supervisors.trainer import TrainerSupervisor
from rollweave.runtime.supervisors.workers import WorkerSupervisor
from rollweave.schema import commands as c
from rollweave.schema.events import Event, TimerFired

Handlers = Mapping[type[c.Command], Callable[[Any], None]]
"""The handler of each type of command. A handler takes the command."""


class Effects:
    """Executes commands by their handlers.

    Every command must have one, except for those that the world never gets.
    """

    def __init__(self, handlers: Handlers, *, never: Collection[type[c.Command]] = ()) -> None:
        known = {*handlers, *never}
        missing = [kind.__name__ for kind in get_args(c.Command) if kind not in known]
        assert not missing, f"commands without a handler: {', '.join(missing)}"
        self._handlers = handlers

    def execute(self, command: c.Command) -> None:
        """Begin what the command asks for."""
        handler = self._handlers.get(type(command))
        assert handler is not None, f"this world executes no {type(command).__name__}: {command}"
        handler(command)


class Timer:
    """The one timer of the core. Setting it again replaces it."""

    def __init__(self, clock: Callable[[], float], post: Callable[[Event], None]) -> None:
        self._clock, self._post = clock, post
        self._handle: asyncio.TimerHandle | None = None

    def set(self, command: c.SetTimer) -> None:
        self.cancel()
        delay = max(0.0, command.at - self._clock())
        self._handle = asyncio.get_running_loop().call_later(delay, self._fire)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._post(TimerFired())


def rollout_handlers(
    *,
    pipeline: Pipeline,
    engines: EngineSupervisor,
    workers: WorkerSupervisor,
    predictor: PredictorSupervisor,
    timer: Timer,
) -> Handlers:
    """Return the handlers that every live world has."""

    def migrate(command: c.Migrate) -> None:
        engines.migrate(command, pipeline.context_of(command.trajectory_id, command.attempt))

    def predict(command: c.Predict) -> None:
        predictor.predict(command, pipeline.length_context(command))

    return {
        c.StartInit: pipeline.start_init,
        c.StartRun: pipeline.start_run,
        c.StartTurn: pipeline.start_turn,
        c.AbortTurn: pipeline.abort_turn,
        c.RerankTurn: pipeline.rerank,
        c.StartEval: pipeline.start_eval,
        c.CancelTrajectory: pipeline.cancel,
        c.Evict: pipeline.evict,
        c.Migrate: migrate,
        c.StartEngine: engines.add,
        c.StageWeights: engines.stage,
        c.SuspendEngine: engines.suspend,
        c.LoadWeights: engines.load,
        c.ResumeEngine: engines.resume,
        c.RestartEngine: engines.restart,
        c.RemoveEngine: engines.remove,
        c.RestartWorker: workers.restart,
        c.RemoveWorker: workers.remove,
        c.Predict: predict,
        c.Harvest: predictor.harvest,
        c.FitPredictor: predictor.fit,
        c.SetTimer: timer.set,
    }


def training_handlers(
    *,
    trainer: TrainerSupervisor,
    relays: RelaySupervisor,
    comparisons: Comparisons,
    draw: Callable[[c.DrawTask], None],
) -> Handlers:
    """Return the handlers that a training run has in addition."""
    return {
        c.DrawTask: draw,
        c.CompareGroup: comparisons.start,
        c.CancelComparison: comparisons.cancel,
        c.FetchWeights: relays.fetch,
        c.RestartRelay: relays.restart,
        c.RemoveRelay: relays.remove,
        c.TrainStep: trainer.train,
        c.MeasureRatios: trainer.measure,
        c.PublishWeights: trainer.publish,
        c.SaveCheckpoint: trainer.save,
        c.RestartTrainer: trainer.restart,
    }


TRAINING_ONLY: Collection[type[c.Command]] = (
    c.DrawTask,
    c.CompareGroup,
    c.CancelComparison,
    c.FetchWeights,
    c.RestartRelay,
    c.RemoveRelay,
    c.TrainStep,
    c.MeasureRatios,
    c.PublishWeights,
    c.SaveCheckpoint,
    c.RestartTrainer,
    c.RecordEvaluation,
    c.MarkBest,
)
"""Commands that a service never gets."""
