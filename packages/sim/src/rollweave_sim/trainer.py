"""The simulated trainer: steps, publications and checkpoints take the time of its cost
model.

Invariant: `checkpoints` are the readable steps: complete, and not pruned.
"""

import math
import random
from collections.abc import Callable, Mapping

from rollweave.core.policy.modes import origin
from rollweave.record.trace import TRAINER, Trace
from rollweave.schema import commands as c
from rollweave.schema import events as e
from rollweave.schema.base import TrajectoryId
from rollweave.schema.work import Measures
from rollweave_sim.clock import Clock
from rollweave_sim.cost import TrainerCosts
from rollweave_sim.rollouts import Scored

RESTART_S = 120.0
"""Seconds until a restarted trainer has its checkpoint. Assumption: process start and
reading of the shards.
"""

RATIO_SIGMA = 0.05
"""Spread of the logarithm of a group's ratio per version of age, plus one for the
engine's arithmetic. Assumption.
"""

ENTROPY_NATS = 0.5
"""Mean of the entropies of groups, which are exponentially distributed. Assumption."""

TD_ERROR = 0.3
"""Mean of the absolute TD errors of groups, which are exponentially distributed.
Assumption.
"""


class SimTrainer:
    """A trainer process. `scored` are the trajectories in the store; `critic` says
    whether it has one. `of_ranks` returns the costs of a number of ranks, if that
    changes.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        post: Callable[[e.Event], None],
        cost: TrainerCosts,
        scored: Mapping[TrajectoryId, Scored],
        trace: Trace | None,
        critic: bool,
        of_ranks: Callable[[int], TrainerCosts] | None = None,
    ) -> None:
        self._clock, self._post, self._cost, self._scored, self._trace = (
            clock,
            post,
            cost,
            scored,
            trace,
        )
        self._critic, self._of_ranks = critic, of_ranks
        self.epoch = 0
        self._ticket = self._writing = 0
        # What the process does: seconds of work left at a time, and what ends it.
        self._slowdown = 1.0
        self._work: tuple[float, float, Callable[[], None]] | None = None
        self._alive = False
        self.checkpoints: set[int] = set()
        self.refuse_step = self.refuse_save = self.refuse_restore = False  # the next command fails
        self.trained: Callable[[c.TrainStep, float], None] = lambda command, seconds: None

    @property
    def computing(self) -> int:
        """1 while the process computes, else 0."""
        return int(self._work is not None)

    def slow_down(self, factor: float) -> None:
        """Let all work, also the present, take so many times its seconds from now
        on.
        """
        former, self._slowdown = self._slowdown, factor
        if self._work is not None:
            left, since, done = self._work
            self._clock.cancel(self._ticket)
            self._begin_work(left - (self._clock.now - since) / former, done)

    def _begin_work(self, seconds: float, done: Callable[[], None]) -> None:
        self._work = seconds, self._clock.now, done
        self._ticket = self._clock.after(self._slowdown * seconds, done)

    def start(self, *, epoch: int = 0, step: int = 0, seconds: float = 0.0) -> None:
        """Start a trainer process at `step`."""
        self._begin(e.TrainerReady(epoch=epoch, step=step), seconds)

    def restart(self, command: c.RestartTrainer) -> None:
        step, note = command.step, ""
        if self.refuse_restore and command.fallback is not None:
            step, note = command.fallback, f"checkpoint {command.step} is damaged"
            self.checkpoints.discard(command.step or 0)
        self.refuse_restore = False
        if self._of_ranks is not None:
            self._cost = self._of_ranks(len(command.ranks))
        self._begin(e.TrainerReady(epoch=command.epoch, step=step or 0, note=note), RESTART_S)

    def train(self, command: c.TrainStep) -> None:
        seconds = self._cost.step_s(**self._amounts(command.groups))
        self.trained(command, seconds)
        done = e.StepTrained(epoch=self.epoch, step=command.step, part=command.part)
        self._do(
            f"train {command.step}.{command.part}", seconds, self._refused(command.step) or done
        )

    def measure(self, command: c.MeasureGroups) -> None:
        """Draw measures: the older a group, the farther is its ratio from 1; entropies
        and TD errors depend on nothing. They take one forward pass.
        """
        groups = tuple(
            e.GroupMeasures(id=group.id, measures=self._measures(group, command.step))
            for group in command.groups
        )
        done = e.GroupsMeasured(
            epoch=self.epoch, step=command.step, part=command.part, groups=groups
        )
        seconds = self._cost.forward_s(**self._amounts(command.groups))
        self._do(
            f"measure {command.step}.{command.part}", seconds, self._refused(command.step) or done
        )

    def _amounts(self, groups: tuple[c.GroupRef, ...]) -> dict[str, int]:
        """Return the tokens of these groups and their attention spans, as the cost
        model names them.
        """
        lengths = [
            self._scored[member].tokens for group in groups for member in group.trajectory_ids
        ]
        spans = (length * (length + 1) // 2 for length in lengths)
        return {"tokens": sum(lengths), "context": sum(spans)}

    def _measures(self, group: c.GroupRef, step: int) -> Measures:
        age = step - min(
            origin(self._scored[member].initiated, group.restored_to.get(member))
            for member in group.trajectory_ids
        )
        ratio = random.Random(f"ratio/{group.id}/{step}").gauss(0.0, RATIO_SIGMA * (1 + age))
        entropy = random.Random(f"entropy/{group.id}/{step}").expovariate(1 / ENTROPY_NATS)
        error = random.Random(f"td_error/{group.id}/{step}").expovariate(1 / TD_ERROR)
        return Measures(
            ratio=math.exp(ratio), entropy=entropy, td_error=error if self._critic else None
        )

    def _refused(self, step: int) -> e.TrainFailed | None:
        """Return the error that an injected fault answers with, once."""
        if not self.refuse_step:
            return None
        self.refuse_step = False
        return e.TrainFailed(epoch=self.epoch, step=step, error="out of memory", nonfinite=False)

    def publish(self, command: c.PublishWeights) -> None:
        done = e.WeightsPublished(
            epoch=self.epoch, version=command.version, publication_id=command.publication_id
        )
        self._do(f"publish v{command.version}", self._cost.publish_s(), done)

    def save(self, command: c.SaveCheckpoint) -> None:
        saved: e.Event = e.CheckpointSaved(epoch=self.epoch, step=command.step)
        if self.refuse_save:
            self.refuse_save = False
            saved = e.CheckpointFailed(
                epoch=self.epoch, step=command.step, error="the disk is full"
            )
        copied = e.CheckpointCopied(epoch=self.epoch, step=command.step)
        self._do(
            f"copy {command.step}", self._cost.copy_s(), copied, lambda: self._write(command, saved)
        )

    def _write(self, command: c.SaveCheckpoint, event: e.Event) -> None:
        """Write the checkpoint while the trainer continues."""
        start = self._clock.now

        def done() -> None:
            if self._trace is not None:
                self._trace.span(
                    TRAINER, "checkpoint", f"save {command.step}", start, self._clock.now
                )
            self._saved(command, event)
            self._post(event)

        self._writing = self._clock.after(self._cost.checkpoint_s(), done)

    def _saved(self, command: c.SaveCheckpoint, event: e.Event) -> None:
        if isinstance(event, e.CheckpointSaved):
            self.checkpoints = {step for step in self.checkpoints if step in command.keep} | {
                command.step
            }

    def lose(self, error: str) -> None:
        """Kill the process with its current work."""
        if self._alive:
            self.drop()
            self._post(e.TrainerLost(epoch=self.epoch, error=error))

    def drop(self) -> None:
        """End the process without a report."""
        self._clock.cancel(self._ticket)
        self._clock.cancel(self._writing)
        self._alive, self._work = False, None

    def _begin(self, ready: e.TrainerReady, seconds: float) -> None:
        self.drop()
        self.epoch, self._alive = ready.epoch, True
        self._do("start", seconds, ready)

    def _do(
        self, name: str, seconds: float, event: e.Event, then: Callable[[], None] = lambda: None
    ) -> None:
        if not self._alive:
            return  # no process receives the command
        start = self._clock.now

        def done() -> None:
            self._work = None
            if self._trace is not None:
                self._trace.span(TRAINER, "trainer", name, start, self._clock.now)
            then()
            self._post(event)

        self._begin_work(seconds, done)
