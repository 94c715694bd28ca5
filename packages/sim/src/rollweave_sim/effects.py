"""Execute commands of the core in the simulated world, by a table as in
`runtime/pump.py`; and the predictor of this world: the live `ProgressivePredictor`
with a modeled latency.

Invariants of the predictor: the same commands at the same times give the same events at
the same times. Simulated trajectories have no text, so plans are empty and regressors
that read text have no input. Fits are not modeled: they take no simulated time, and
happen between two predictions.

"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from rollweave.core.policy.predict import ProgressivePredictor, Question
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import TaskId
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Limits, Task
from rollweave.train.lengths import build_regressor
from rollweave_sim.clock import Clock
from rollweave_sim.fleet import SimFleet
from rollweave_sim.relays import SimRelays
from rollweave_sim.rollouts import Rollouts
from rollweave_sim.trainer import SimTrainer
from rollweave_sim.workers import SimWorkers

PREDICTION_S = (0.103 + 0.15 + 0.26 + 0.099 + 0.15 + 0.27 + 0.104 + 0.16 + 0.28) / 9
"""Seconds of a prediction by Heddle's 0.6B regressor (Heddle Table 1): mean over three
models and three tasks (0.10 to 0.28).
"""


class SimPredictor:
    """A predictor, by its name in `ablation.changes`.

    Raises ConfigError for `lm`, which needs text.
    """

    def __init__(self, *, clock: Clock, post: Callable[[e.Event], None], name: str) -> None:
        if name == "lm":
            raise ConfigError(
                "ablation.changes must not have lm in a simulation, which has no "
                "text to read, got lm"
            )
        self._clock, self._post = clock, post
        self._make = functools.partial(build_regressor, name)
        self.predictor = ProgressivePredictor(self._make)
        self._pending: dict[int, Question] = {}  # pending requests by number
        self._answers: dict[int, float] = {}
        self._number = 0
        self._life = 0

    def predict(self, command: c.Predict) -> None:
        """Request a prediction; the answer arrives `PREDICTION_S` later.

        Requests made before the first is due are computed together.
        """
        self._number += 1
        number, life = self._number, self._life
        self._pending[number] = self.predictor.remember(
            (command.trajectory_id, command.attempt), command.context
        )
        self._clock.after(PREDICTION_S, lambda: self._due(command, number, life))

    def harvest(self, command: c.Harvest) -> None:
        """Record a finished attempt."""
        self.predictor.observe((command.trajectory_id, command.attempt), command.output_tokens)

    def fit(self, command: c.FitPredictor) -> None:
        """Refit after a training step.

        A fit takes no simulated time; the previous regressor answers earlier requests.
        """
        del command
        self._compute()
        self.predictor.fit()

    def drop(self) -> None:
        """Drop all state, as a child of a lost controller: no answer comes, and its
        successor starts without harvest.
        """
        self._life += 1
        self._pending.clear()
        self._answers.clear()
        self.predictor = ProgressivePredictor(self._make)

    def _due(self, command: c.Predict, number: int, life: int) -> None:
        if life != self._life:
            return
        if number in self._pending:
            self._compute()
        self._post(
            e.PredictionReady(
                trajectory_id=command.trajectory_id,
                attempt=command.attempt,
                turn=command.turn,
                remaining_tokens=self._answers.pop(number),
            )
        )

    def _compute(self) -> None:
        """Compute all pending requests in one product: for trees, one alone costs as
        much as hundreds.
        """
        values = self.predictor.estimate(list(self._pending.values()))
        self._answers.update(zip(self._pending, values, strict=True))
        self._pending.clear()


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
            c.MeasureGroups: trainer.measure,
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
