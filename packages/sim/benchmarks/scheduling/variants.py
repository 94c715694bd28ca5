"""The variants of bench `scheduling`, their workload and its extent."""

from collections.abc import Mapping
from typing import Any

from rollweave.schema.base import Struct
from rollweave.schema.config.root import RunConfig

OURS = "trajectory"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "fcfs": {"ablation": {"changes": ["fcfs", "affinity"]}},
    "round_robin": {"ablation": {"changes": ["round_robin", "affinity"]}},
    "shortest_first": {"ablation": {"changes": ["shortest_first", "affinity"]}},
    "longest_first": {"ablation": {"changes": ["longest_first", "affinity"]}},
    "least_load": {"ablation": {"changes": ["longest_first", "least_load"]}},
    "pinned": {"ablation": {"changes": ["longest_first", "pinned"]}},
    "heddle": {"scheduling": "heddle"},
    "rank": {"scheduling": "trajectory", "ablation": {"changes": ["rank"]}},
    OURS: {"scheduling": "trajectory"},
}
"""Scheduling variants: four priorities on one placement; then, all by longest_first:
two placements that ignore lengths, Heddle as printed, our partition with Heddle's
migration, and ours.
"""

MIGRATING = ("heddle", "rank", OURS)
UNMOVED = "fcfs"
"""Variant that never migrates, whose tokens are compared with those of migrated
trajectories.
"""

QUICK_VARIANTS = (UNMOVED, "heddle", OURS)


class SchedulingPlan(Struct, frozen=True, kw_only=True):
    """Length of a bench: `learned` steps that only teach, then `measured` ones, of
    `groups` groups.
    """

    groups: int
    learned: int
    measured: int
    seeds: int


FULL = SchedulingPlan(groups=4, learned=4, measured=3, seeds=2)
QUICK = SchedulingPlan(groups=2, learned=1, measured=1, seeds=1)
"""Short form of the bench. In the full one, predictions of this workload are good from
the fourth step on; a step of all variants takes about a minute.
"""

MEMBERS = 16
"""Trajectories of a group (Heddle §7: 16 samples a prompt)."""


def config(variant: str, plan: SchedulingPlan, *, seed: int, directory: str) -> RunConfig:
    """Return two engines with four slots each for all trajectories of a step, whose
    contexts exceed the KV caches.
    """
    count = plan.groups * MEMBERS
    return RunConfig.model_validate(
        {
            "run": {
                "name": variant,
                "dir": directory,
                "seed": seed,
                "steps": plan.learned + plan.measured,
            },
            "model": {"scratch": {}},
            "tasks": [
                {"env": "packages.sim.benchmarks.scheduling.long_tasks:LongTask", "tag": "longtail"}
                | {"max_turns": 48, "max_tokens": 1536, "max_turn_tokens": 12}
            ],
            "rollout": {
                "mode": "sync",
                "groups_per_step": plan.groups,
                "group_size": MEMBERS,
                "max_running": count,
                "scheduling": VARIANTS[variant].get("scheduling", "turn"),
            },
            "ablation": VARIANTS[variant].get("ablation", {}),
            "engines": {"count": 2, "max_slots": 4, "kv_tokens": 4096, "deterministic": True},
            "trainer": {"lr": 1e-12},
            "algorithm": {"advantage": "grpo_no_std"},
            "eval": {"final_episodes": 0},
        }
    )
