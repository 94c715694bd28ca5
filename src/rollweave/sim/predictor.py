"""The predictor of the simulated world: the live `ProgressivePredictor` with a modeled
latency.

Invariants: the same commands at the same times give the same events at the same times.
Simulated trajectories have no text, so plans are empty and regressors that read text
have no input. Fits are not modeled: they take no simulated time, and happen between two
predictions.
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
"""Seconds of a prediction by Heddle's 0.6B regressor (Heddle Table 1): mean over three
models and three tasks (0.10 to 0.28).
"""


class SimPredictor:
    """A predictor, by its name in `ablation.policies`.

    Raises ConfigError for `lm`, which needs text.
    """

    def __init__(self, *, clock: Clock, post: Callable[[e.Event], None], name: str) -> None:
        if name == "lm":
            raise ConfigError(
                "ablation.policies must not have lm in a simulation, which has no "
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
