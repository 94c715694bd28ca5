"""Laminar's throughput experiments as runs: its placements, its baselines as our modes, and a share of the cluster at a time.

A share is every n-th engine and every n-th prompt, beside the whole trainer, which takes n times the simulated batch. So
engines and trainer have the load of the whole cluster; a share has fewer trajectories, of which the longest is a bit shorter.
"""

import itertools
import statistics
from collections import Counter
from typing import Any

from rollweave.core.state import EngineStatus
from rollweave.reproduce.cluster import ExperimentError, Setup
from rollweave.schema.base import Noun
from rollweave.schema.config import RunConfig
from rollweave.sim.cost import EngineCost, EngineCosts, TrainerCost
from rollweave.sim.hardware import Link, gpu, link
from rollweave.sim.metrics import SimMetrics
from rollweave.sim.models import ModelShape, model
from rollweave.sim.run import Outcome, simulate
from rollweave.sim.world import World

PROMPTS, MEMBERS = 512, 16
"""Of a batch (Laminar §8): 8,192 trajectories."""

UPDATES = 16
"""Mini-batch updates of an iteration (Laminar §8)."""

CONTEXT = 2_048 + 16_384
"""Tokens of a trajectory (Laminar §8)."""

CONCURRENCY = 1_024
"""Trajectories on an engine (Laminar App. A.3, of AReaL and Laminar). Assumption for the others."""

ALPHA = 4
"""Laminar §8.1: the greatest staleness that it met; §8.2: the bound that AReaL suggests, here for the ∞ that §8.1 gives it."""

MODELS = {"7B": "qwen2.5-7b", "32B": "qwen2.5-32b", "72B": "qwen2.5-72b"}
SCALES = {"7B": (16, 32, 64, 128, 256), "32B": (32, 64, 128, 256, 512), "72B": (64, 128, 256, 512, 1024)}
SYSTEMS = ("verl", "one-step", "stream", "AReaL", "bounded")
MODES = {"verl": "sync", "one-step": "one_step", "stream": "stream", "AReaL": "partial", "bounded": "bounded"}

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
    "bounded": {
        "7B": ((8, 8), (24, 8), (40, 24), (80, 48), (192, 64)),
        "32B": ((16, 16), (32, 32), (64, 64), (128, 128), (256, 256)),
        "72B": ((32, 32), (64, 64), (128, 128), (320, 192), (768, 256)),
    },
}
"""GPUs for training and for rollout in the order of `SCALES` (Laminar Table 2; `bounded` has Laminar's)."""

SHARES = {"dapo-math": 8, "tool-calling": 16}
"""The cluster is divided into at most so many parts, by task; into four times as many in quick forms."""


QUICK_PROMPTS = 16
"""Of a step, in quick forms that do not take a smaller share."""


class Point(Noun, frozen=True, kw_only=True):
    """Throughput of a system on so many GPUs: tokens of trained trajectories a second, prompts included (Laminar §8).

    `share` is the part of the cluster that was simulated, `…_busy` the part of the whole run that engines or trainer worked.
    """

    gpus: int
    tokens_per_s: float
    step_s: float
    share: int
    engines_busy: float
    trainer_busy: float


class Recovery(Noun, frozen=True, kw_only=True):
    """`seconds` until every engine serves again; `slowdown` of the steps, None where it was not looked at."""

    seconds: float
    slowdown: float | None


class Sliced(TrainerCost):
    """The trainer of the whole cluster beside one of `share` parts of its engines. `updates` are those of one training step."""

    def __init__(self, *, shape: ModelShape, gpus: int, share: int, updates: int) -> None:
        super().__init__(gpu=gpu("h800"), model=shape, gpus=gpus, link=link("rdma"))
        self._share, self._updates = share, updates

    def step_s(self, *, tokens: int, context: int) -> float:
        """All parts train; every further update costs what a step costs beside its tokens."""
        whole = super().step_s(tokens=self._share * tokens, context=self._share * context)
        return whole + (self._updates - 1) * super().step_s(tokens=0, context=0)

    def load_s(self, *, engines: int, tp: int, over: Link | None = None) -> float:
        """The engines of the other parts pull at the same time."""
        return super().load_s(engines=self._share * engines, tp=tp, over=over)


def placement(name: str, system: str, gpus: int, *, placed: str = "") -> tuple[int, int, int]:
    """GPUs for training, for rollout and of one engine (Laminar Table 2, App. A.3); divided as for `placed` where given."""
    tp = {"7B": 1 if system in ("AReaL", "bounded") else 2, "32B": 4, "72B": 8}[name]
    if system == "verl":
        return gpus, gpus, tp
    training, rollout = TRAINING_AND_ROLLOUT[placed or system][name][SCALES[name].index(gpus)]
    return training, rollout, tp


def share_of(engines: int, most: int) -> int:
    """Into how many parts, a power of two up to `most`, the engines can be divided."""
    share = 1
    while 2 * share <= most and engines % (2 * share) == 0:
        share *= 2
    return share


