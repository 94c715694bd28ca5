"""Execute commands of the core in the simulated world, by a table as in
`runtime/pump.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import TaskId
from rollweave.schema.work import Limits, Task
from rollweave.sim.clock import Clock
from rollweave.sim.fleet import SimFleet
from rollweave.sim.predictor import SimPredictor
from rollweave.sim.relays import SimRelays
from rollweave.sim.rollouts import Rollouts
from rollweave.sim.trainer import SimTrainer
from rollweave.sim.workers import SimWorkers


class SimObserver(Protocol):
    """Receives what a run reports about itself."""

    def warned(self, command: c.Warn) -> None:
        """Take a warning of a component."""

    def evaluated(self, command: c.RecordEvaluation) -> None:
        """Take the result of a complete evaluation."""

    def best(self, command: c.MarkBest) -> None:
        """Take the step of the best checkpoint so far."""


class Effects:
    """Executes commands by a table from the type of a command to its handler.

    `workers` is None if the attempts run in the controller. `finish` is called once,
    with the error or "", when the core finishes the run.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        post: Callable[[e.Event], None],
        rollouts: Rollouts,
        fleet: SimFleet,
        trainer: SimTrainer,
        relays: SimRelays,
        workers: SimWorkers | None,
        predictor: SimPredictor,
        limits: Callable[[str], Limits],
        observer: SimObserver,
        finish: Callable[[str], None],
    ) -> None:
        self._clock, self._post, self._limits, self._finish = clock, post, limits, finish
        self._workers = workers
        self._timer = 0
        self.handlers: Mapping[type[c.Command], Callable[[Any], None]] = {
            c.DrawTask: self._draw,
            c.StartInit: rollouts.start_init,
            c.StartRun: rollouts.start_run,
            c.StartTurn: rollouts.start_turn,
            c.AbortTurn: rollouts.abort_turn,
            c.RerankTurn: rollouts.rerank,
            c.StartEval: rollouts.start_eval,
            c.CompareGroup: self._compare,
            c.CancelComparison: lambda _: None,
            c.CancelTrajectory: rollouts.cancel,
            c.Evict: rollouts.evict,
            c.Migrate: rollouts.migrate,
            c.Deliver: self._deliver,
            c.Predict: predictor.predict,
            c.Harvest: predictor.harvest,
            c.FitPredictor: predictor.fit,
            c.StartEngine: fleet.add,
            c.StageWeights: fleet.stage,
            c.SuspendEngine: fleet.suspend,
            c.LoadWeights: fleet.load,
            c.ResumeEngine: fleet.resume,
            c.RestartEngine: fleet.restart,
            c.RemoveEngine: fleet.remove,
            c.FetchWeights: relays.fetch,
            c.RestartRelay: relays.restart,
            c.RemoveRelay: relays.remove,
            c.RestartWorker: workers.restart if workers is not None else _no_workers,
            c.RemoveWorker: workers.remove if workers is not None else _no_workers,
            c.TrainStep: trainer.train,
            c.MeasureRatios: trainer.measure,
            c.PublishWeights: trainer.publish,
            c.SaveCheckpoint: trainer.save,
            c.RestartTrainer: trainer.restart,
            c.RecordEvaluation: observer.evaluated,
            c.MarkBest: observer.best,
            c.Warn: observer.warned,
            c.SetTimer: self._set_timer,
            c.Finish: self._end,
        }

    def execute(self, command: c.Command) -> None:
        """Begin what the command asks for."""
        self.handlers[type(command)](command)

    def _compare(self, command: c.CompareGroup) -> None:
        # the workload's rewards are those after the comparison, which takes no time
        self._post(e.GroupCompared(group_id=command.group_id, rewards=command.rewards))

    def _set_timer(self, command: c.SetTimer) -> None:
        self._clock.cancel(self._timer)
        self._timer = self._clock.at(command.at, lambda: self._post(e.TimerFired()))

    def _deliver(self, command: c.Deliver) -> None:
        # the requester acknowledges at once
        self._post(e.RolloutAcknowledged(trajectory_id=command.trajectory_id))

    def _end(self, command: c.Finish) -> None:
        self._clock.cancel(self._timer)
        self._finish(command.error)

    def _draw(self, command: c.DrawTask) -> None:
        task = Task(
            id=TaskId(f"{command.name}-{command.purpose}-{command.index}"),
            env=command.name,
            seed=command.index,
            tag=command.name,
            limits=self._limits(command.name),
        )
        submitted = e.GroupSubmitted(group_id=command.group_id, task=task)
        (self._post if self._workers is None else self._workers.draw)(submitted)


def _no_workers(command: c.RestartWorker | c.RemoveWorker) -> None:
    raise AssertionError(f"this simulated run has no workers: {command}")
