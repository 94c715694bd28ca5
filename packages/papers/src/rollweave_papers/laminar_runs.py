"""Laminar's throughput experiments as runs: its placements, all systems as our modes,
and a share of the cluster at a time.

A share is every n-th engine and every n-th prompt, beside the complete trainer, which
trains n times the simulated batch. So engines and trainer have the load of the complete
cluster; a share has fewer trajectories, of which the longest is slightly shorter.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

from rollweave.core.mechanisms.cluster.workers import cluster_of
from rollweave.schema.base import Struct
from rollweave.schema.config.root import RunConfig
from rollweave_papers.cluster import ExperimentError, Setup, run_to_end, run_until
from rollweave_sim.cost import EngineCost, EngineCosts, TrainerCost
from rollweave_sim.hardware import Link, ModelShape, gpu, link, model
from rollweave_sim.hosts import NO_POOL
from rollweave_sim.run import Outcome, SimMetrics, kv_used, simulate
from rollweave_sim.training import ONE_PASS, Passes, passes_of
from rollweave_sim.world import World

PROMPTS, MEMBERS = 512, 16
"""Prompts of a batch and samples of a prompt (Laminar §8): 8,192 trajectories."""

UPDATES = 16
"""Mini-batch updates of an iteration (Laminar §8). The passes are those of GRPO without
a reference: none of the hyperparameters in App. A.3, Table 3, is a coefficient of it.
"""

CONTEXT = 2_048 + 16_384
"""Maximum tokens of a trajectory (Laminar §8)."""

CONCURRENCY = 1_024
"""Concurrent trajectories on an engine (Laminar App. A.3, of AReaL and Laminar).
Assumption for the others.
"""

ALPHA = 4
"""Bound that AReaL suggests (Laminar §8.2), here for the ∞ that §8.1 gives it."""

WARM, MEASURED = 10, 5
"""Minimum numbers of warm-up and of measured steps of Laminar (§8). Both are at least
twice the batches in flight on its engines, since engines that start together diverge
slowly. The others are in step from the second on, or once their window is filled.
"""

MIN_ENGINES = 4
"""Minimum engines of a part of Laminar's cluster, if it has so many: repacking works
among them.
"""

MODELS = {"7B": "qwen2.5-7b", "32B": "qwen2.5-32b", "72B": "qwen2.5-72b"}
SCALES = {
    "7B": (16, 32, 64, 128, 256),
    "32B": (32, 64, 128, 256, 512),
    "72B": (64, 128, 256, 512, 1024),
}
SYSTEMS = ("verl", "one-step", "stream", "AReaL", "Laminar")
MODES = {
    "verl": "sync",
    "one-step": "one_step",
    "stream": "stream",
    "AReaL": "partial",
    "Laminar": "decoupled",
}

_DISAGGREGATED = {
    "7B": ((8, 8), (8, 24), (16, 48), (32, 96), (40, 216)),
    "32B": ((16, 16), (32, 32), (48, 80), (64, 192), (80, 432)),
    "72B": ((32, 32), (64, 64), (96, 160), (192, 320), (256, 768)),
}
TRAINING_AND_ROLLOUT = {
    "one-step": _DISAGGREGATED,
    "stream": _DISAGGREGATED,
    "AReaL": {
        "7B": ((8, 8), (16, 16), (32, 32), (64, 64), (128, 128)),
        "32B": ((16, 16), (32, 32), (64, 64), (128, 128), (256, 256)),
        "72B": ((32, 32), (64, 64), (128, 128), (320, 192), (640, 384)),
    },
    "Laminar": {
        "7B": ((8, 8), (24, 8), (40, 24), (80, 48), (192, 64)),
        "32B": ((16, 16), (32, 32), (64, 64), (128, 128), (256, 256)),
        "72B": ((32, 32), (64, 64), (128, 128), (320, 192), (768, 256)),
    },
}
"""GPUs for training and for rollout in the order of `SCALES` (Laminar Table 2)."""

SHARES = {"dapo-math": 8, "tool-calling": 16}
"""Maximum number of parts of the cluster, by task; quick forms have four times as many.
"""


SAMPLE_S = 5.0
"""Seconds between two samples of the KV in use."""

QUICK_PROMPTS = 16
"""Prompts of a step, in quick forms that do not take a smaller share."""


class Point(Struct, frozen=True, kw_only=True):
    """Throughput of a system at a scale: tokens of trained trajectories per second,
    prompts included (Laminar §8).

    `share` is the simulated part of the cluster, `…_busy` the share of the run in which
    engines or trainer worked.
    """

    gpus: int
    tokens_per_s: float
    step_s: float
    share: int
    engines_busy: float
    trainer_busy: float


class Recovery(Struct, frozen=True, kw_only=True):
    """`seconds` until every engine serves again; `slowdown` of the steps, None if not
    measured.
    """

    seconds: float
    slowdown: float | None


class Repacking(Struct, frozen=True, kw_only=True):
    """Tokens of trained trajectories per second, the mean share of the KV in use, and
    how often repack freed an engine.
    """

    tokens_per_s: float
    kv_used: float
    released: int


class Sliced(TrainerCost):
    """The trainer of the complete cluster, beside one of `share` parts of its
    engines.
    """

    def __init__(
        self, *, shape: ModelShape, gpus: int, share: int, passes: Passes = ONE_PASS
    ) -> None:
        super().__init__(gpu=gpu("h800"), model=shape, gpus=gpus, link=link("rdma"), passes=passes)
        self._share = share

    def step_s(self, *, tokens: int, context: int) -> float:
        """Count the tokens of all parts."""
        return super().step_s(tokens=self._share * tokens, context=self._share * context)

    def load_s(self, *, engines: int, tp: int, over: Link | None = None) -> float:
        """Let the engines of the other parts pull at the same time."""
        return super().load_s(engines=self._share * engines, tp=tp, over=over)

    def lag_s(self) -> float:
        """Let the chain be as long as that of the complete cluster: each relay stands
        for those of all parts.
        """
        return self._share * super().lag_s()


class Instant(Sliced):
    """A trainer that takes no time, so that the engines' limits show."""

    def step_s(self, *, tokens: int, context: int) -> float:
        return 0.0


