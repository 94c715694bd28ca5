"""What each command of the core does in the live world. One line a command; the work is
done by those who own the things.

Invariants: `execute` never blocks and never raises for what the world did; what cannot
be done is answered by the failing event, by whoever tried. After `Finish` nothing is
executed.
"""

import asyncio
import functools
from collections.abc import Callable
from typing import Protocol, assert_never

from rollweave.rollout.pipeline import Pipeline
from rollweave.runtime.supervisors.engines import Fleet
from rollweave.runtime.tasks import Tasks, on_thread
from rollweave.schema import commands as c
from rollweave.schema.events import DrawFailed, Event, GroupSubmitted, TimerFired
from rollweave.schema.prediction import LengthContext
from rollweave.schema.text import shortened
from rollweave.schema.work import Purpose, Task

DRAW_S = 60.0
"""Seconds that drawing one task may take: a task source may fetch, but it must not hold
the run.
"""


class Draws(Protocol):
    """What effects need of the task source (`envs/tasks.py`).

    May run the user's code; called from a worker thread.
    """

    def draw(self, name: str, index: int, purpose: Purpose) -> Task:
        """Task number `index` of domain `name`."""


class Trains(Protocol):
    """What effects need of whoever keeps the trainer
    (`runtime/supervisors/trainer.py`).
    """

    def train(self, command: c.TrainStep) -> None:
        """Train a mini-batch."""

    def measure(self, command: c.MeasureRatios) -> None:
        """Measure ratios of groups in the buffer."""

    def publish(self, command: c.PublishWeights) -> None:
        """Publish the trainer's weights."""

    def save(self, command: c.SaveCheckpoint) -> None:
        """Save a checkpoint."""

    def restart(self, command: c.RestartTrainer) -> None:
        """Start the trainer again."""


class Relays(Protocol):
    """What effects need of whoever keeps the relays (`runtime/supervisors/relays.py`)."""

    def take(self, command: c.FetchWeights) -> None:
        """Have a relay get weights."""

    def restart(self, command: c.RestartRelay) -> None:
        """Start a relay again."""

    def remove(self, command: c.RemoveRelay) -> None:
        """End a relay for good."""


class Predicts(Protocol):
    """What effects need of whoever predicts lengths
    (`runtime/supervisors/predictor.py`).
    """

    def predict(self, command: c.Predict, context: LengthContext) -> None:
        """Answer with `PredictionReady`, or not at all."""

    def harvest(self, command: c.Harvest) -> None:
        """An attempt is over."""

    def fit(self, command: c.FitPredictor) -> None:
        """Learn."""


class Listener(Protocol):
    """Who is told what the run says about itself."""

    def warned(self, command: c.Warn) -> None:
        """A component ails."""

    def evaluated(self, command: c.RecordEvaluation) -> None:
        """An evaluation is complete."""

    def best(self, command: c.MarkBest) -> None:
        """A checkpoint is the best so far."""

    def delivered(self, command: c.Deliver) -> None:
        """A trajectory that a service was asked for is over."""


class Timer:
    """The one timer of the core. Setting it again replaces it."""

    def __init__(self, clock: Callable[[], float], post: Callable[[Event], None]) -> None:
        self._clock, self._post = clock, post
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at: float) -> None:
        self.cancel()
        delay = max(0.0, at - self._clock())
        self._handle = asyncio.get_running_loop().call_later(delay, self._fire)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._post(TimerFired())


class Effects:
    """Executes commands.

    `finish` is called once, with the error or "", when the core says that the run is
    over.
    """

    def __init__(
        self,
        *,
        pipeline: Pipeline,
        fleet: Fleet,
        seat: Trains,
        relays: Relays,
        predictor: Predicts,
        draws: Draws,
        listener: Listener,
        tasks: Tasks,
        post: Callable[[Event], None],
        clock: Callable[[], float],
        finish: Callable[[str], None],
    ) -> None:
        self._pipeline, self._fleet, self._seat, self._predictor, self._draws = (
            pipeline,
            fleet,
            seat,
            predictor,
            draws,
        )
        self._relays = relays
        self._listener, self._tasks, self._post, self._finish = listener, tasks, post, finish
        self._timer = Timer(clock, post)
        self._drawing = asyncio.Lock()

    def execute(self, command: c.Command) -> None:
        """Begin what the command asks for."""
        match command:
            case c.StartTurn():
                self._pipeline.start_turn(command)
            case c.AbortTurn():
                self._pipeline.abort_turn(command)
            case c.RerankTurn():
                self._pipeline.rerank(command)
            case c.Migrate():
                self._fleet.migrate(
                    command, self._pipeline.context_of(command.trajectory_id, command.attempt)
                )
            case c.Predict():
                self._predictor.predict(command, self._pipeline.length_context(command))
            case c.Harvest():
                self._predictor.harvest(command)
            case c.StartInit():
                self._pipeline.start_init(command)
            case c.StartRun():
                self._pipeline.start_run(command)
            case c.StartEval():
                self._pipeline.start_eval(command)
            case c.CancelTrajectory():
                self._pipeline.cancel(command)
            case c.Evict():
                self._pipeline.evict(command)
            case c.DrawTask():
                self._tasks.spawn(self._draw(command), f"draw {command.group_id}")
            case c.SetTimer(at=at):
                self._timer.set(at)
            case c.TrainStep():
                self._seat.train(command)
            case c.MeasureRatios():
                self._seat.measure(command)
            case c.PublishWeights():
                self._seat.publish(command)
            case c.FetchWeights():
                self._relays.take(command)
            case c.SaveCheckpoint():
                self._seat.save(command)
            case c.RestartTrainer():
                self._seat.restart(command)
            case _:
                self._execute_rare(command)

    def _execute_rare(
        self,
        command: c.FitPredictor
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
            case c.MarkBest():
                self._listener.best(command)
            case c.Deliver():
                self._listener.delivered(command)
            case c.Warn():
                self._listener.warned(command)
            case c.Finish(error=error):
                self._timer.cancel()
                self._finish(error)
            case _:
                assert_never(command)

    async def _draw(self, command: c.DrawTask) -> None:
        """Draw off the loop, one at a time: task sources are the user's code, slow
        perhaps, and not thread-safe.
        """
        async with self._drawing:
            try:
                async with asyncio.timeout(DRAW_S):
                    draw = functools.partial(
                        self._draws.draw, command.name, command.index, command.purpose
                    )
                    task = await on_thread(draw, f"draw {command.group_id}")
            except Exception as error:
                text = f"{command.name} #{command.index}: {type(error).__name__}: {error}"
                self._post(DrawFailed(group_id=command.group_id, error=shortened(text)))
                return
        self._post(GroupSubmitted(group_id=command.group_id, task=task))
