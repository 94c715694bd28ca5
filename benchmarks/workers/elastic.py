"""Bench `elastic`: rollout workers that come and go, beside a fixed pool of the fewest
and one of the most workers, in bursts of tool calls (Heddle §3, the tool manager).

Live, a controller with real worker processes submits bursts of rollouts to itself.
Each worker runs at most `TOOLS` tools at once, as on a host with that many cores; a
tool only waits, so that the workers of this machine do not compete for its cores.
Simulated, a run trains in mode sync, in which no rollout runs during a training step.
"""

import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.contract import Figure, Result
from benchmarks.workers.bench import WorkersPlan, config_of, model_of, run_controller
from benchmarks.workers.bursts import BURSTS, Bursts
from benchmarks.workers.world import TURN_S
from rollweave.core.state import State
from rollweave.record.steps import worker_figures
from rollweave.schema.base import Struct
from rollweave.schema.config.root import RunConfig
from rollweave.sim.faults import NullObserver
from rollweave.sim.workers import START_S
from rollweave.sim.world import World

LARGEST = 4
"""Workers of the largest pool; the smallest has one."""

TOOLS = 2
"""Tools that a worker runs at once."""

LIMIT_S = 300.0
"""Maximum seconds of one controller."""

POOLS: dict[str, dict[str, Any]] = {
    "smallest": {"count": 1},
    "largest": {"count": LARGEST},
    "elastic": {"count": LARGEST, "minimum": 0},
}

CONDITIONS = {
    "wall": "seconds from the submission of a burst to its last rollout, summed over the bursts "
    "of a controller",
    "worker_seconds": "seconds of all worker processes, starts included, from the first burst "
    "until the end of the gap after the last",
    "zero_to_first_worker_s": "seconds from a burst's submission until a worker was ready, in "
    "bursts that began without any",
    "starts": "workers that were started because attempts waited, in one controller",
    "simulated": f"a worker starts in {START_S:g} s; the smallest pool is one with a quarter of "
    "the places, since a simulated worker does not compute",
}


class ElasticPlan(Struct, frozen=True, kw_only=True):
    """Length of the bench: `rollouts` in a burst, of `turns` turns each, and a tool for
    each turn that takes `tool_s`; `gap_s` after each burst.
    """

    rounds: int
    rollouts: int
    turns: int
    tool_s: float
    gap_s: float
    idle_s: float
    steps: int


FULL = ElasticPlan(rounds=3, rollouts=48, turns=8, tool_s=1.0, gap_s=30.0, idle_s=10.0, steps=20)
QUICK = ElasticPlan(rounds=1, rollouts=16, turns=4, tool_s=0.25, gap_s=4.0, idle_s=1.0, steps=3)


def bench_elastic(*, quick: bool, progress: Callable[[str], None]) -> Result:
    """Return, live and simulated (`sim_…`), `wall_over_largest` and
    `worker_seconds_over_largest` of the workers that come and go and of the smallest
    pool, `starts`, `zero_to_first_worker_s` and `lost_trajectories`.
    """
    plan = QUICK if quick else FULL
    figures, rounds = {**_simulated(plan)}, []
    with tempfile.TemporaryDirectory(prefix="rollweave-bench-") as scratch:
        model = model_of(Path(scratch), _as_workers(plan))
        for number in range(plan.rounds):
            measured = {
                pool: run_controller(
                    _live(Path(scratch) / f"{number}-{pool}", plan, pool, model),
                    "bursts",
                    plan.rollouts,
                    plan.gap_s,
                    kind=Bursts,
                    limit_s=LIMIT_S,
                )
                for pool in POOLS
            }
            rounds.append(measured)
            progress(
                "seconds of the bursts and of the workers: "
                + ", ".join(
                    f"{pool} {sum(one.burst_s):.1f} and {one.worker_s:.0f}"
                    for pool, one in measured.items()
                )
            )
    return Result(
        bench="elastic",
        figures={**_figures(rounds), **figures},
        conditions={
            **CONDITIONS,
            "live": f"{plan.rounds} rounds, medians; {BURSTS} bursts of {plan.rollouts} rollouts "
            f"of {plan.turns} turns, each with a tool of {plan.tool_s:g} s, {TOOLS} at once in a "
            f"worker; the engine takes {TURN_S:g} s for a turn; a gap of {plan.gap_s:g} s after "
            f"each burst; idle_s {plan.idle_s:g}; 1 and {LARGEST} workers",
        },
    )