def placement(name: str, system: str, gpus: int, *, placed: str = "") -> tuple[int, int, int]:
    """Return the GPUs for training, for rollout and of one engine (Laminar Table 2,
    App. A.3), divided as for `placed` where given.
    """
    tp = {"7B": 1 if system in ("AReaL", "Laminar") else 2, "32B": 4, "72B": 8}[name]
    if system == "verl":
        return gpus, gpus, tp
    training, rollout = TRAINING_AND_ROLLOUT[placed or system][name][SCALES[name].index(gpus)]
    return training, rollout, tp


def share_of(engines: int, most: int) -> int:
    """Return the number of parts, a power of two up to `most`, into which the engines
    can be divided.
    """
    share = 1
    while 2 * share <= most and engines % (2 * share) == 0:
        share *= 2
    return share


def measure(
    task: str, name: str, system: str, gpus: int, *, quick: bool, placed: str = ""
) -> Point:
    """Measure one point of Figs. 11 and 12. Raises ExperimentError."""
    training, rollout, tp = placement(name, system, gpus, placed=placed)
    engines = rollout // tp
    share = _share(task, system, engines, quick=quick)
    warm, measured, after = _window(system, engines, quick=quick)
    config = config_of(
        task, name, system, gpus, share=share, steps=warm + measured + after, placed=placed
    )
    shape = model(MODELS[name])
    trainer = Sliced(shape=shape, gpus=training, share=share, passes=passes_of(config))
    outcome = _simulate(config, trainer, shape, tp)
    seconds = sum(outcome.step_s[warm : warm + measured])
    tokens = share * sum(
        line["batch_tokens"] for line in outcome.steps[warm + 1 : warm + 1 + measured]
    )
    return Point(
        gpus=gpus,
        tokens_per_s=tokens / seconds,
        step_s=seconds / measured,
        share=share,
        engines_busy=outcome.idle("engines").get("busy", 0.0),
        trainer_busy=outcome.idle("trainer").get("busy", 0.0),
    )


