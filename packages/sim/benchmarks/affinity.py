"""Bench `affinity`: step times with pools that are declared, learned, or neither
(RollArt §5.2, §9), on simulated GPUs.

Two domains share two pools: one reads much and writes little, the other thinks at
length. Computing power decides for the first, memory bandwidth for the second. All runs
of a seed have the same tasks, and ratios are of the same steps of the same seed; of the
seeds, the median is reported. Figures ending in _sync are of mode sync, others of
bounded.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from benchmarks.contract import Figure, Result
from benchmarks.harness import Progress
from rollweave.schema.base import Struct
from rollweave.schema.config.root import RunConfig
from rollweave_sim.families import NOTHING, Family, around
from rollweave_sim.run import simulate
from rollweave_sim.workload import Drawn, Plan, Workload

READS = Family(
    name="reading",
    source="assumption: documents of 1,500 tokens, and actions of 60",
    turns=(6, 12),
    prompt=around(2000, sigma=0.3, high=8000),
    output=around(60, sigma=0.5, high=512),
    observation=around(1500, sigma=0.5, high=6000),
    env_s=around(0.5, sigma=0.5, high=5),
    init_s=around(0.5, sigma=0.3, high=5),
    reward_s=NOTHING,
    max_context=131_072,
    max_response=120_000,
    answers=True,
)
THINKS = Family(
    name="thinking",
    source="assumption: one to three turns of 1,500 tokens",
    turns=(1, 3),
    prompt=around(300, sigma=0.3, high=2000),
    output=around(1500, sigma=0.6, high=8192),
    observation=around(100, sigma=0.5, high=1000),
    env_s=around(0.2, sigma=0.5, high=5),
    init_s=around(0.1, sigma=0.3, high=5),
    reward_s=NOTHING,
    max_context=32_768,
    max_response=30_000,
    answers=True,
)

Declared = tuple[str | None, str | None]
"""Pools of the two domains."""

NEITHER: Declared = (None, None)
RIGHT: Declared = ("compute", "bandwidth")
WRONG: Declared = ("bandwidth", "compute")

MIXED, UNIFORM = ("h800", "h20"), ("h800", "h800")
"""GPUs of the pools `compute` and `bandwidth`."""

NEAR = 1.1
"""Step time, over that of the right declaration, from which pools count as learned."""

LEARNED_FROM = 4
"""Steps of a run that are left out of the ratios: in these, the pools are learned."""

MEMBERS, ENGINES = 8, 2
"""Members of a group, and number of a pool's engines."""


class Plans(Struct, frozen=True, kw_only=True):
    """Size of the bench: `groups` of a step, `steps` of a run, the step of a shift, and
    the seeds.
    """

    groups: int
    steps: int
    shift: int
    seeds: int

    @property
    def slots(self) -> int:
        """Slots of an engine, of which each runs four trajectories of a step."""
        return self.groups // 2


FULL = Plans(groups=64, steps=10, shift=5, seeds=3)
QUICK = Plans(groups=4, steps=6, shift=2, seeds=1)


class Growing:
    """From task `since` on, what the environment returns grows tenfold."""

    def __init__(self, work: Workload, *, since: int) -> None:
        self._work, self._since = work, since

    def plan(self, *, index: int, member: int, attempt: int, seed: int) -> Plan:
        plan = self._work.plan(index=index, member=member, attempt=attempt, seed=seed)
        factor = 1.0 if index >= self._since else 0.1
        turns = tuple(
            msgspec.structs.replace(
                turn, observation_tokens=round(factor * turn.observation_tokens)
            )
            for turn in plan.turns
        )
        return msgspec.structs.replace(plan, turns=turns)


def config(
    declared: Declared,
    plan: Plans,
    *,
    learns: bool,
    gpus: Sequence[str],
    mode: str,
    steps: int,
    seed: int,
) -> RunConfig:
    pools = ("compute", "bandwidth")
    large = {"max_turns": 1000, "max_tokens": 131_072, "max_turn_tokens": 32_768}
    forever = {"time_s": 1e6, "step_s": 1e6}
    return RunConfig.model_validate(
        {
            "run": {"name": "affinity", "steps": steps, "seed": seed, "checkpoint_every": 0},
            "sim": {"model": "qwen3-8b"},
            "trainer": {"ranks": 32},
            "tasks": [
                {"env": env, "pool": pool, **large, **forever}
                for env, pool in zip(("reading", "thinking"), declared, strict=True)
            ],
            "pools": {pool: {"resource": gpu} for pool, gpu in zip(pools, gpus, strict=True)},
            "rollout": {
                "mode": mode,
                "affinity": "learned" if learns else "declared",
                "groups_per_step": plan.groups,
                "group_size": MEMBERS,
                "max_running": plan.groups * MEMBERS,
            },
            "engines": [
                {
                    "count": ENGINES,
                    "pool": pool,
                    "max_slots": plan.slots,
                    "kv_tokens": 1 << 30,  # the GPUs' memory is the limit
                    "prefill_chunk_tokens": 2048,
                }
                for pool in pools
            ],
            "eval": {"final_episodes": 0},
            "watchdog": {"turn_s": 1e6, "train_s": 1e6},
        }
    )


