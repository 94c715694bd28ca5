"""A short simulation of a configuration: its steady state, without the beginning and
the end of a run, perhaps with a part that takes less time, and in one of several
processes.

A trial ends when enough training steps have begun, long before the run would; so no
step is faster because nothing follows it.
"""

import contextlib
import math
import multiprocessing
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

from msgspec.structs import replace

from rollweave.core.policy.modes import preset
from rollweave.io.boot import serve_parent
from rollweave.schema.base import Struct
from rollweave.schema.config.rollout import ModeName
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import RollweaveError
from rollweave_sim.candidates import Prediction
from rollweave_sim.run import SimMetrics
from rollweave_sim.workload import Plan, Workload
from rollweave_sim.world import Costs, World, costs_of

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
    what the buffer holds: a batch and what runs at once.
    """
    rollout = config.rollout
    if rollout.mode is not ModeName.DECOUPLED:
        return preset(rollout.mode, rollout.alpha).window or 0
    batch = rollout.groups_per_step * rollout.group_size
    return 1 + math.ceil(rollout.places.run / batch)


def try_out(
    config: RunConfig,
    length: Length,
    *,
    work: Mapping[str, Workload] | None = None,
    costs: Costs | None = None,
    cores: int = 0,
) -> Prediction:
    """Return the figures of `length`.

    `work`, `costs` and `cores` are those of `World`. Raises ConfigError, and
    RollweaveError for a run that ends before it has trained these steps.
    """
    wave = ahead(config)
    warm = length.warm + wave
    wanted = length.trained(wave)
    run = config.run.model_copy(update={"steps": wanted + MORE_STEPS + wave})
    evaluation = config.eval.model_copy(update={"every": 0, "final_episodes": 0})
    config = config.model_copy(update={"run": run, "eval": evaluation})
    lines: list[dict[str, Any]] = []

    def on_line(line: dict[str, Any]) -> None:
        if line["kind"] == "step":
            lines.append(line)

    metrics = SimMetrics(on_line=on_line)
    plans = None if work is None else dict(work)
    world = World(config, observer=metrics, work=plans, costs=costs, cores=cores)
    metrics.watch(world)
    world.start()
    while len(lines) < wanted:
        if world.over is not None:
            raise RollweaveError(
                f"the run ended after {len(lines)} steps: {world.over or 'without an error'}"
            )
        world.step()
    return prediction_of(lines[warm + 1 :])


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
    sums: Counter[str] = Counter()
    for causes in seconds:
        sums.update(causes)
    total = sum(sums.values())
    return {cause: value / total for cause, value in sorted(sums.items()) if value > 0}


def together(predictions: Sequence[Prediction]) -> Prediction:
    """Return the mean of one candidate's predictions under several seeds, each over
    equally many steps, and the range of its seconds a step.
    """

    def mean(name: str) -> float:
        return statistics.fmean(getattr(one, name) for one in predictions)

    def shares(part: str) -> dict[str, float]:
        each = [getattr(one, part) for one in predictions]
        causes = sorted({cause for one in each for cause in one})
        return {cause: statistics.fmean(one.get(cause, 0.0) for one in each) for cause in causes}

    means = ("step_s", "step_tokens", "staleness", "kv_used", "dropped")
    return replace(
        predictions[0],
        **{name: mean(name) for name in means},
        stalest=max(one.stalest for one in predictions),
        engines=shares("engines"),
        trainer=shares("trainer"),
        fastest_s=min(one.fastest_s for one in predictions),
        slowest_s=max(one.slowest_s for one in predictions),
    )


# Parts that take less time.

FASTER = 0.5
"""Factor of a part's time in the question what limits a candidate."""

PARTS: Mapping[str, Sequence[str]] = {
    "engines": ("step_s", "decode_s", "move_s"),
    "trainer": ("step_s", "forward_s"),
    "environment": (),
    "weights": ("publish_s", "load_s", "hop_s", "delta_s", "lag_s", "beside_s", "swap_s"),
}
"""The parts of a run (environments with rewards are one), each with the methods of the
costs that return its seconds.
"""


class _FasterCosts:
    """Costs some of whose methods return `FASTER` times their seconds."""

    def __init__(self, cost: Any, methods: Sequence[str]) -> None:
        self._cost, self._methods = cost, methods

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._cost, name)
        if name not in self._methods:
            return value
        return lambda *args, **named: FASTER * value(*args, **named)


class _FasterWork:
    """A workload whose environments, their starts and rewards take `FASTER` times their
    seconds.
    """

    def __init__(self, work: Workload) -> None:
        self._work = work

    def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
        plan = self._work.plan(index=index, member=member, attempt=attempt, seed=seed)
        turns = tuple(replace(turn, env_s=FASTER * turn.env_s) for turn in plan.turns)
        return replace(
            plan, init_s=FASTER * plan.init_s, reward_s=FASTER * plan.reward_s, turns=turns
        )


def faster(
    part: str, work: Mapping[str, Workload], costs: Costs
) -> tuple[Mapping[str, Workload], Costs]:
    """Return the workloads and costs of a run in which a part takes less time."""
    engines, trainer = costs
    methods = PARTS[part]
    if part == "environment":
        return {name: _FasterWork(one) for name, one in work.items()}, costs
    if part == "engines":
        quick = {key: cast(Any, _FasterCosts(cost, methods)) for key, cost in engines.items()}
        return work, (quick, trainer)
    return work, (engines, cast(Any, _FasterCosts(trainer, methods)))


# Trials in several processes.


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A configuration, how long it is simulated, and which of the `PARTS` takes less
    time ("" for none). Without `costs` they are those of its hardware. `cores` are
    those of `World`.
    """

    config: RunConfig
    length: Length
    faster: str = ""
    costs: Costs | None = None
    cores: int = 0


Result = Prediction | str
"""The figures of a trial, or why it has none."""

_work: dict[str, Workload] = {}
"""The workloads of the trials of a worker."""


@contextlib.contextmanager
def trials_in(
    processes: int, work: Mapping[str, Workload]
) -> Iterator[Callable[[Sequence[Trial]], Iterable[Result]]]:
    """Yield what returns the results of trials in their order, with one workload for
    each task domain. Of one process, this one runs the trials. No process outlives the
    context, or this process.
    """
    if processes == 1:
        yield lambda trials: [run_trial(trial, work) for trial in trials]
        return
    context = multiprocessing.get_context("spawn")
    begun = (os.getpid(), dict(work))
    pool = ProcessPoolExecutor(processes, context, initializer=_begin, initargs=begun)
    try:
        yield lambda trials: pool.map(_run, trials)
    finally:
        pool.shutdown(cancel_futures=True)


def run_trial(trial: Trial, work: Mapping[str, Workload]) -> Result:
    """Run one trial in this process."""
    try:
        costs = trial.costs or costs_of(trial.config)
        if trial.faster:
            work, costs = faster(trial.faster, work, costs)
        return try_out(trial.config, trial.length, work=work, costs=costs, cores=trial.cores)
    except RollweaveError as error:
        return str(error)


def _begin(parent: int, work: dict[str, Workload]) -> None:
    """Prepare a worker."""
    serve_parent(parent)
    _work.update(work)


def _run(trial: Trial) -> Result:
    return run_trial(trial, _work)