def _share(task: str, system: str, engines: int, *, quick: bool) -> int:
    """Return the number of parts into which the cluster is divided."""
    if quick:
        return share_of(engines, 4 * SHARES[task])
    most = max(1, engines // MIN_ENGINES) if system == "Laminar" else engines
    return share_of(engines, min(SHARES[task], most))


def _window(system: str, engines: int, *, quick: bool) -> tuple[int, int, int]:
    """Return the numbers of warm-up steps, measured steps, and steps after them, for
    which fewer and fewer rollouts start.
    """
    if system == "Laminar":
        rounds = math.ceil(engines * CONCURRENCY / (PROMPTS * MEMBERS))
        # in quick forms too: the tokens of a few steps vary
        return max(WARM, 2 * rounds), max(MEASURED, 2 * rounds), 1 + rounds
    window = {"verl": 0, "one-step": 1, "stream": 1}.get(system, ALPHA)
    return 1 + window if window > 1 else min(window, 1), 2 if quick or not window else 4, 1 + window


def config_of(
    task: str,
    name: str,
    system: str,
    gpus: int,
    *,
    share: int,
    steps: int,
    placed: str = "",
    concurrency: int = CONCURRENCY,
    repack: bool = True,
) -> RunConfig:
    """Return a share of a system as a configuration; `concurrency` and `repack` are
    Laminar's.
    """
    training, rollout, tp = placement(name, system, gpus, placed=placed)
    engines, batch = rollout // tp // share, PROMPTS * MEMBERS // share
    alive = {
        "AReaL": min(engines * CONCURRENCY, (1 + ALPHA) * batch),
        "Laminar": engines * concurrency,
    }
    setup = Setup(
        model=MODELS[name],
        tasks=(task,),
        context=CONTEXT,
        rollout_gpus=engines * tp,
        trainer_gpus=training,
        batch=batch,
        group_size=MEMBERS,
        environments=alive.get(system, 2 * batch),
        tp=tp,
        mode=MODES[system],
        alpha=ALPHA,
        slots=CONCURRENCY,
        reference=False,
        without=_without(system, repack=repack),
        colocated=system == "verl",
        relayed=system == "Laminar",
    )
    config = setup.config(steps=steps)
    return config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"minibatches": UPDATES})}
    )


def _without(system: str, *, repack: bool) -> tuple[str, ...]:
    if system == "verl":
        return ()
    if system != "Laminar":
        return ("staging",)  # its engines stop for the whole synchronization
    return ("deltas",) if repack else ("deltas", "repack")


def _simulate(config: RunConfig, trainer: TrainerCost, shape: ModelShape, tp: int) -> Outcome:
    outcome = simulate(config, costs=(_engines(config, shape, tp), trainer))
    if outcome.summary.error:
        raise ExperimentError(f"the run ended early: {outcome.summary.error}")
    return outcome


def _engines(config: RunConfig, shape: ModelShape, tp: int) -> dict[tuple[str, int], EngineCosts]:
    """Return the costs of engines of `tp` H800, by the pool of their hosts."""
    (pool,) = config.pools or (NO_POOL,)
    return {(pool, tp): EngineCost(gpu=gpu("h800"), model=shape, tp=tp)}


# Laminar alone, inspected during a run.


class Part:
    """A share of Laminar's cluster on the mathematical tasks, for inspection while it
    runs.
    """

    def __init__(
        self,
        name: str,
        gpus: int,
        *,
        share: int,
        steps: int,
        quick: bool,
        trainer: type[Sliced] = Sliced,
        concurrency: int = CONCURRENCY,
        repack: bool = True,
    ) -> None:
        config = config_of(
            "dapo-math",
            name,
            "Laminar",
            gpus,
            share=share,
            steps=steps,
            concurrency=concurrency,
            repack=repack,
        )
        shape, (training, _, tp) = model(MODELS[name]), placement(name, "Laminar", gpus)
        costs = (
            _engines(config, shape, tp),
            trainer(shape=shape, gpus=training, share=share, passes=passes_of(config)),
        )
        self._metrics = SimMetrics()
        self.world = World(_fewer(config) if quick else config, observer=self._metrics, costs=costs)
        self._metrics.watch(self.world)
        self.world.start()

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self._metrics.lines if line["kind"] == "step"]

    def until(self, condition: Callable[[], bool]) -> None:
        """Run until the condition holds. Raises ExperimentError if the run ends
        before.
        """
        run_until(self.world, condition)

    def until_step(self, step: int) -> None:
        """Run until the step begins."""
        self.until(lambda: len(self.steps) > step)

    def run_until(self, at: float) -> None:
        """Run until that time."""
        self.until(lambda: self.world.clock.now >= at)

    def finish(self) -> None:
        run_to_end(self.world)