class Cell(Struct, frozen=True, kw_only=True):
    """One run of the bench."""

    declared: Declared
    learns: bool = False
    gpus: tuple[str, str] = MIXED
    shifts: bool = False


CELLS: Mapping[str, Cell] = {
    "none": Cell(declared=NEITHER),
    "declared": Cell(declared=RIGHT),
    "wrong": Cell(declared=WRONG),
    "learned": Cell(declared=NEITHER, learns=True),
    "kept": Cell(declared=RIGHT, learns=True),
    "corrected": Cell(declared=WRONG, learns=True),
    "uniform_none": Cell(declared=NEITHER, gpus=UNIFORM),
    "uniform_declared": Cell(declared=RIGHT, gpus=UNIFORM),
    "uniform_learned": Cell(declared=NEITHER, learns=True, gpus=UNIFORM),
    "uniform_kept": Cell(declared=RIGHT, learns=True, gpus=UNIFORM),
    "shift_none": Cell(declared=NEITHER, shifts=True),
    "shift_declared": Cell(declared=RIGHT, shifts=True),
    "shift_learned": Cell(declared=NEITHER, learns=True, shifts=True),
}


def step_times(cell: Cell, plan: Plans, *, mode: str, seed: int) -> list[float]:
    """Return the seconds of the run's steps, without the last ones, during which no
    more trajectories are launched.
    """
    run = config(
        cell.declared,
        plan,
        learns=cell.learns,
        gpus=cell.gpus,
        mode=mode,
        steps=plan.steps + 3,
        seed=seed,
    )
    reads: Workload = Drawn(READS)
    if cell.shifts:
        reads = Growing(reads, since=plan.shift * plan.groups // 2)
    outcome = simulate(run, work={"reading": reads, "thinking": Drawn(THINKS)})
    assert not outcome.summary.error, outcome.summary.error
    return outcome.step_s[: plan.steps]


def steps_until(ours: Sequence[float], best: Sequence[float], *, since: int = 0) -> int:
    """Return the number of steps, counted from `since`, before the first that is near
    the best; all of them if none is.
    """
    near = (number for number in range(since, len(ours)) if ours[number] <= NEAR * best[number])
    return next(near, len(ours)) - since


def figures_of(times: Mapping[str, Sequence[float]], plan: Plans) -> dict[str, float]:
    """Return the figures of one seed and mode."""

    def over(one: str, other: str, since: int = LEARNED_FROM) -> float:
        return sum(times[one][since:]) / sum(times[other][since:])

    mean_s = statistics.fmean(times["declared"])
    after = plan.shift + 3
    return {
        "learned_over_declared": over("learned", "declared"),
        "learned_over_none": over("learned", "none"),
        "declared_over_none": over("declared", "none"),
        "kept_over_declared": over("kept", "declared", 0),
        "wrong_over_declared": over("wrong", "declared"),
        "corrected_over_declared": over("corrected", "declared"),
        "uniform_learned_over_none": over("uniform_learned", "uniform_none", 0),
        "uniform_kept_over_declared": over("uniform_kept", "uniform_declared", 0),
        "shift_learned_over_declared": over("shift_learned", "shift_declared", after),
        "shift_none_over_declared": over("shift_none", "shift_declared", after),
        "steps_to_learn": steps_until(times["learned"], times["declared"]),
        "steps_to_correct": steps_until(times["corrected"], times["declared"]),
        "steps_to_follow": steps_until(
            times["shift_learned"], times["shift_declared"], since=plan.shift
        ),
        "regret": (sum(times["learned"]) - sum(times["declared"])) / mean_s,
        "regret_corrected": (sum(times["corrected"]) - sum(times["declared"])) / mean_s,
    }


def bench_affinity(*, quick: bool, progress: Progress) -> Result:
    plan = QUICK if quick else FULL
    figures: dict[str, Figure] = {}
    raw: dict[str, Any] = {}
    for mode, suffix in (("bounded", ""), ("sync", "_sync")):
        seeds = []
        for seed in range(plan.seeds):
            progress(f"{mode}, seed {seed}")
            times = {
                name: step_times(cell, plan, mode=mode, seed=seed) for name, cell in CELLS.items()
            }
            raw[f"{mode}/{seed}"] = {
                name: [round(seconds, 1) for seconds in of] for name, of in times.items()
            }
            seeds.append(figures_of(times, plan))
        for name in seeds[0]:
            figures[name + suffix] = statistics.median(one[name] for one in seeds)
    conditions: dict[str, Any] = {
        "runs": f"medians of {plan.seeds} seeds, {plan.steps} steps each; simulated Qwen3-8B, "
        f"{ENGINES} engines with {plan.slots} slots on H800 and as many on H20 (uniform: H800 "
        f"alone), {plan.groups} groups of {MEMBERS} trajectories a step",
        "ratios": f"of step times from step {LEARNED_FROM + 1} on; of kept and uniform pools from "
        f"the first, and after a shift from its fourth step on",
        "steps_to_learn": f"steps before the first that takes at most {NEAR} times as long as with "
        "the right declaration; learned begins without a declaration, corrected with the wrong "
        "one, and follow counts from a shift",
        "regret": "seconds lost to the right declaration over the run, in its mean steps",
        "step_s": raw,
    }
    return Result(bench="affinity", figures=figures, conditions=conditions)
