"""Benches `demo`, `fixed`, `multitask` and `longtail`: whether an example learns from
every seed, and how long it takes.

`longtail` trains its example in two ways, interleaved: with turns scheduled
individually, and by trajectory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.contract import Figure, Result
from benchmarks.harness import Progress, median_ratio
from benchmarks.runs import MeasuredRun, conditions_of, example, interleaved


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A seed of `config` is ok if every task has its `targets` success within `limit_s`
    (see `MeasuredRun.trained_s`). `variants` are settings by the suffix of their
    figures.
    """

    config: str
    targets: Mapping[str, float]
    limit_s: float
    seeds: int
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"": ()})


TURN, TRAJECTORY = "_turn", "_trajectory"

GOALS = {
    "demo": Goal(config="frozenlake.toml", targets={"frozenlake": 0.9}, limit_s=180, seeds=10),
    "fixed": Goal(
        config="frozenlake_fixed.toml", targets={"frozenlake": 0.95}, limit_s=60, seeds=10
    ),
    "multitask": Goal(
        config="multitask.toml",
        targets={"frozenlake": 0.85, "calculator": 0.9, "nim": 0.85},
        limit_s=600,
        seeds=5,
    ),
    "longtail": Goal(
        config="longtail.toml",
        targets={"frozenlake": 0.9},
        limit_s=300,
        seeds=3,
        variants={
            TURN: ("rollout.scheduling=turn",),
            TRAJECTORY: ("rollout.scheduling=trajectory",),
        },
    ),
}

QUICK = ("run.steps=12", "eval.final_episodes=64")


def bench_learning(name: str, *, seeds: int | None, quick: bool, progress: Progress) -> Result:
    """Train the example of goal `name` once per seed, and return the figures of
    `figures_of` by variant.
    """
    goal = GOALS[name]
    path, overrides = example(goal.config), QUICK if quick else ()
    count = seeds if seeds is not None else 1 if quick else goal.seeds
    runs: dict[str, list[MeasuredRun]] = {suffix: [] for suffix in goal.variants}
    settings = [*overrides, f"run.name={name}"]
    for suffix, seed, _, run in interleaved(path, settings, goal.variants, range(count)):
        runs[suffix].append(run)
        rates = ", ".join(f"{task} {rate:.3f}" for task, rate in run.summary.success_rate.items())
        progress(f"seed {seed}{suffix}: success {rates} after {run.trained_s:.0f} s")
    conditions = conditions_of(path, overrides) | {
        "seeds": list(range(count)),
        "target_success": dict(goal.targets),
        "limit_s": goal.limit_s,
        "wall_s": "from the start of the processes to the end of the last training step",
        "success": "greedy, on held-out tasks that neither training nor the choice of the "
        "checkpoint used",
    }
    figures: dict[str, Figure] = {}
    for suffix, measured in runs.items():
        of_variant = figures_of(goal, measured, quick=quick)
        figures |= {f"{figure}{suffix}": value for figure, value in of_variant.items()}
        if quick:
            conditions[f"seeds_ok{suffix}"] = "not measured: --quick trains too few steps"
    if TRAJECTORY in runs:
        turn, trajectory = (
            [run.trained_s - run.ready_s for run in runs[way]] for way in (TURN, TRAJECTORY)
        )
        figures["wall_turn_over_trajectory"] = median_ratio(turn, trajectory)
        conditions["wall_turn_over_trajectory"] = (
            "median over seeds, from a warmed-up trainer to the end of the last step"
        )
    return Result(bench=name, figures=figures, conditions=conditions)


def figures_of(goal: Goal, runs: Sequence[MeasuredRun], *, quick: bool) -> dict[str, Figure]:
    """Return lists by seed: `success` of the task furthest below its target,
    `success_TASK` and `success_before_rl_TASK` where there are several tasks (else
    `success_before_rl`), `wall_s`; and `seeds_ok`, the number of seeds that reached
    every target in time.
    """
    rates = [run.summary.success_rate for run in runs]
    furthest = [
        of_run[min(goal.targets, key=lambda task: of_run[task] - goal.targets[task])]
        for of_run in rates
    ]
    figures: dict[str, Figure] = {"success": furthest}
    for task in goal.targets:
        suffix = f"_{task}" if len(goal.targets) > 1 else ""
        if suffix:
            figures[f"success{suffix}"] = [of_run[task] for of_run in rates]
        figures[f"success_before_rl{suffix}"] = [
            line["success"][task]
            for run in runs
            for line in run.data.evaluations
            if line["step"] == 0 and not line["final"]
        ]
    figures["wall_s"] = [round(run.trained_s, 1) for run in runs]
    reached = [
        run.trained_s <= goal.limit_s
        and all(of_run[task] >= target for task, target in goal.targets.items())
        for run, of_run in zip(runs, rates, strict=True)
    ]
    figures["seeds_ok"] = None if quick else sum(reached)
    return figures
