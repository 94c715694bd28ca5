"""The predictor of the simulated world: the live one's `ProgressivePredictor`, with a
modelled latency.

Invariants: the same commands at the same times give the same events at the same times.
Simulated trajectories hold no text, so plans are empty and regressors that read them
have nothing to read. What is not modelled: fits take no simulated time, and happen
between two predictions.
"""

import functools
from collections.abc import Callable

from rollweave.core.policy.predict import ProgressivePredictor, Question
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.errors import ConfigError
from rollweave.sim.clock import Clock
from rollweave.train.lengths import build_regressor

PREDICTION_S = (0.103 + 0.15 + 0.26 + 0.099 + 0.15 + 0.27 + 0.104 + 0.16 + 0.28) / 9
"""Heddle Table 1: seconds of a prediction by its regressor of 0.6B, mean over three
models and three tasks (0.10 to 0.28).
"""


class SimPredictor:
    """`name` is that of `rollout.predictor`.

    Raises ConfigError for `lm`, which a simulation cannot have.
    """

    def __init__(self, *, clock: Clock, post: Callable[[e.Event], None], name: str) -> None:
        if name == "lm":
            raise ConfigError(
                "rollout.predictor must not be lm in a simulation, which has no "
                "text to read, got 'lm'"
            )
        self._clock, self._post = clock, post
        self._make = functools.partial(build_regressor, name)
        self.predictor = ProgressivePredictor(self._make)
        self._asked: dict[int, Question] = {}  # not computed yet, by number
        self._answers: dict[int, float] = {}
        self._number = 0
        self._life = 0

    def predict(self, command: c.Predict) -> None:
        """Ask now; the answer comes `PREDICTION_S` later.

        What is asked until the first is due is computed at once.
        """
        self._number += 1
        number, life = self._number, self._life
        self._asked[number] = self.predictor.remember(
            (command.trajectory_id, command.attempt), command.context
        )
        self._clock.after(PREDICTION_S, lambda: self._due(command, number, life))

    def harvest(self, command: c.Harvest) -> None:
        """An attempt is over."""
        self.predictor.observe((command.trajectory_id, command.attempt), command.output_tokens)

    def fit(self, command: c.FitPredictor) -> None:
        """A step is trained.

        Takes no simulated time; what was asked before is answered by the former
        regressor.
        """
        del command
        self._compute()
        self.predictor.fit()

    def drop(self) -> None:
        """The controller is lost, and its predictor with it: no answer comes, and the
        next one has harvested nothing.
        """
        self._life += 1
        self._asked.clear()
        self._answers.clear()
        self.predictor = ProgressivePredictor(self._make)

    def _due(self, command: c.Predict, number: int, life: int) -> None:
        if life != self._life:
            return
        if number in self._asked:
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
        """All that is asked, in one product: for trees, a question alone costs as much
        as hundreds.
        """
        values = self.predictor.estimate(list(self._asked.values()))
        self._answers.update(zip(self._asked, values, strict=True))
        self._asked.clear()