def staleness_shares(concurrency: int, *, quick: bool) -> dict[int, float]:
    """Return the shares of trajectories by inherent staleness (Laminar §6): versions
    published from launch to end.

    The run is the 7B on 64 GPUs, after the warm-up.
    """
    warm, measured, after = _window("Laminar", placement("7B", "Laminar", 64)[1], quick=quick)
    part = Part(
        "7B", 64, share=4, steps=warm + measured + after, quick=quick, concurrency=concurrency
    )
    inherent = part.world.core.state.counters.inherent
    part.until_step(warm)
    before = Counter(inherent)
    part.until_step(warm + measured)
    counts = Counter(inherent) - before
    return {age: counts[age] / counts.total() for age in sorted(counts)}


def repacking(*, repack: bool, quick: bool, trainer: type[Sliced] = Sliced) -> Repacking:
    """Simulate the 32B on 128 GPUs (Laminar §8.4), with this trainer."""
    share = 2
    warm, measured, after = _window(
        "Laminar", placement("32B", "Laminar", 128)[1] // 4, quick=quick
    )
    part = Part(
        "32B",
        128,
        share=share,
        steps=warm + measured + after,
        quick=quick,
        trainer=trainer,
        repack=repack,
    )
    part.until_step(warm)
    used = []
    while len(part.steps) <= warm + measured:
        part.run_until(part.world.clock.now + SAMPLE_S)
        used.append(kv_used(part.world))
    lines = part.steps[warm : warm + measured + 1]
    seconds = float(lines[-1]["at"]) - float(lines[0]["at"])
    tokens = share * sum(line["batch_tokens"] for line in lines[1:])
    return Repacking(
        tokens_per_s=tokens / seconds,
        kv_used=statistics.fmean(used),
        released=part.world.core.state.counters.scheduling.released,
    )


def _fewer(config: RunConfig) -> RunConfig:
    """Reduce prompts of a step, and trajectories of an engine, for a quick form."""
    rollout = config.rollout
    running = max(1, rollout.places.run * QUICK_PROMPTS // rollout.groups_per_step)
    return config.model_copy(
        update={
            "rollout": rollout.model_copy(
                update={"groups_per_step": QUICK_PROMPTS, "max_running": running}
            )
        }
    )


# A machine fails.

FAILS_IN = 2
"""Step in which the machine fails."""


def recover(*, quick: bool) -> Recovery:
    """Lose a machine with its relay and two engines, of the 32B on 128 GPUs, while
    another machine joins.

    Raises ExperimentError.
    """

    def part() -> Part:
        return Part("32B", 128, share=2 if quick else 1, steps=FAILS_IN + 4, quick=quick)

    failing = part()
    failing.until_step(FAILS_IN)
    world = failing.world
    lost, at = world.slots[0].host, world.clock.now
    pool = world.lose_host(lost, "the machine failed")
    assert pool is not None, "it is up"
    world.join_host(pool)
    state = world.core.state

    def has_recovered() -> bool:
        engines = state.engines.values()
        return (
            len(engines) == len(world.slots)
            and not cluster_of(state).displaced
            and all(engine.version >= 0 for engine in engines)
        )

    failing.until(lambda: lost not in state.hosts.up)
    failing.until(has_recovered)
    seconds = world.clock.now - at
    if quick:
        return Recovery(seconds=seconds, slowdown=None)
    calm = part()
    failing.finish()
    calm.finish()
    return Recovery(seconds=seconds, slowdown=_step_s(failing.steps) / _step_s(calm.steps))


def _step_s(steps: list[dict[str, Any]]) -> float:
    """Return the mean seconds of the steps from the failure on."""
    starts = [float(line["at"]) for line in steps if line["step"] >= FAILS_IN]
    return statistics.fmean(after - before for before, after in itertools.pairwise(starts))
