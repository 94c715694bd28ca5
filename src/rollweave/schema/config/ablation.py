"""The section `[ablation]`: policies of the papers in place of ours, and mechanisms
that can be left out.
"""

from typing import Literal, Self

from pydantic import Field, model_validator

from rollweave.schema.config.values import Section
from rollweave.schema.errors import FieldError

PRIORITIES = ("fcfs", "round_robin", "shortest_first", "longest_first")
PLACEMENTS = (
    "affinity",
    "earliest",
    "pinned",
    "least_load",
    "hybrid",
    "partition",
    "presorted",
)
MIGRATIONS = ("never", "rank", "gain")
PREDICTORS = ("ridge", "boosted", "lm", "prompt", "history")
"""The scheduling policies, by what they decide (core/policy/), and the predictors of
lengths (train/lengths/).
"""

PARTITIONS = ("partition", "presorted")
"""Placements that divide the trajectories among the engines by their length."""

POLICIES = {
    "turn": ("fcfs", "affinity", "never"),
    "trajectory": ("longest_first", "partition", "gain"),
}
"""Priority, placement and migration of each preset."""

Mechanism = Literal[
    "free_stepping",
    "reward_overlap",
    "early_updates",
    "repack",
    "deltas",
    "staging",
    "prefix_cache",
    "cuda_graphs",
]


class AblationConfig(Section):
    """Baselines and ablations. They exist for comparisons with the papers' baselines; a
    run for its own sake leaves them out.
    """

    policies: tuple[str, ...] = Field(
        (),
        description="Policies in place of those of rollout.scheduling, at most one of each kind. "
        "The order in which turns run: fcfs, round_robin, shortest_first, longest_first. "
        "The engine that runs a turn: affinity, earliest (the one on which the turn should finish "
        "first), pinned, least_load, hybrid; or the way in "
        "which trajectories are divided by length: partition by their work, presorted by "
        "Heddle's eq. 2. When a trajectory moves to the engine of its new rank: never, "
        "rank (whenever that engine differs), gain (if the predicted gain exceeds the "
        "exposed cost). The predictor of lengths: ridge, unless another one is given; boosted, lm, "
        "and the baselines prompt and history.",
    )
    without: tuple[Mechanism, ...] = Field(
        (),
        description="Mechanisms to do without: free_stepping (all environments wait for the "
        "slowest one before each turn), reward_overlap (rewards wait until the whole "
        "batch is rolled out), early_updates (mode bounded: engines take new weights when the "
        "next batch is complete, as in RollArt §6.2), repack (mode decoupled: the tail of an "
        "engine's batch stays), deltas (relays send whole weights), staging (engines stop while "
        "they receive new weights), prefix_cache (an engine forgets finished turns), "
        "cuda_graphs (an engine on a GPU launches the kernels of each decoding step).",
    )

    @model_validator(mode="after")
    def _one_of_each_kind(self) -> Self:
        known = (*PRIORITIES, *PLACEMENTS, *MIGRATIONS, *PREDICTORS)
        for name in self.policies:
            if name not in known:
                raise FieldError("policies", f"be among {', '.join(known)}", repr(name))
        for kind in (PRIORITIES, PLACEMENTS, MIGRATIONS, PREDICTORS):
            chosen = [name for name in self.policies if name in kind]
            if len(chosen) > 1:
                rule = f"have at most one of {', '.join(kind)}"
                raise FieldError("policies", rule, " and ".join(chosen))
        return self

    @property
    def priority(self) -> str | None:
        """The order of turns, if it is not the preset's."""
        return self._chosen(PRIORITIES)

    @property
    def placement(self) -> str | None:
        """The placement of turns, if it is not the preset's."""
        return self._chosen(PLACEMENTS)

    @property
    def migration(self) -> str | None:
        """The rule by which trajectories migrate, if it is not the preset's."""
        return self._chosen(MIGRATIONS)

    @property
    def predictor(self) -> str:
        """The predictor of lengths."""
        return self._chosen(PREDICTORS) or PREDICTORS[0]

    def _chosen(self, kind: tuple[str, ...]) -> str | None:
        return next((name for name in self.policies if name in kind), None)
