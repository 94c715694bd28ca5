"""Bench `scheduling`: the gain from scheduling whole trajectories on a long-tailed
workload (Heddle §7.2, §7.3), live.

Several paced engines run as processes, tools have an injected latency, and there are
several synchronous steps: the first ones teach the predictor of lengths, the later ones
are measured. All variants get the same tasks, samples and latencies: engines are
deterministic and nothing is learned, so all variants have the same trajectories, and
ratios are of the same step of the same seed. Runs are interleaved: every variant once,
then every variant again with the next seed.
"""

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contract import Figure, Result
from benchmarks.runs import trained
from benchmarks.scheduling.paced_engine import GPU, MODEL, TOKENS, Pace
from benchmarks.scheduling.rollouts import (
    LOGPROB_TOLERANCE,
    Rollout,
    Spoken,
    furthest,
    mismatches,
    read_rollouts,
    read_spoken,
)
from benchmarks.scheduling.router import CONDITION as ROUTER_CONDITION
from benchmarks.scheduling.router import router_figures
from rollweave.engine.planner.batching import StepWork
from rollweave.runtime.launch import Programs
from rollweave.schema.base import Struct, TrajectoryId
from rollweave.schema.config.root import RunConfig

OURS = "trajectory"
WAYS: Mapping[str, Mapping[str, str]] = {
    "fcfs": {"priority": "fcfs", "placement": "affinity"},
    "round_robin": {"priority": "round_robin", "placement": "affinity"},
    "shortest_first": {"priority": "shortest_first", "placement": "affinity"},
    "longest_first": {"priority": "longest_first", "placement": "affinity"},
    "least_load": {"priority": "longest_first", "placement": "least_load"},
    "pinned": {"priority": "longest_first", "placement": "pinned"},
    "paper": {"priority": "longest_first", "placement": "presorted", "migration": "rank"},
    "rank": {"scheduling": "trajectory", "migration": "rank"},
    OURS: {"scheduling": "trajectory"},
}
"""Scheduling variants: four priorities on one placement; then, all by longest_first:
two placements that ignore lengths, Heddle's partition and migration, our partition with
Heddle's migration, and ours.
"""

PRIORITIES = ("fcfs", "round_robin", "shortest_first")
MIGRATING = ("paper", "rank", OURS)
PROGRESSIVE = "longest_first"
UNMOVED = "fcfs"
"""Variant that never migrates, whose tokens are compared with those of migrated
trajectories.
"""

QUICK_WAYS = (UNMOVED, OURS)


class Size(Struct, frozen=True, kw_only=True):
    """Length of a bench: `learned` steps that only teach, then `measured` ones, of
    `groups` groups.
    """

    groups: int
    learned: int
    measured: int
    seeds: int


FULL = Size(groups=4, learned=4, measured=3, seeds=2)
QUICK = Size(groups=2, learned=1, measured=1, seeds=1)
"""Short form of the bench. In the full one, predictions of this workload are good from
the fourth step on; a step of all variants takes about a minute.
"""

MEMBERS = 16
"""Trajectories of a group (Heddle §7: 16 samples a prompt)."""


def config(way: str, size: Size, *, seed: int, directory: str) -> RunConfig:
    """Return two engines with four slots each for all trajectories of a step, whose
    contexts exceed the KV caches.
    """
    count = size.groups * MEMBERS
    return RunConfig.model_validate(
        {
            "run": {
                "name": way,
                "dir": directory,
                "seed": seed,
                "steps": size.learned + size.measured,
            },
            "model": {"scratch": {"context": 1536}},
            "tasks": [
                {"env": "benchmarks.scheduling.long_tasks:LongTask", "tag": "longtail"}
                | {"max_turns": 48, "max_tokens": 1536, "max_turn_tokens": 12}
            ],
            "rollout": {
                "mode": "sync",
                "groups_per_step": size.groups,
                "group_size": MEMBERS,
                **dict.fromkeys(("max_running", "init_slots", "eval_slots"), count),
                **WAYS[way],
            },
            "engines": {"count": 2, "max_slots": 4, "kv_tokens": 4096, "deterministic": True},
            "trainer": {"lr": 1e-12},
            "algorithm": {"advantage": "grpo_no_std"},
            "eval": {"final_episodes": 0},
            "faults": {"latency_s": 0.05, "latency_sigma": 1.0},
        }
    )


