"""Presets of the three policies that decide when and where a trajectory's turns run; a
user may also combine them (Heddle §4, §5). Also the questions that several mechanisms
ask about the configuration, and the ranks of turns: turns of higher rank run first, in
the core's queue and in an engine's batch; turns of equal rank run in the order of
arrival.

The core sends ranks; the engine preempts by them (`engine/batching`), and a
preempted request keeps its KV while the blocks last. Two mechanisms keep ranks from
doing harm. Hysteresis: a predicted length becomes a coarse level that is left only well
beyond its bounds, and equals never preempt each other, so near-equal trajectories do
not alternate. A bound on starvation: a turn that was overtaken by `OVERTAKES` turns per
slot outranks all turns that are not overdue themselves.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from rollweave.schema.base import Struct
from rollweave.schema.config.rollout import ModeName, RolloutConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.config.run import PARTITIONS, POLICIES, AblationConfig

RATIO = 1.5
"""Ratio between two levels of a predicted length: predictions err by more than that
(Heddle Fig. 13 reports correlations below 1).
"""

MARGIN = 0.25
"""Hysteresis: a prediction must leave its level by this fraction before the level
changes.
"""

UNKNOWN = 64
"""Level of a trajectory without a prediction: above all lengths. Its first turn is
informative, and long trajectories that are recognized late form the tail.
"""

OVERTAKES = 64
"""Maximum number of later turns that may overtake a turn, for each slot. An agent's
turn is short, and a trajectory has tens of them.
"""

OVERDUE = 1e12
"""Rank of an overdue turn, minus its arrival: above all others, the oldest first."""


class TurnView(Struct, frozen=True, kw_only=True):
    """The properties of a turn that priorities read.

    `arrival` numbers turns as they arrive; `level` is the level of the trajectory's
    predicted length.
    """

    launched_at: float
    arrival: int
    output_tokens: int
    level: int


def fcfs(view: TurnView) -> float:
    """First come, first served, by the launch of the trajectory: old trajectories
    finish before they become stale.
    """
    return -view.launched_at


def round_robin(view: TurnView) -> float:
    """Every turn goes to the end of the queue, as in a scheduler that sees only
    requests (Heddle §2.3).
    """
    return -float(view.arrival)


def shortest_first(view: TurnView) -> float:
    """Least attained service first, over the whole trajectory (Autellix)."""
    return -float(view.output_tokens)


def longest_first(view: TurnView) -> float:
    """Progressive priority: the longest by prediction first, which shortens the batch's
    makespan (Heddle §4.2, Alg. 1).

    The rank follows the whole length, not the remaining length: a trajectory that nears
    its end keeps its rank, ends, and frees its KV. By the remaining length, all
    trajectories would near their ends together and hold their contexts until then.
    """
    return float(view.level)


RANKS: Mapping[str, Callable[[TurnView], float]] = {
    "fcfs": fcfs,
    "round_robin": round_robin,
    "shortest_first": shortest_first,
    "longest_first": longest_first,
}


def level_of(tokens: float, former: int | None) -> int:
    """Return the level of a predicted length.

    `former` is kept unless the prediction exceeds it by the margin.
    """
    exact = math.log(max(1.0, tokens), RATIO)
    if former is not None and former - MARGIN <= exact < former + 1 + MARGIN:
        return former
    return math.floor(exact)


def overdue_rank(arrival: int) -> float:
    """Return the rank of a turn that was overtaken too often."""
    return OVERDUE - arrival


def is_overdue(overtaken: int, *, slots: int) -> bool:
    """Return whether a turn is overdue after `overtaken` later turns got a slot, on
    engines with `slots` slots.
    """
    return overtaken > OVERTAKES * max(1, slots)


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    """The three choices, and what follows from them."""

    priority: str
    placement: str
    migration: str

    @cached_property
    def predicts(self) -> bool:
        """True if a policy needs predicted lengths."""
        return self.priority == "longest_first" or self.by_rank

    @cached_property
    def preempts(self) -> bool:
        """True if a pending turn takes the slot of an active one of lower rank (Heddle
        Alg. 1; Autellix).
        """
        return self.priority in ("longest_first", "shortest_first")

    @cached_property
    def by_rank(self) -> bool:
        """True if engines own shares of the trajectories sorted by length, planned by
        their work, or by eq. 2 (presorted).
        """
        return self.placement in PARTITIONS

    @cached_property
    def plans_once(self) -> bool:
        """True if the plan for a batch is kept, scaled to the trajectories that are
        left, until the next batch (Heddle §5.3).
        """
        return self.placement == "presorted"

    @cached_property
    def assigns(self) -> bool:
        """True if a trajectory is bound to an engine, and its turns wait for this
        engine even if another engine is free.
        """
        return self.placement == "pinned" or self.by_rank or self.by_finish

    @cached_property
    def by_finish(self) -> bool:
        """True if each turn waits for the engine on which it should finish first
        (`mechanisms/placement/elastic`).
        """
        return self.placement == "earliest"

    @cached_property
    def steals(self) -> bool:
        """True if an engine with a free slot takes the turns of other engines."""
        return self.migration == "gain" or self.by_finish

    @cached_property
    def reserves_kv(self) -> bool:
        """True if an engine reserves its KV cache for its own trajectories in the order
        of their ranks, which must not change often.
        """
        return self.placement == "partition" and self.priority in ("fcfs", "longest_first")


def scheduling(rollout: RolloutConfig, ablation: AblationConfig) -> Scheduling:
    """Return the preset with the overrides. Nothing migrates without a partition.

    In mode decoupled a trajectory stays on its engine until the engine is consolidated,
    so that only the priority is taken from the preset.
    """
    priority, placement, migration = POLICIES[rollout.scheduling]
    placement = "pinned" if rollout.mode is ModeName.DECOUPLED else ablation.placement or placement
    return Scheduling(
        priority=ablation.priority or priority,
        placement=placement,
        migration=(ablation.migration or migration) if placement in PARTITIONS else "never",
    )


def assigns(config: RunConfig) -> bool:
    """True if trajectories are assigned to engines."""
    return scheduling(config.rollout, config.ablation).assigns


def has_learned_pools(config: RunConfig) -> bool:
    """True if task domains move to the pools that serve them best."""
    return config.rollout.affinity == "learned"


def splits_turns(config: RunConfig) -> bool:
    """True if there are engines for prompts alone."""
    return any(group.phase in ("prefill", "either") for group in config.engines)


def divides(config: RunConfig) -> bool:
    """True if places move between engines and ranks of the trainer."""
    return config.trainer.elastic


def prices_turns(config: RunConfig) -> bool:
    """True if the prices of prompts and outputs are learned from finished turns."""
    return splits_turns(config) or divides(config)


def moves_phases(config: RunConfig) -> bool:
    """True if engines move between prefill and decoding."""
    return any(group.phase == "either" for group in config.engines)
