"""Bench `demo`: does the demo learn, from every seed, and how long does it take?"""

from collections.abc import Callable

from rollweave.bench.contract import Figure, Result
from rollweave.bench.runs import conditions_of, example, measure

CONFIG = "frozenlake.toml"
SEEDS = 10
TARGET = 0.9
"""Greedy success on held-out maps of a seed that counts as ok."""

LIMIT_S = 180.0
"""Wall time of such a seed, from the start of its processes to the end of its last training step."""

QUICK = ("run.steps=12", "eval.final_episodes=64")


def bench_demo(*, seeds: int | None, quick: bool, say: Callable[[str], None]) -> Result:
    """Train the demo once a seed. Figures: `success` and `wall_s` (lists by seed), `seeds_ok`, and success before RL."""
    path, overrides = example(CONFIG), QUICK if quick else ()
    count = seeds if seeds is not None else 1 if quick else SEEDS
    success: list[float] = []
    wall_s: list[float] = []
    before: list[float] = []
    for seed in range(count):
        run = measure(path, [*overrides, f"run.seed={seed}", "run.name=demo"])
        success.append(min(run.summary.success_rate.values(), default=0.0))
        wall_s.append(round(run.trained_s, 1))
        at_start = [line for line in run.data.evaluations if line["step"] == 0 and not line["final"]]
        before += [min(line["success"].values()) for line in at_start[:1]]
        say(f"seed {seed}: success {success[-1]:.3f} after {wall_s[-1]:.0f} s, {run.summary.steps} steps")
    conditions = conditions_of(path, overrides) | {
        "seeds": list(range(count)),
        "target_success": TARGET,
        "limit_s": LIMIT_S,
        "wall_s": "from the start of the processes to the end of the last training step, warm-up included",
        "success": "greedy, on held-out maps that neither training nor the choice of the checkpoint saw",
    }
    seeds_ok = sum(rate >= TARGET and wall <= LIMIT_S for rate, wall in zip(success, wall_s, strict=True))
    if quick:
        conditions["seeds_ok"] = "not measured: --quick trains too few steps"
    figures: dict[str, Figure] = {
        "success": success,
        "wall_s": wall_s,
        "success_before_rl": before,
        "seeds_ok": None if quick else seeds_ok,
    }
    return Result(bench="demo", figures=figures, conditions=conditions)
