"""When and where a trajectory's turns run, as a preset of three policies that a user
may also mix (Heddle §4, §5).
"""

from rollweave.schema.base import Struct
from rollweave.schema.config.sections import ModeName, RolloutConfig

PRESETS = {
    "turn": ("fcfs", "affinity", "never"),
    "trajectory": ("longest_first", "partition", "gain"),
}
"""Priority, placement and migration by the name of the preset."""


class Scheduling(Struct, frozen=True, kw_only=True):
    """What follows from the three choices."""

    priority: str
    placement: str
    migration: str

    @property
    def predicts(self) -> bool:
        """Somebody asks how long a trajectory will yet be."""
        return self.priority == "longest_first" or self.by_rank

    @property
    def preempts(self) -> bool:
        """A pending turn takes the slot of an active one of lower rank (Heddle Alg. 1;
        Autellix).
        """
        return self.priority in ("longest_first", "shortest_first")

    @property
    def by_rank(self) -> bool:
        """Engines own shares of the trajectories sorted by length, planned by the work
        in them, or by eq. 2 (presorted).
        """
        return self.placement in ("partition", "presorted")

    @property
    def homes(self) -> bool:
        """A trajectory has an engine of its own, for which its turns wait even where
        another one is free.
        """
        return self.placement == "pinned" or self.by_rank

    @property
    def keeps(self) -> bool:
        """An engine keeps its KV cache for its own trajectories in the order of their
        ranks, which must not change often.
        """
        return self.by_rank and self.priority in ("fcfs", "longest_first")


def scheduling(rollout: RolloutConfig) -> Scheduling:
    """The preset, and what is set beside it. Nothing migrates without a partition.

    In mode decoupled a trajectory keeps to its engine until that is repacked
    (`core/pace`).
    """
    priority, placement, migration = PRESETS[rollout.scheduling]
    placement = "pinned" if rollout.mode is ModeName.DECOUPLED else rollout.placement or placement
    return Scheduling(
        priority=rollout.priority or priority,
        placement=placement,
        migration=(rollout.migration or migration)
        if placement in ("partition", "presorted")
        else "never",
    )
