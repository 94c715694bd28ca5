"""Bench `scheduling`: the gain from scheduling whole trajectories on a long-tailed
workload (Heddle §7.2, §7.3), live.

Several paced engines run as processes, tools have an injected latency, and there are
several synchronous steps: the first ones teach the predictor of lengths, the later ones
are measured. All variants get the same tasks, samples and latencies: engines are
deterministic and nothing is learned, so all variants have the same trajectories, and
ratios are of the same step of the same seed. Runs are interleaved: every variant once,
then every variant again with the next seed.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contract import Figure, Result
from benchmarks.harness import Progress, load_average, scratch_folder
from benchmarks.runs import trained
from packages.sim.benchmarks.scheduling.paced_engine import GPU, MODEL, TOKENS, StepPace
from packages.sim.benchmarks.scheduling.rollouts import (
    LOGPROB_TOLERANCE,
    Rollout,
    Sample,
    furthest,
    mismatches,
    read_rollouts,
    read_samples,
)
from packages.sim.benchmarks.scheduling.router import CONDITION as ROUTER_CONDITION
from packages.sim.benchmarks.scheduling.router import router_figures
from packages.sim.benchmarks.scheduling.variants import (
    FULL,
    MEMBERS,
    MIGRATING,
    OURS,
    QUICK,
    QUICK_VARIANTS,
    UNMOVED,
    VARIANTS,
    SchedulingPlan,
    config,
)
from rollweave.engine.batching import StepWork
from rollweave.schema.base import Struct, TrajectoryId
from rollweave.schema.hosts import Programs


class VariantRun(Struct, frozen=True, kw_only=True):
    """One variant with one seed.

    `rollouts` and `lines` (of metrics.jsonl) are those of the measured steps, `spoken`
    of all.
    """

    rollouts: tuple[Rollout, ...]
    lines: tuple[dict[str, Any], ...]
    samples: dict[TrajectoryId, Sample]

    def counted(self, name: str) -> float:
        """Return the mean of a scheduling counter per step."""
        return statistics.fmean(line["scheduling"][name] for line in self.lines)


def bench_scheduling(*, quick: bool, progress: Progress) -> Result:
    """Return figures by variant (`…_VARIANT`), and its makespan and tail over ours; and
    the core's own cost.
    """
    plan, variants = (QUICK, QUICK_VARIANTS) if quick else (FULL, tuple(VARIANTS))
    runs: dict[str, list[VariantRun]] = {variant: [] for variant in variants}
    for seed in range(plan.seeds):
        for variant in variants:
            run = _run(variant, plan, seed=seed)
            runs[variant].append(run)
            steps = ", ".join(f"{one.makespan_s:.2f}" for one in run.rollouts)
            progress(
                f"seed {seed}, {variant}: rollouts of {steps} s, the longest trajectories waited "
                f"{_tails(run)} s in all"
            )
    conditions = conditions_of(runs, plan)
    figures = figures_of(runs, conditions)
    figures |= router_figures(quick=quick)
    conditions["router_us_10000x256"] = ROUTER_CONDITION
    conditions["load"] = load_average()
    return Result(bench="scheduling", figures=figures, conditions=conditions)


def _run(variant: str, plan: SchedulingPlan, *, seed: int) -> VariantRun:
    with scratch_folder() as scratch:
        made = config(variant, plan, seed=seed, directory=str(scratch))
        run, measured = trained(
            made, programs=Programs(engine="packages.sim.benchmarks.scheduling.paced_engine")
        )
        return VariantRun(
            rollouts=tuple(read_rollouts(Path(run.journal), made)[plan.learned :]),
            lines=tuple(measured.data.steps[plan.learned :]),
            samples=read_samples(run),
        )


def _tails(run: VariantRun) -> str:
    return ", ".join(f"{one.tail_queue_s:.2f}" for one in run.rollouts)


def figures_of(
    runs: Mapping[str, Sequence[VariantRun]], conditions: dict[str, Any]
) -> dict[str, Figure]:
    """See `bench_scheduling`.

    Seconds are medians over steps and seeds, ratios those of pairs of the same step and
    seed.
    """
    figures: dict[str, Figure] = {}
    others = [variant for variant in runs if variant != OURS]
    for variant in others:
        figures[f"makespan_over_{variant}"] = over(runs[variant], runs[OURS], "makespan_s")
        figures[f"tail_queueing_over_{variant}"] = over(runs[variant], runs[OURS], "tail_queue_s")
    for name in ("makespan_s", "tail_queue_s"):
        figures |= {
            f"{name}_{variant}": statistics.median(_all(runs[variant], name)) for variant in runs
        }
    figures |= {f"prefix_hit_{variant}": _prefix_hit(runs[variant]) for variant in runs}
    figures["real_step_ms"] = 1e3 * max(
        _real_step_s(run) for variant in runs for run in runs[variant]
    )
    figures |= {f"preemptions_{variant}": _mean(runs[variant], "preemptions") for variant in runs}
    figures |= {f"plans_{variant}": _mean(runs[variant], "plans") for variant in runs}
    moving = [variant for variant in MIGRATING if variant in runs]
    for variant in moving:
        figures |= {
            f"{name}_{variant}": _mean(runs[variant], name)
            for name in ("migrations", "migrations_failed", "moved_tokens")
        }
        figures[f"migration_exposed_ms_{variant}"] = 1e3 * _mean(runs[variant], "exposed_s")
    pairs = [
        (mine, its)
        for variant in moving
        for mine, its in zip(runs[variant], runs[UNMOVED], strict=True)
    ]
    figures["migration_token_mismatches"] = sum(
        mismatches(mine.samples, its.samples) for mine, its in pairs
    )
    conditions["logprobs"] = f"{_furthest(pairs):.1g} is the maximum difference between them"
    return figures | _prediction_figures(runs[OURS])


def _prediction_figures(ours: Sequence[VariantRun]) -> dict[str, Figure]:
    pairs = [pair for run in ours for rollout in run.rollouts for pair in rollout.predictions]
    predictor_stats = [run.lines[-1]["predictor"] for run in ours]
    predictions = sum(line["scheduling"]["predictions"] for run in ours for line in run.lines)
    late_predictions = sum(
        line["scheduling"]["predictions_late"] for run in ours for line in run.lines
    )
    return {
        "prediction_exposed_ms": 1e3 * _mean(ours, "awaited_s"),
        "prediction_ms": statistics.fmean(stats["mean_ms"] for stats in predictor_stats),
        "prediction_p99_ms": max(stats["p99_ms"] for stats in predictor_stats),
        "predictions_late": late_predictions / predictions,
        "prediction_correlation": float(np.corrcoef(np.array(pairs).T)[0, 1]),
    }


def over(theirs: Sequence[VariantRun], ours: Sequence[VariantRun], name: str) -> float | None:
    """Return the median of their seconds over ours, step by step; None where ours is
    0.
    """
    pairs = list(zip(_all(theirs, name), _all(ours, name), strict=True))
    return (
        round(statistics.median(one / other for one, other in pairs), 4)
        if all(other for _, other in pairs)
        else None
    )


def _all(runs: Sequence[VariantRun], name: str) -> list[float]:
    return [getattr(rollout, name) for run in runs for rollout in run.rollouts]


def _mean(runs: Sequence[VariantRun], name: str) -> float:
    return statistics.fmean(run.counted(name) for run in runs)


def _prefix_hit(runs: Sequence[VariantRun]) -> float:
    """Return the share of prompt tokens that the turn's engine had already computed."""
    lines = [line for run in runs for line in run.lines]
    return float(
        sum(line["cached_tokens"] for line in lines) / sum(line["context_tokens"] for line in lines)
    )


