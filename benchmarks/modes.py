"""Bench `modes`: cost of each mode on one long-tailed environment, to the same success.

The environment's answers get an injected log-normal latency with a heavy tail, so that
a synchronous step waits for its slowest trajectory. Runs are interleaved: every mode
once, then every mode again with the next seed.
"""

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.contract import Figure, Result
from benchmarks.runs import MeasuredRun, conditions_of, example, interleaved, shares

CONFIG = "frozenlake_fixed.toml"
MODES = {
    "sync": ("rollout.mode=sync",),
    "one_step": ("rollout.mode=one_step",),
    "stream": ("rollout.mode=stream",),
    "partial": ("rollout.mode=partial", "rollout.alpha=1"),
    "bounded_1": ("rollout.mode=bounded", "rollout.alpha=1"),
    "bounded_2": ("rollout.mode=bounded", "rollout.alpha=2"),
    "bounded_4": ("rollout.mode=bounded", "rollout.alpha=4"),
    "decoupled": ("rollout.mode=decoupled",),
}
QUICK_MODES = ("sync", "bounded_1", "decoupled")
TARGET = 0.8
"""Success at the sampling temperature: greedy success on one map is all or nothing, and
says little about progress.
"""

SEEDS = 3
LATENCY = ("faults.latency_s=0.02", "faults.latency_sigma=1.5")
"""Median 20 ms, mean 62 ms, one answer in a hundred beyond 0.65 s: a tool call on a
busy machine.
"""

EVALUATION = (
    "eval.every=4",
    "eval.episodes=48",
    "eval.temperature=1.0",
    "eval.final_episodes=0",
    f"eval.stop_at={TARGET}",
)
ENGINES = ("engines.count=4", "engines.max_slots=16")
"""Engines with as many slots as the example's one engine: an engine that loads weights
alone needs others that continue.
"""

COMMON = (*LATENCY, *EVALUATION, *ENGINES, "run.steps=100", "run.name=modes")
QUICK = ("run.steps=4", "eval={final_episodes=0}", "warmup.steps=5")


def bench_modes(*, seeds: int | None, quick: bool, progress: Callable[[str], None]) -> Result:
    """Return figures by mode: `wall_s_…` to the target (median over seeds), `step_s_…`,
    idle, staleness, success; `…_over_sync`.
    """
    path = example(CONFIG)
    chosen = {name: MODES[name] for name in QUICK_MODES} if quick else MODES
    overrides = (*COMMON, *QUICK) if quick else COMMON
    count = seeds if seeds is not None else 1 if quick else SEEDS
    runs: dict[str, list[MeasuredRun]] = {name: [] for name in chosen}
    for name, seed, _, run in interleaved(path, overrides, chosen, range(count)):
        runs[name].append(run)
        progress(f"seed {seed}, {name}: {_described(run, quick=quick)}")
    figures: dict[str, Figure] = {}
    conditions: dict[str, Any] = conditions_of(path, overrides) | {
        "seeds": list(range(count)),
        "modes": {name: list(mode) for name, mode in chosen.items()},
        "target_success": TARGET,
        "wall_s": "from a warmed-up trainer to the first periodic held-out evaluation at the "
        "target; median over seeds",
    }
    for name, measured in runs.items():
        figures |= figures_of(name, measured, conditions, quick=quick)
    for over, name in (("bounded_over_sync", "bounded_1"), ("decoupled_over_sync", "decoupled")):
        figures[over] = ratio(figures.get(f"wall_s_{name}"), figures.get("wall_s_sync"))
        if figures[over] is None:
            conditions[over] = next(
                why for figure in ("sync", name) if (why := conditions.get(f"wall_s_{figure}"))
            )
    return Result(bench="modes", figures=figures, conditions=conditions)


def figures_of(
    name: str, runs: list[MeasuredRun], conditions: dict[str, Any], *, quick: bool
) -> dict[str, Figure]:
    """Return the figures of one mode from its runs, one per seed; `conditions` names
    the reason for a missing one.
    """
    reached = [run.reached_s(TARGET) for run in runs]
    times = [seconds for seconds in reached if seconds is not None]
    if len(times) < len(runs):
        missed = len(runs) - len(times)
        why = (
            "--quick trains too few steps"
            if quick
            else f"{missed} of {len(runs)} seeds did not reach the target"
        )
        conditions[f"wall_s_{name}"] = f"not measured: {why}"
    if not any(run.data.evaluations for run in runs):
        conditions[f"success_{name}"] = "not measured: --quick evaluates nothing"
    engines = [shares(run.summary.idle["engines"]) for run in runs]
    trainer = [shares(run.summary.idle["trainer"]) for run in runs]
    ages = [run.data.staleness() for run in runs]
    trained = sum(sum(counts.values()) for counts in ages)
    histogram = [
        sum(counts[age] for counts in ages)
        for age in range(max((max(counts) for counts in ages), default=0) + 1)
    ]
    ends = [
        min(run.data.evaluations[-1]["success"].values()) for run in runs if run.data.evaluations
    ]
    figures: dict[str, Figure] = {
        f"wall_s_{name}": statistics.median(times) if len(times) == len(runs) else None,
        f"wall_s_{name}_seeds": times,
        f"steps_{name}": statistics.median(run.summary.steps for run in runs),
        f"step_s_{name}": statistics.median(
            line["wall_s"] for run in runs for line in run.data.steps[1:]
        ),
        f"staleness_mean_{name}": sum(age * n for counts in ages for age, n in counts.items())
        / max(1, trained),
        f"staleness_max_{name}": max(run.summary.staleness_max for run in runs),
        f"staleness_shares_{name}": [round(count / max(1, trained), 4) for count in histogram],
        f"success_{name}": statistics.median(ends) if ends else None,
    }
    for role, shares_by_run in (("engines", engines), ("trainer", trainer)):
        for cause in sorted({cause for by_cause in shares_by_run for cause in by_cause}):
            share = statistics.mean(by_cause.get(cause, 0.0) for by_cause in shares_by_run)
            figures[f"{role}_{cause}_{name}"] = round(share, 4)
    return figures


def _described(run: MeasuredRun, *, quick: bool) -> str:
    reached = run.reached_s(TARGET)
    if reached is not None:
        return f"success {TARGET} after {reached:.0f} s, {run.summary.steps} steps"
    steps = f"{run.summary.steps} steps in {run.trained_s - run.ready_s:.0f} s"
    return steps if quick else f"success {TARGET} not reached; {steps}"


def ratio(above: Figure, below: Figure) -> float | None:
    """Return `above / below`, or None where one of them was not measured."""
    if not isinstance(above, int | float) or not isinstance(below, int | float) or not below:
        return None
    return round(above / below, 4)
