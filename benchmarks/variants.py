"""Benches `modes`, `losses` and `lora`: the fixed lake, learned by several variants of
one configuration to the same success.

Runs are interleaved: every variant once, then every variant again with the next seed.
`modes` gives the environment's answers a heavy-tailed latency, so that a synchronous
step waits for its slowest trajectory. `lora` makes the model by the same warm-up of all
weights, which stay as they are from then on.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.contract import Figure, Result
from benchmarks.harness import QUICK, Progress, add_ratio, slow_lake
from benchmarks.runs import MeasuredRun, conditions_of, example, interleaved, shares, to_target
from rollweave.record.rundir import RunDir

CONFIG = "frozenlake_fixed.toml"
SEEDS = 3
COMMON = (
    "eval.episodes=48",
    "eval.temperature=1.0",
    "eval.final_episodes=0",
    "run.steps=100",
    "run.name=variants",
)
LR = "trainer.lr.peak=1e-2"
"""Learning rate of adapters: three times that of all weights."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Variants and their settings, the variants of `--quick`, the settings of all, and
    the success at the sampling temperature that they shall reach. (Greedy success on
    one map is all or nothing, and says little about progress.)
    """

    variants: Mapping[str, tuple[str, ...]]
    quick: tuple[str, ...]
    common: tuple[str, ...]
    target: float

    @property
    def settings(self) -> tuple[str, ...]:
        return (*COMMON, *self.common, f"eval.stop_at={self.target}")


MODES = Comparison(
    variants={
        "sync": ("rollout.mode=sync",),
        "one_step": ("rollout.mode=one_step",),
        "stream": ("rollout.mode=stream",),
        "partial": ("rollout.mode=partial", "rollout.alpha=1"),
        "bounded_1": ("rollout.mode=bounded", "rollout.alpha=1"),
        "bounded_2": ("rollout.mode=bounded", "rollout.alpha=2"),
        "bounded_4": ("rollout.mode=bounded", "rollout.alpha=4"),
        "decoupled": ("rollout.mode=decoupled",),
    },
    quick=("sync", "bounded_1", "decoupled"),
    common=(
        # median 20 ms, mean 62 ms, one answer in a hundred beyond 0.65 s: a busy tool
        *(*slow_lake(0.02, 1.5), "eval.every=4"),
        # an engine that loads weights alone needs others that continue
        *("engines.count=4", "engines.max_slots=16"),
    ),
    target=0.8,
)
LOSSES = Comparison(
    variants={
        "ppo": (),
        "dual_clip": ("algorithm.loss=dual_clip",),
        "gspo": ("algorithm.loss=gspo",),
        "gspo_decoupled": ("algorithm.loss=gspo", "algorithm.correction=decoupled"),
        "cispo": ("algorithm.loss=cispo",),
        "dppo": ("algorithm.loss=dppo",),
        "decoupled": ("algorithm.correction=decoupled",),
        "tis": ("algorithm.correction=tis",),
        "icepop": ("algorithm.correction=icepop",),
        "sequence_mask": ("algorithm.correction=sequence_mask",),
        "reject": ("algorithm.correction=reject",),
        "budget": ("algorithm.aggregate=budget",),
        "reinforce_pp_baseline": (
            "algorithm.advantage=reinforce_pp_baseline",
            "algorithm.gamma=1.0",
        ),
        "gae": ("algorithm.advantage=gae",),
        "gae_turn": ("algorithm.advantage=gae_turn",),
    },
    quick=("ppo", "gspo"),
    common=("eval.every=2",),
    target=0.9,
)
LORA = Comparison(
    variants={
        "full": (),
        "rank_16": ("lora.rank=16", LR),
        "rank_4": ("lora.rank=4", "lora.alpha=8.0", LR),
        "rank_1": ("lora.rank=1", "lora.alpha=2.0", LR),
    },
    quick=("full", "rank_4"),
    common=("eval.every=2",),
    target=0.9,
)
COMPARISONS = {"modes": MODES, "losses": LOSSES, "lora": LORA}


def bench_variants(name: str, *, seeds: int | None, quick: bool, progress: Progress) -> Result:
    """Return the figures of `figures_of_mode` or `figures_of_loss` by variant; those of
    modes over sync; and the median `published_bytes_…` of a version with adapters.
    """
    comparison, path = COMPARISONS[name], example(CONFIG)
    chosen = {one: comparison.variants[one] for one in comparison.quick if quick}
    chosen = chosen or dict(comparison.variants)
    overrides = (*comparison.settings, *(QUICK if quick else ()))
    count = seeds if seeds is not None else 1 if quick else SEEDS
    runs: dict[str, list[MeasuredRun]] = {variant: [] for variant in chosen}
    published: dict[str, list[int]] = {variant: [] for variant in chosen}
    for variant, seed, run, measured in interleaved(path, overrides, chosen, range(count)):
        published[variant] += published_bytes(run)
        runs[variant].append(measured)
        progress(f"seed {seed}, {variant}: {measured.described(comparison.target)}")
    conditions: dict[str, Any] = conditions_of(path, overrides) | {
        "seeds": list(range(count)),
        "variants": {variant: list(settings) for variant, settings in chosen.items()},
        "target_success": comparison.target,
        "seconds": "from a warmed-up trainer to the first periodic held-out evaluation at the "
        "target, at the sampling temperature; median over seeds",
    }
    figures: dict[str, Figure] = {}
    made = figures_of_mode if name == "modes" else figures_of_loss
    for variant, of_variant in runs.items():
        figures |= made(variant, of_variant, conditions, quick=quick)
        if name == "lora":
            figures[f"published_bytes_{variant}"] = statistics.median(published[variant])
    for over in ("bounded_1", "decoupled") if name == "modes" else ():
        sync, other = (f"wall_s_{mode}" for mode in ("sync", over))
        add_ratio(f"{over.removesuffix('_1')}_over_sync", other, sync, figures, conditions)
    return Result(bench=name, figures=figures, conditions=conditions)


def figures_of_mode(
    name: str, runs: Sequence[MeasuredRun], conditions: dict[str, Any], *, quick: bool
) -> dict[str, Figure]:
    """Return the figures of one mode from its runs, one for each seed: seconds to the
    target, seconds of a step, staleness, success, and what engines and trainer did;
    `conditions` names the reason for a missing figure.
    """
    _, times, why = to_target(runs, MODES.target, quick=quick)
    if why:
        conditions[f"wall_s_{name}"] = why
    if not any(run.data.evaluations for run in runs):
        conditions[f"success_{name}"] = "not measured: --quick evaluates nothing"
    ages = [run.data.staleness() for run in runs]
    trained = max(1, sum(counts.total() for counts in ages))
    oldest = max((max(counts) for counts in ages), default=0)
    ends = [
        min(run.data.evaluations[-1]["success"].values()) for run in runs if run.data.evaluations
    ]
    figures: dict[str, Figure] = {
        "wall_s": None if why else statistics.median(times),
        "steps": statistics.median(run.summary.steps for run in runs),
        "step_s": statistics.median(line["wall_s"] for run in runs for line in run.data.steps[1:]),
        "staleness_mean": sum(age * n for counts in ages for age, n in counts.items()) / trained,
        "staleness_max": max(run.summary.staleness_max for run in runs),
        "staleness_shares": [
            round(sum(counts[age] for counts in ages) / trained, 4) for age in range(oldest + 1)
        ],
        "success": statistics.median(ends) if ends else None,
    }
    for role in ("engines", "trainer"):
        spent = [shares(run.summary.idle[role]) for run in runs]
        for cause in sorted({cause for by_cause in spent for cause in by_cause}):
            mean = statistics.mean(by_cause.get(cause, 0.0) for by_cause in spent)
            figures[f"{role}_{cause}"] = round(mean, 4)
    named = {f"{figure}_{name}": value for figure, value in figures.items()}
    return named | {f"wall_s_{name}_seeds": times}


def figures_of_loss(
    name: str, runs: Sequence[MeasuredRun], conditions: dict[str, Any], *, quick: bool
) -> dict[str, Figure]:
    """Return the figures of one variant from its runs, one for each seed: `steps_…` and
    `seconds_…` to the target, their lists over the seeds that reached it, the number of
    these seeds, and the shares of clipped and masked tokens; `conditions` names the
    reason for a missing figure.
    """
    steps, seconds, why = to_target(runs, LOSSES.target, quick=quick)
    if why:
        conditions[f"steps_{name}"] = conditions[f"seconds_{name}"] = why
    return {
        f"reached_{name}": len(seconds),
        f"steps_{name}": None if why else statistics.median(steps),
        f"steps_{name}_seeds": steps,
        f"seconds_{name}": None if why else statistics.median(seconds),
        f"seconds_{name}_seeds": [round(time, 1) for time in seconds],
        f"clip_fraction_{name}": _mean_of(runs, "clip_fraction"),
        f"mask_fraction_{name}": _mean_of(runs, "mask_fraction"),
    }


def published_bytes(run: RunDir) -> list[int]:
    """Return the bytes of each version that a run has published, from its trace."""
    lines = [line.rstrip().rstrip(",") for line in run.trace.read_text().splitlines()]
    events = [json.loads(line) for line in lines if '"publish v' in line]
    return [event["args"]["nbytes"] for event in events]


def _mean_of(runs: Sequence[MeasuredRun], metric: str) -> float | None:
    """Return the mean of a trainer's metric over the steps of all runs."""
    lines = [line["trainer"] for run in runs for line in run.data.steps]
    values = [line[metric] for line in lines if metric in line]
    return round(statistics.fmean(values), 4) if values else None