def _figures(rounds: list[dict[str, Bursts]]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for prefix, pool in (("", "elastic"), ("smallest_", "smallest")):
        figures[f"{prefix}wall_over_largest"] = statistics.median(
            sum(one[pool].burst_s) / sum(one["largest"].burst_s) for one in rounds
        )
        figures[f"{prefix}worker_seconds_over_largest"] = statistics.median(
            one[pool].worker_s / one["largest"].worker_s for one in rounds
        )
    waits = [wait for one in rounds for wait in one["elastic"].first_s]
    figures["zero_to_first_worker_s"] = statistics.median(waits) if waits else None
    figures["starts"] = statistics.median(one["elastic"].starts for one in rounds)
    figures["most_workers"] = max(one["elastic"].largest for one in rounds)
    figures["fewest_workers"] = min(one["elastic"].least for one in rounds)
    figures["lost_trajectories"] = sum(pool.lost for one in rounds for pool in one.values())
    return figures


# Live.


def _as_workers(plan: ElasticPlan) -> WorkersPlan:
    return WorkersPlan(
        rounds=plan.rounds, rollouts=plan.rollouts, turns=plan.turns, step_s=plan.tool_s
    )


def _live(directory: Path, plan: ElasticPlan, pool: str, model: Path) -> RunConfig:
    idle = {"idle_s": plan.idle_s} if "minimum" in POOLS[pool] else {}
    made = config_of(directory, _as_workers(plan), 0, model=model)
    task = made.tasks[0].model_copy(update={"options": {**made.tasks[0].options, "at_once": TOOLS}})
    return RunConfig.model_validate(
        {
            **made.model_copy(update={"tasks": (task,)}).model_dump(exclude_unset=True),
            "workers": {**POOLS[pool], **idle},
        }
    )


# Simulated.


def _simulated(plan: ElasticPlan) -> dict[str, Figure]:
    """Return the figures of the simulated runs."""
    places = 64
    walls: dict[str, float] = {}
    states: dict[str, State] = {}
    for pool, workers in POOLS.items():
        smallest = pool == "smallest"
        world = World(
            _training(
                plan,
                {} if "minimum" not in workers else {**workers, "idle_s": 20.0},
                places=places // LARGEST if smallest else places,
            ),
            observer=NullObserver(),
        )
        states[pool] = world.run().state
        walls[pool] = world.clock.now
    seconds = {pool: POOLS[pool]["count"] * wall for pool, wall in walls.items()}
    counted = worker_figures(states["elastic"], walls["elastic"])
    seconds["elastic"] = counted["seconds"]
    return {
        "sim_wall_over_largest": walls["elastic"] / walls["largest"],
        "sim_worker_seconds_over_largest": seconds["elastic"] / seconds["largest"],
        "sim_smallest_wall_over_largest": walls["smallest"] / walls["largest"],
        "sim_smallest_worker_seconds_over_largest": seconds["smallest"] / seconds["largest"],
        "sim_starts": counted["starts"],
    }


def _training(plan: ElasticPlan, workers: Mapping[str, Any], *, places: int) -> RunConfig:
    """Return a simulated run in mode sync."""
    return RunConfig.model_validate(
        {
            "run": {"name": "simulated", "steps": plan.steps},
            "sim": {"model": "qwen3-8b", "gpu": "h800", "trainer_gpus": 4},
            "tasks": [{"env": "swe", "max_turns": 50, "max_tokens": 32768, "step_s": 1200.0}],
            "rollout": {
                "mode": "sync",
                "groups_per_step": 16,
                "group_size": 4,
                "max_running": places,
            },
            "engines": {"count": 8, "max_slots": 64, "kv_tokens": 262144},
            "workers": dict(workers),
            "eval": {"final_episodes": 0},
            "watchdog": {"turn_s": 3600.0, "train_s": 3600.0},
        }
    )
