"""What each command of the core does in the simulated world.

One line a command, as in `runtime/effects.py`.
"""

from collections.abc import Callable
from typing import Protocol, assert_never

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


class Listener(Protocol):
    """Who is told what the run says about itself."""

    def warned(self, command: c.Warn) -> None:
        """A component ails."""

    def evaluated(self, command: c.RecordEvaluation) -> None:
        """An evaluation is complete."""

    def best(self, command: c.MarkBest) -> None:
        """A checkpoint is the best so far."""


class Effects:
    """Executes commands.

    `finish` is called once, with the error or "", when the core says that the run is
    over.
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
        predictor: SimPredictor,
        limits: Callable[[str], Limits],
        listener: Listener,
        finish: Callable[[str], None],
    ) -> None:
        self._clock, self._post, self._rollouts, self._fleet, self._trainer = (
            clock,
            post,
            rollouts,
            fleet,
            trainer,
        )
        self._relays = relays
        self._predictor, self._limits, self._listener, self._finish = (
            predictor,
            limits,
            listener,
            finish,
        )
        self._timer = 0

    def execute(self, command: c.Command) -> None:
        """Begin what the command asks for."""
        match command:
            case c.StartTurn():
                self._rollouts.start_turn(command)
            case c.AbortTurn():
                self._rollouts.abort_turn(command)
            case c.Predict():
                self._predictor.predict(command)
            case c.Harvest():
                self._predictor.harvest(command)
            case c.StartInit():
                self._rollouts.start_init(command)
            case c.StartRun():
                self._rollouts.start_run(command)
            case c.StartEval():
                self._rollouts.start_eval(command)
            case c.CancelTrajectory():
                self._rollouts.cancel(command)
            case c.Evict():
                self._rollouts.evict(command)
            case c.DrawTask():
                self._draw(command)
            case c.SetTimer(at=at):
                self._clock.cancel(self._timer)
                self._timer = self._clock.at(at, lambda: self._post(e.TimerFired()))
            case c.TrainStep():
                self._trainer.train(command)
            case c.MeasureRatios():
                self._trainer.measure(command)
            case c.PublishWeights():
                self._trainer.publish(command)
            case c.FetchWeights():
                self._relays.take(command)
            case c.SaveCheckpoint():
                self._trainer.save(command)
            case c.RestartTrainer():
                self._trainer.restart(command)
            case _:
                self._execute_rare(command)

    def _execute_rare(
        self,
        command: c.RerankTurn
        | c.Migrate
        | c.FitPredictor
        | c.StartEngine
        | c.SuspendEngine
        | c.LoadWeights
        | c.ResumeEngine
        | c.RestartEngine
        | c.RemoveEngine
        | c.RestartRelay
        | c.RemoveRelay
        | c.RecordEvaluation
        | c.MarkBest
        | c.Deliver
        | c.Warn
        | c.Finish,
    ) -> None:
        match command:
            case c.RerankTurn():
                self._rollouts.rerank(command)
            case c.Migrate():
                self._rollouts.migrate(command)
            case c.FitPredictor():
                self._predictor.fit(command)
            case c.StartEngine():
                self._fleet.add(command)
            case c.SuspendEngine():
                self._fleet.suspend(command)
            case c.LoadWeights():
                self._fleet.load(command)
            case c.ResumeEngine():
                self._fleet.resume(command)
            case c.RestartEngine():
                self._fleet.restart(command)
            case c.RemoveEngine():
                self._fleet.remove(command)
            case c.RestartRelay():
                self._relays.restart(command)
            case c.RemoveRelay():
                self._relays.remove(command)
            case c.RecordEvaluation():
                self._listener.evaluated(command)
            case c.Deliver(trajectory_id=trajectory_id):  # whoever asked for it takes it at once
                self._post(e.RolloutAcknowledged(trajectory_id=trajectory_id))
            case c.MarkBest():
                self._listener.best(command)
            case c.Warn():
                self._listener.warned(command)
            case c.Finish(error=error):
                self._clock.cancel(self._timer)
                self._finish(error)
            case _:
                assert_never(command)

    def _draw(self, command: c.DrawTask) -> None:
        task = Task(
            id=TaskId(f"{command.name}-{command.purpose}-{command.index}"),
            env=command.name,
            seed=command.index,
            tag=command.name,
            limits=self._limits(command.name),
        )
        self._post(e.GroupSubmitted(group_id=command.group_id, task=task))