class Run(Struct, frozen=True, kw_only=True):
    """One variant with one seed.

    `rollouts` and `lines` (of metrics.jsonl) are those of the measured steps, `spoken`
    of all.
    """

    rollouts: tuple[Rollout, ...]
    lines: tuple[dict[str, Any], ...]
    spoken: dict[TrajectoryId, Spoken]

    def counted(self, name: str) -> float:
        """Return the mean of a scheduling counter per step."""
        return statistics.fmean(line["scheduling"][name] for line in self.lines)


def bench_scheduling(*, quick: bool, say: Callable[[str], None]) -> Result:
    """Return figures by variant (`…_WAY`), and its makespan and tail over ours; and the
    core's own cost.
    """
    size, ways = (QUICK, QUICK_WAYS) if quick else (FULL, tuple(WAYS))
    runs: dict[str, list[Run]] = {way: [] for way in ways}
    for seed in range(size.seeds):
        for way in ways:
            run = _run(way, size, seed=seed)
            runs[way].append(run)
            steps = ", ".join(f"{one.makespan_s:.2f}" for one in run.rollouts)
            say(
                f"seed {seed}, {way}: rollouts of {steps} s, the longest trajectories waited "
                f"{_tails(run)} s in all"
            )
    conditions = conditions_of(runs, size)
    figures = figures_of(runs, conditions)
    figures |= router_figures(quick=quick)
    conditions["router_us_10000x256"] = ROUTER_CONDITION
    conditions["load"] = (
        f"{os.getloadavg()[1]:.1f} processes wanted a core in the last five minutes, this bench's "
        "included"
    )
    return Result(bench="scheduling", figures=figures, conditions=conditions)


def _run(way: str, size: Size, *, seed: int) -> Run:
    with tempfile.TemporaryDirectory(prefix="rollweave-bench-") as scratch:
        made = config(way, size, seed=seed, directory=scratch)
        run, measured = trained(
            made, programs=Programs(engine="benchmarks.scheduling.paced_engine")
        )
        return Run(
            rollouts=tuple(read_rollouts(Path(run.journal), made)[size.learned :]),
            lines=tuple(measured.data.steps[size.learned :]),
            spoken=read_spoken(run),
        )


def _tails(run: Run) -> str:
    return ", ".join(f"{one.tail_queue_s:.2f}" for one in run.rollouts)


def figures_of(runs: Mapping[str, Sequence[Run]], conditions: dict[str, Any]) -> dict[str, Figure]:
    """See `bench_scheduling`.

    Seconds are medians over steps and seeds, ratios those of pairs of the same step and
    seed.
    """
    figures: dict[str, Figure] = {}
    others = [way for way in runs if way != OURS]
    for way in others:
        figures[f"makespan_over_{way}"] = over(runs[way], runs[OURS], "makespan_s")
    figures["makespan_ratio"] = [
        value for way in others if isinstance(value := figures[f"makespan_over_{way}"], float)
    ]
    for way in others:
        figures[f"tail_queueing_over_{way}"] = over(runs[way], runs[OURS], "tail_queue_s")
    found = [figures[f"tail_queueing_over_{way}"] for way in others]
    figures["tail_queueing_ratio"] = [value for value in found if isinstance(value, float)]
    if PROGRESSIVE in runs:
        for way in PRIORITIES:
            figures[f"progressive_makespan_over_{way}"] = over(
                runs[way], runs[PROGRESSIVE], "makespan_s"
            )
            figures[f"progressive_tail_over_{way}"] = over(
                runs[way], runs[PROGRESSIVE], "tail_queue_s"
            )
    for name in ("makespan_s", "tail_queue_s"):
        figures |= {f"{name}_{way}": statistics.median(_all(runs[way], name)) for way in runs}
    figures |= {f"prefix_hit_{way}": _prefix_hit(runs[way]) for way in runs}
    figures["real_step_ms"] = 1e3 * max(_real_step_s(run) for way in runs for run in runs[way])
    figures |= {f"preemptions_{way}": _mean(runs[way], "preemptions") for way in runs}
    moving = [way for way in MIGRATING if way in runs]
    for way in moving:
        figures |= {
            f"{name}_{way}": _mean(runs[way], name)
            for name in ("migrations", "migrations_failed", "moved_tokens")
        }
        figures[f"migration_exposed_ms_{way}"] = 1e3 * _mean(runs[way], "exposed_s")
    pairs = [
        (mine, its) for way in moving for mine, its in zip(runs[way], runs[UNMOVED], strict=True)
    ]
    figures["migration_token_mismatches"] = sum(
        mismatches(mine.spoken, its.spoken) for mine, its in pairs
    )
    conditions["logprobs"] = f"{_furthest(pairs):.1g} is the greatest difference between them"
    return figures | _prediction_figures(runs[OURS])


