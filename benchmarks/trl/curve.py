"""The learning of one training: its steps and evaluations."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.runs import MeasuredRun


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A held-out evaluation: success after `step` steps and `seconds` of training."""

    step: int
    seconds: float
    success: float


@dataclass(frozen=True, kw_only=True)
class LearningCurve:
    """One training: the seconds of its steps without the first, and its evaluations, of
    which the first with the `target` is the last one.
    """

    step_s: Sequence[float]
    curve: Sequence[Evaluation]
    target: float

    @classmethod
    def of(cls, run: MeasuredRun, target: float) -> "LearningCurve":
        """Return what a run of ours has learned."""
        curve = [
            Evaluation(
                step=int(line["step"]),
                seconds=float(line["at"]) - run.ready_s,
                success=min(line["success"].values()),
            )
            for line in run.data.evaluations
            if not line["final"] and line["success"]
        ]
        return cls(
            step_s=[float(line["wall_s"]) for line in run.data.steps[1:]],
            curve=curve,
            target=target,
        )

    @property
    def steps(self) -> int | None:
        """Return the steps to the target; None if it was not reached."""
        reached = self._reached
        return None if reached is None else reached.step

    @property
    def seconds(self) -> float | None:
        """Return the seconds to the target; None if it was not reached."""
        reached = self._reached
        return None if reached is None else reached.seconds

    @property
    def _reached(self) -> Evaluation | None:
        return next((one for one in self.curve if one.success >= self.target), None)
