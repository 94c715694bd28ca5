"""The section `[rollout]`: what belongs to a step, and how far rollouts run ahead."""

import enum
from typing import Annotated, Literal

from pydantic import Field

from rollweave.schema.config.values import WARM, Count, Flag, Positive, PositiveInt, Section


class ModeName(enum.StrEnum):
    """Presets of launch, update, in-flight and acceptance policy
    (`core/policy/modes.py`).
    """

    SYNC = "sync"
    ONE_STEP = "one_step"
    STREAM = "stream"
    PARTIAL = "partial"
    BOUNDED = "bounded"
    DECOUPLED = "decoupled"


class RolloutConfig(Section):
    """The rollouts: what belongs to a step, and how far they run ahead of training."""

    mode: ModeName = Field(ModeName.BOUNDED, description="Preset of the four pacing policies.")
    alpha: Count | None = Field(
        None,
        description="Maximum staleness in steps of what is trained on (bounded: α of RollArt §6.2; "
        "partial: η of AReaL). Unset: 1 in modes bounded and partial; in mode decoupled unlimited "
        "(inherent staleness, Laminar §3).",
    )
    groups_per_step: PositiveInt = Field(8, description="Groups in one training batch.")
    group_size: PositiveInt = Field(8, description="Trajectories of one task in a group.")
    spare_groups: Count | Literal["learned"] = Field(
        0,
        description="Groups launched beyond those that steps have a place for; the slowest are "
        "cancelled (sync, one_step, bounded). learned: with dynamic_sampling, as many as replace "
        "those that were filtered in the step before, up to five batches (ROSE §6).",
    )
    spare_members: Count = Field(
        0, description="Members launched beyond group_size; the slowest are cancelled."
    )
    dynamic_sampling: Flag = Field(
        False, description="Drop groups whose rewards are all equal and draw others (DAPO)."
    )
    max_running: PositiveInt = Field(
        64,
        description="Maximum number of trajectories whose environments are alive at once, and of "
        "rewards that are computed at once. In mode decoupled an engine has at most its share of "
        "them, and at most twice its slots.",
    )
    temperature: Annotated[Positive, WARM] = Field(
        1.0, description="Sampling temperature in training."
    )
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] = Field(
        1.0, description="Nucleus sampling in training."
    )
    retries: Count = Field(
        2, description="Number of retries of a turn or an environment start after a failure."
    )
    scheduling: Literal["turn", "trajectory"] = Field(
        "turn",
        description="Preset of the policies that decide when and where turns run "
        "(core/policy/scheduling.py). turn: fcfs, affinity, never migrated; trajectory: "
        "longest_first, partition, migrated by gain (Heddle); in mode decoupled, which has a "
        "placement of its own, longest_first alone.",
    )
    affinity: Literal["declared", "learned"] = Field(
        "declared",
        description="Pools that serve the task domains. declared: those that tasks.pool names. "
        "learned: after each step, those from which the fleet would be done earliest by what "
        "finished turns show; tasks.pool is where a domain begins (RollArt §9).",
    )
