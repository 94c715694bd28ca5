"""A short simulation of a configuration: its steady state, without the beginning and
the end of a run.

A trial ends when enough training steps have begun, long before the run would; so no
step is faster because nothing follows it.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rollweave.core.policy.ratio import Prediction
from rollweave.schema.base import Struct
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import RollweaveError
from rollweave.sim.metrics import SimMetrics
from rollweave.sim.workload import Workload
from rollweave.sim.world import Costs, World

MORE_STEPS = 16
"""Steps of the run beyond those that are simulated: rollouts do not end with them."""


class Length(Struct, frozen=True, kw_only=True):
    """The length of a trial: its first steps and `warm` more are left out of the
    figures, then at least `steps` are measured, and at least one wave (`ahead`).
    """

    warm: int
    steps: int

    def batches(self, ahead: int) -> int:
        """Return about how many batches are rolled out where rollouts may be `ahead`
        steps of training.
        """
        return self.warm + self.steps + 1 + 2 * ahead

    def trained(self, ahead: int) -> int:
        """Return the number of training steps of a trial, those left out included."""
        return self.warm + ahead + max(self.steps, ahead + 1) + 1


def ahead(config: RunConfig) -> int:
    """Return the number of steps by which rollouts may be ahead of training.

    As many steps pass until no batch is one of the beginning, which starts that many
    batches at once; they come in such waves afterwards, too. In mode decoupled it is
    what the buffer holds: by default a batch and what runs at once.
    """
    rollout = config.rollout
    match rollout.mode:
        case ModeName.SYNC:
            return 0
        case ModeName.ONE_STEP | ModeName.STREAM:
            return 1
        case ModeName.PARTIAL | ModeName.BOUNDED:
            return rollout.alpha
        case ModeName.DECOUPLED:
            if config.buffer.groups is not None:
                return max(2, math.ceil(config.buffer.groups / rollout.groups_per_step))
            batch = rollout.groups_per_step * rollout.group_size
            return 1 + math.ceil(rollout.max_running / batch)


def try_out(
    config: RunConfig,
    length: Length,
    *,
    work: Mapping[str, Workload] | None = None,
    costs: Costs | None = None,
    controller_s: float = 0.0,
) -> tuple[Prediction, float]:
    """Return the figures of `length`, and the engines' mean share of time in steps.

    `work`, `costs` and `controller_s` are those of `World`. Raises ConfigError, and
    RollweaveError for a run that ends before it has trained these steps.
    """
    wave = ahead(config)
    warm = length.warm + wave
    wanted = length.trained(wave)
    run = config.run.model_copy(update={"steps": wanted + MORE_STEPS + wave})
    evaluation = config.eval.model_copy(update={"every": 0, "final_episodes": 0})
    config = config.model_copy(update={"run": run, "eval": evaluation})
    lines: list[dict[str, Any]] = []
    marks: list[tuple[float, float]] = []  # the time and the engines' busy seconds at each step

    def on_line(line: dict[str, Any]) -> None:
        if line["kind"] == "step":
            lines.append(line)
            marks.append((world.clock.now, _busy_s(world)))

    metrics = SimMetrics(on_line=on_line)
    world = World(
        config,
        observer=metrics,
        work=dict(work) if work is not None else None,
        costs=costs,
        controller_s=controller_s,
    )
    metrics.watch(world)
    world.start()
    while len(lines) < wanted:
        if world.over is not None:
            raise RollweaveError(
                f"the run ended after {len(lines)} steps: {world.over or 'without an error'}"
            )
        world.step()
    (began, busy_before), (ended, busy_after) = marks[warm], marks[-1]
    engine_s = max(1e-9, ended - began) * max(1, len(world.fleet.nodes))
    return prediction_of(lines[warm + 1 :]), (busy_after - busy_before) / engine_s


def _busy_s(world: World) -> float:
    nodes = world.fleet.nodes.values()
    return sum(node.engine.busy_s for node in nodes if node.engine is not None)


def prediction_of(lines: Sequence[Mapping[str, Any]]) -> Prediction:
    """Return the figures of successive steps, from their lines of metrics."""
    seconds = [float(line["wall_s"]) for line in lines]
    ages: Counter[int] = Counter()
    for line in lines:
        ages.update({int(age): count for age, count in line["staleness"].items()})
    started = sum(line["started"] for line in lines)
    lost = sum(line["dropped"] + line["cancelled"] for line in lines)
    mean = statistics.fmean(seconds)
    return Prediction(
        step_s=mean,
        step_tokens=statistics.fmean(line["batch_tokens"] for line in lines),
        staleness=sum(age * count for age, count in ages.items()) / max(1, ages.total()),
        stalest=max(ages, default=0),
        engines=_shares([line["idle"]["engines"] for line in lines]),
        trainer=_shares([line["idle"]["trainer"] for line in lines]),
        kv_used=statistics.fmean(line["kv_used"] for line in lines),
        dropped=lost / max(1, started),
        fastest_s=mean,
        slowest_s=mean,
    )


def _shares(seconds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the share of each activity or cause in the sum of these seconds."""
    sums: dict[str, float] = {}
    for causes in seconds:
        for cause, value in causes.items():
            sums[cause] = sums.get(cause, 0.0) + value
    total = sum(sums.values())
    return {cause: value / total for cause, value in sorted(sums.items()) if value > 0}


def together(predictions: Sequence[Prediction]) -> Prediction:
    """Return the mean of one candidate's predictions under several seeds, each over
    equally many steps, and the range of its seconds a step.
    """
    mean = statistics.fmean

    def shares(part: str) -> dict[str, float]:
        each = [getattr(prediction, part) for prediction in predictions]
        causes = sorted({cause for one in each for cause in one})
        return {cause: mean(one.get(cause, 0.0) for one in each) for cause in causes}

    return Prediction(
        step_s=mean(one.step_s for one in predictions),
        step_tokens=mean(one.step_tokens for one in predictions),
        staleness=mean(one.staleness for one in predictions),
        stalest=max(one.stalest for one in predictions),
        engines=shares("engines"),
        trainer=shares("trainer"),
        kv_used=mean(one.kv_used for one in predictions),
        dropped=mean(one.dropped for one in predictions),
        fastest_s=min(one.fastest_s for one in predictions),
        slowest_s=max(one.slowest_s for one in predictions),
    )
