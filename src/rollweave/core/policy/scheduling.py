"""Presets of the three policies that decide when and where a trajectory's turns run; a
user may also combine them (Heddle §4, §5). Also the questions that several mechanisms
ask about the configuration.
"""

from dataclasses import dataclass
from functools import cached_property

from rollweave.schema.config.ablation import PARTITIONS, POLICIES, AblationConfig
from rollweave.schema.config.rollout import ModeName, RolloutConfig
from rollweave.schema.config.root import RunConfig


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
    def assigns(self) -> bool:
        """True if a trajectory is bound to an engine, and its turns wait for this
        engine even if another engine is free.
        """
        return self.placement == "pinned" or self.by_rank or self.by_finish

    @cached_property
    def by_finish(self) -> bool:
        """True if each turn waits for the engine on which it should finish first
        (`mechanisms/placement/policy/elastic`).
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
        return self.by_rank and self.priority in ("fcfs", "longest_first")


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
    return any(group.phase == "prefill" for group in config.engines)