def measure(task: str, name: str, system: str, gpus: int, *, quick: bool, placed: str = "") -> Point:
    """One point of Figs. 11 and 12. Raises ExperimentError."""
    training, rollout, tp = placement(name, system, gpus, placed=placed)
    engines = rollout // tp
    share = share_of(engines, SHARES[task] * (4 if quick else 1))
    window = {"verl": 0, "one-step": 1, "stream": 1}.get(system, ALPHA)
    warm, measured = 1 + window if window > 1 else min(window, 1), 2 if quick or not window else 4
    config = config_of(task, name, system, gpus, share=share, steps=warm + measured + 1 + window, placed=placed)
    shape = model(MODELS[name])
    updates = 1 if system == "stream" else UPDATES
    outcome = _simulate(config, Sliced(shape=shape, gpus=training, share=share, updates=updates), shape, tp)
    seconds = sum(outcome.step_s[warm : warm + measured])
    tokens = share * sum(line["batch_tokens"] for line in outcome.steps[warm + 1 : warm + 1 + measured])
    return Point(
        gpus=gpus,
        tokens_per_s=tokens / seconds,
        step_s=seconds / measured,
        share=share,
        engines_busy=outcome.idle("engines").get("busy", 0.0),
        trainer_busy=outcome.idle("trainer").get("busy", 0.0),
    )


def config_of(
    task: str, name: str, system: str, gpus: int, *, share: int, steps: int, alpha: int = ALPHA, placed: str = ""
) -> RunConfig:
    """A share of a system as a run."""
    training, rollout, tp = placement(name, system, gpus, placed=placed)
    engines, batch = rollout // tp // share, PROMPTS * MEMBERS // share
    asynchronous = system in ("AReaL", "bounded")
    setup = Setup(
        model=MODELS[name],
        tasks=(task,),
        context=CONTEXT,
        rollout_gpus=engines * tp,
        trainer_gpus=training,
        batch=batch,
        group_size=MEMBERS,
        environments=min(engines * CONCURRENCY, (1 + alpha) * batch) if asynchronous else 2 * batch,
        tp=tp,
        mode=MODES[system],
        alpha=alpha,
        colocated=system == "verl",
        slots=CONCURRENCY,
    )
    config = setup.config(steps=steps)
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"minibatches": UPDATES})})


def _simulate(config: RunConfig, trainer: TrainerCost, shape: ModelShape, tp: int) -> Outcome:
    outcome = simulate(config, costs=({tp: _engine(shape, tp)}, trainer))
    if outcome.summary.error:
        raise ExperimentError(f"the run ended early: {outcome.summary.error}")
    return outcome


def _engine(shape: ModelShape, tp: int) -> EngineCosts:
    return EngineCost(gpu=gpu("h800"), model=shape, tp=tp)


def staleness_shares(*, quick: bool) -> dict[int, float]:
    """Share of the trained trajectories by staleness: 7B on 64 GPUs, Laminar's placement, after the warm-up."""
    share = 8
    warm, measured = 1 + ALPHA, 2 if quick else 4
    config = config_of("dapo-math", "7B", "bounded", 64, share=share, steps=warm + measured + ALPHA)
    config = _fewer(config) if quick else config
    shape, (training, _, tp) = model(MODELS["7B"]), placement("7B", "bounded", 64)
    outcome = _simulate(config, Sliced(shape=shape, gpus=training, share=share, updates=UPDATES), shape, tp)
    found: Counter[int] = Counter()
    for line in outcome.steps[warm : warm + measured]:
        found.update({int(age): count for age, count in line["staleness"].items()})
    return {age: found[age] / found.total() for age in sorted(found)}


def _fewer(config: RunConfig) -> RunConfig:
    """With so few prompts a step that it is only for a look."""
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"groups_per_step": QUICK_PROMPTS})})


# A machine fails.

FAILS_IN = 2
"""The step in which it does."""


def recover(*, quick: bool) -> Recovery:
    """Of the 32B on 128 GPUs, a machine with an eighth of the engines is lost. Raises ExperimentError."""
    share = 2
    config = config_of("dapo-math", "32B", "bounded", 128, share=share, steps=FAILS_IN + 4, alpha=1)
    config = _fewer(config) if quick else config
    shape, (training, _, tp) = model(MODELS["32B"]), placement("32B", "bounded", 128)
    trainer = Sliced(shape=shape, gpus=training, share=share, updates=UPDATES)

    def world() -> tuple[World, SimMetrics]:
        metrics = SimMetrics()
        made = World(config, listener=metrics, costs=({tp: _engine(shape, tp)}, trainer))
        metrics.watch(made)
        made.start()
        return made, metrics

    failing, seen = world()
    while not _in_step(seen.lines, FAILS_IN):
        failing.step()
    lost, at = failing.seats[0].id, failing.clock.now
    failing.fleet.lose(lost, "the machine is gone")
    for gone in (True, False):  # the core hears of the loss, and then has the engine back with its weights
        while (failing.core.state.engines[lost].status is EngineStatus.SERVING) is gone:
            if failing.over is not None:
                raise ExperimentError("the run ended before the engine was back")
            failing.step()
    seconds = failing.clock.now - at
    if quick:
        return Recovery(seconds=seconds, slowdown=None)
    while failing.over is None:
        failing.step()
    whole, calm = world()
    while whole.over is None:
        whole.step()
    return Recovery(seconds=seconds, slowdown=_step_s(seen.lines) / _step_s(calm.lines))


def _in_step(lines: list[dict[str, Any]], step: int) -> bool:
    return any(line["kind"] == "step" and line["step"] == step for line in lines)


def _step_s(lines: list[dict[str, Any]]) -> float:
    """Mean seconds of the steps from that of the failure on."""
    starts = [float(line["at"]) for line in lines if line["kind"] == "step" and line["step"] >= FAILS_IN]
    return statistics.fmean(after - before for before, after in itertools.pairwise(starts))