def _prediction_figures(ours: Sequence[Run]) -> dict[str, Figure]:
    pairs = [pair for run in ours for rollout in run.rollouts for pair in rollout.predictions]
    told = [run.lines[-1]["predictor"] for run in ours]
    asked = sum(line["scheduling"]["predictions"] for run in ours for line in run.lines)
    late = sum(line["scheduling"]["predictions_late"] for run in ours for line in run.lines)
    return {
        "prediction_exposed_ms": 0.0,
        "prediction_ms": statistics.fmean(stats["mean_ms"] for stats in told),
        "prediction_p99_ms": max(stats["p99_ms"] for stats in told),
        "predictions_late": late / asked,
        "prediction_correlation": float(np.corrcoef(np.array(pairs).T)[0, 1]),
    }


def over(theirs: Sequence[Run], ours: Sequence[Run], name: str) -> float | None:
    """Return the median of their seconds over ours, step by step; None where ours is 0."""
    pairs = list(zip(_all(theirs, name), _all(ours, name), strict=True))
    return (
        round(statistics.median(one / other for one, other in pairs), 4)
        if all(other for _, other in pairs)
        else None
    )


def _all(runs: Sequence[Run], name: str) -> list[float]:
    return [getattr(rollout, name) for run in runs for rollout in run.rollouts]


def _mean(runs: Sequence[Run], name: str) -> float:
    return statistics.fmean(run.counted(name) for run in runs)


def _prefix_hit(runs: Sequence[Run]) -> float:
    """Return the share of prompt tokens that the turn's engine had already computed."""
    lines = [line for run in runs for line in run.lines]
    return float(
        sum(line["cached_tokens"] for line in lines) / sum(line["context_tokens"] for line in lines)
    )


def _real_step_s(run: Run) -> float:
    """Return the mean seconds of an engine's step, without padding."""
    engines = run.lines[-1]["engines"].values()
    return float(
        sum(stats["busy_s"] for stats in engines) / sum(stats["steps"] for stats in engines)
    )


def _furthest(pairs: Sequence[tuple[Run, Run]]) -> float:
    found = [
        furthest(mine.spoken[key], its.spoken[key])
        for mine, its in pairs
        for key in mine.spoken
        if key in its.spoken and mine.spoken[key].tokens == its.spoken[key].tokens
    ]
    return max(found, default=0.0)


def _least_pace_ms() -> float:
    return 1e3 * Pace().step_s(StepWork(0, 0, 1, 1))


def conditions_of(runs: Mapping[str, Sequence[Run]], size: Size) -> dict[str, Any]:
    rollouts = [rollout for run in runs[OURS] for rollout in run.rollouts]
    told = (
        f"{size.seeds} seeds, {size.learned} steps that only teach and {size.measured} measured "
        "ones each"
    )
    lengths = ", ".join(f"{one.tail_turns} of {one.turns} turns" for one in rollouts)
    return {
        "ways": {way: dict(WAYS[way]) for way in runs},
        "steps": f"{told}; ratios are medians over the pairs of equal step and seed, theirs over "
        f"that of {OURS}",
        "workload": f"{size.groups} prompts x {MEMBERS}, 12 tokens a turn at most; the longest "
        f"had {lengths}",
        "tools": "log-normal latency, median 50 ms, sigma 1 (mean 82 ms)",
        "engines": "2 processes, 4 slots and 4,096 tokens of KV each; contexts of all "
        "trajectories of a step are more",
        "paced": f"real tokens of a tiny model; steps are padded to those of {MODEL} on an {GPU}, "
        f"{TOKENS} tokens as one and {TOKENS} times as fast "
        "(benchmarks/scheduling/paced_engine.py)",
        "real_step_ms": "of a step without its pace, on average, where most; the pace is "
        f"{_least_pace_ms():.1f} ms or more",
        "makespan_s": "from the first turn that an engine is given to the end of the last "
        "trajectory of the step",
        "tail_queue_s": "what all turns of the step's longest trajectory waited for a slot, in "
        "the core and on engines",
        "migration_token_mismatches": f"trajectories of {', '.join(MIGRATING)} whose tokens, or "
        f"log-probs by more than {LOGPROB_TOLERANCE:g}, differ from those of {UNMOVED}, which "
        "never migrates",
        "prediction_exposed_ms": "0 by construction: no turn waits for a prediction; "
        "predictions_late is the share of those that came after the next turn was asked for, or "
        "never",
        "preemptions": "turns given to an engine whose slots were all taken; a step's mean, as of "
        "migrations too",
        "migration_exposed_ms": "what turns waited for transfers under way, summed over a step",
    }
