"""Bench `losses`: steps and seconds that each loss, correction and estimator needs to
learn the fixed lake.

Everything but the algorithm is as in the example, with one update for each batch and
staleness of at most one step. Runs are interleaved: every variant once, then every
variant again with the next seed.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.contract import Figure, Result
from benchmarks.runs import MeasuredRun, conditions_of, example, interleaved

CONFIG = "frozenlake_fixed.toml"
TARGET = 0.9
"""Success at the sampling temperature."""

SEEDS = 3
VARIANTS: Mapping[str, tuple[str, ...]] = {
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
}
"""Variant → its settings; each loss has its published bounds."""

QUICK_VARIANTS = ("ppo", "gspo")
COMMON = (
    "eval.every=2",
    "eval.episodes=48",
    "eval.temperature=1.0",
    "eval.final_episodes=0",
    f"eval.stop_at={TARGET}",
    "run.steps=100",
    "run.name=losses",
)
QUICK = ("run.steps=4", "eval={final_episodes=0}", "warmup.steps=5")


def bench_losses(*, seeds: int | None, quick: bool, progress: Callable[[str], None]) -> Result:
    """Return figures by variant: `steps_…` and `seconds_…` to the target (medians over
    seeds, None if not every seed reached it), their lists over the seeds that did,
    `reached_…`, the number of these seeds, and the shares of clipped and masked tokens.
    """
    path = example(CONFIG)
    chosen = {name: VARIANTS[name] for name in QUICK_VARIANTS} if quick else VARIANTS
    overrides = (*COMMON, *QUICK) if quick else COMMON
    count = seeds if seeds is not None else 1 if quick else SEEDS
    runs: dict[str, list[MeasuredRun]] = {name: [] for name in chosen}
    for name, seed, _, run in interleaved(path, overrides, chosen, range(count)):
        runs[name].append(run)
        progress(f"seed {seed}, {name}: {described(run)}")
    conditions = conditions_of(path, overrides) | {
        "seeds": list(range(count)),
        "variants": {name: list(settings) for name, settings in chosen.items()},
        "target_success": TARGET,
        "seconds": "from a warmed-up trainer to the first periodic held-out evaluation at the "
        "target, at the sampling temperature; every second step is evaluated",
    }
    figures: dict[str, Figure] = {}
    for name, measured in runs.items():
        figures |= figures_of(name, measured, conditions, quick=quick)
    return Result(bench="losses", figures=figures, conditions=conditions)


def figures_of(
    name: str, runs: Sequence[MeasuredRun], conditions: dict[str, Any], *, quick: bool
) -> dict[str, Figure]:
    """Return the figures of one variant from its runs, one per seed; `conditions` names
    the reason for a missing one.
    """
    seconds = [time for run in runs if (time := run.reached_s(TARGET)) is not None]
    steps: list[float] = [step for run in runs if (step := run.reached_step(TARGET)) is not None]
    complete = len(seconds) == len(runs)
    if not complete:
        why = (
            "--quick trains too few steps"
            if quick
            else f"{len(runs) - len(seconds)} of {len(runs)} seeds did not reach the target"
        )
        conditions[f"steps_{name}"] = conditions[f"seconds_{name}"] = f"not measured: {why}"
    return {
        f"reached_{name}": len(seconds),
        f"steps_{name}": statistics.median(steps) if complete else None,
        f"steps_{name}_seeds": steps,
        f"seconds_{name}": statistics.median(seconds) if complete else None,
        f"seconds_{name}_seeds": [round(time, 1) for time in seconds],
        f"clip_fraction_{name}": _mean_of(runs, "clip_fraction"),
        f"mask_fraction_{name}": _mean_of(runs, "mask_fraction"),
    }


def described(run: MeasuredRun) -> str:
    """Return a line about one run."""
    seconds = run.reached_s(TARGET)
    if seconds is None:
        spent = run.trained_s - run.ready_s
        return f"success {TARGET} not reached; {run.summary.steps} steps in {spent:.1f} s"
    return f"success {TARGET} after {seconds:.1f} s, {run.reached_step(TARGET)} steps"


def _mean_of(runs: Sequence[MeasuredRun], metric: str) -> float | None:
    """Return the mean of a trainer's metric over the steps of all runs."""
    values = [
        line["trainer"][metric]
        for run in runs
        for line in run.data.steps
        if metric in line["trainer"]
    ]
    return round(statistics.fmean(values), 4) if values else None