def _real_step_s(run: VariantRun) -> float:
    """Return the mean seconds of an engine's step, without padding."""
    engines = run.lines[-1]["engines"].values()
    return float(
        sum(stats["busy_s"] for stats in engines) / sum(stats["steps"] for stats in engines)
    )


def _furthest(pairs: Sequence[tuple[VariantRun, VariantRun]]) -> float:
    differences = [
        furthest(mine.samples[key], its.samples[key])
        for mine, its in pairs
        for key in mine.samples
        if key in its.samples and mine.samples[key].tokens == its.samples[key].tokens
    ]
    return max(differences, default=0.0)


def _least_pace_ms() -> float:
    return 1e3 * StepPace().step_s(StepWork(0, 0, 1, 1))


def conditions_of(runs: Mapping[str, Sequence[VariantRun]], plan: SchedulingPlan) -> dict[str, Any]:
    rollouts = [rollout for run in runs[OURS] for rollout in run.rollouts]
    lengths = ", ".join(f"{one.tail_turns} of {one.turns} turns" for one in rollouts)
    return {
        "variants": {variant: dict(VARIANTS[variant]) for variant in runs},
        "steps": f"{plan.seeds} seeds, {plan.learned} steps that only teach and {plan.measured} "
        f"measured ones each; ratios are medians over pairs of equal step and seed, over {OURS}",
        "workload": f"{plan.groups} prompts x {MEMBERS}, 12 tokens a turn at most; tools of 50 ms, "
        f"log-normal; the longest trajectories had {lengths}",
        "engines": "2 processes, 4 slots and 4,096 tokens of KV each: real tokens of a tiny model, "
        f"steps padded to those of {MODEL} on an {GPU}, {TOKENS} tokens as one and {TOKENS} times "
        f"as fast; real_step_ms is without padding, a padded step takes {_least_pace_ms():.1f} ms",
        "tail_queue_s": "how long all turns of the step's longest trajectory waited for a slot",
        "migration_token_mismatches": f"trajectories of {', '.join(MIGRATING)} whose tokens, or "
        f"log-probs by more than {LOGPROB_TOLERANCE:g}, differ from those of {UNMOVED}",
        "prediction_exposed_ms": "for which the first turns of a step waited, summed; "
        "predictions_late is the share of those that arrived after the next turn's end",
    }
