"""The sections `[[tasks]]` and `[buffer]`: what agents do, and what is kept of it."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rollweave.schema.config.algorithm import TaskAlgorithmConfig
from rollweave.schema.config.values import (
    NotNegative,
    Positive,
    PositiveInt,
    Section,
    matching,
)
from rollweave.schema.work import Limits


class TaskConfig(Section):
    """One task domain. Groups are drawn from the domains in proportion to `weight`."""

    env: str = Field(
        description="Registered environment or handler, or `package.module:Class` of your own; in "
        "a simulation also a family of workloads (sim/families.py), a .jsonl trace or a run."
    )
    tag: str = Field(
        "", description="Name of the task domain in metrics; the environment's name if empty."
    )
    pool: str | None = Field(
        None,
        description="Pool whose engines run the turns of this domain (RollArt §5.2); while none of "
        "them serves, those of its fallbacks, and then any engine. Any engine if unset.",
    )
    weight: Positive = Field(1.0, description="Share of groups drawn from this domain.")
    env_weight: NotNegative = Field(
        1.0,
        description="Weight of the reward of its environment or handler beside [[rewards]].",
    )
    group_size: PositiveInt | None = Field(
        None, description="Trajectories in a group of this domain; rollout.group_size if unset."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Passed to the environment as keyword arguments."
    )
    algorithm: TaskAlgorithmConfig = TaskAlgorithmConfig()
    max_turns: PositiveInt = Field(16, description="Maximum number of turns of one trajectory.")
    max_tokens: PositiveInt = Field(
        1024,
        description="Maximum number of tokens of one trajectory, prompt and observations included.",
    )
    max_turn_tokens: PositiveInt = Field(
        128, description="Maximum number of tokens that the agent may sample in one turn."
    )
    time_s: Positive = Field(
        300.0, description="Maximum active seconds of one trajectory over init, run and eval."
    )
    step_s: Positive = Field(
        60.0, description="Maximum seconds of one call of the environment or reward."
    )
    isolation: Literal["inline", "process"] = Field(
        "inline",
        description="Where the environment runs: inline, its plain methods on a thread of the "
        "process that runs the attempt (the controller, or a rollout worker), or in a separate "
        "process, which is killed if a call hangs.",
    )

    @property
    def name(self) -> str:
        return self.tag or self.env

    @property
    def limits(self) -> Limits:
        """Bounds of one of its trajectories."""
        return Limits(
            max_turns=self.max_turns,
            max_tokens=self.max_tokens,
            max_turn_tokens=self.max_turn_tokens,
            time_s=self.time_s,
            step_s=self.step_s,
        )


class BufferConfig(Section):
    """Groups that are rolled out and not yet trained on, in mode decoupled (Laminar
    §3.1, §6).
    """

    groups: PositiveInt | None = Field(
        None,
        description="Maximum number of groups in the buffer, including those under way, counted by "
        "trajectories; if unset, one batch plus the larger of another batch and what "
        "the engines run at once.",
    )
    sample: Annotated[
        str,
        matching(
            r"fifo|newest|advantage|ratio|staleness|[\w.]+:\w+",
            "be fifo, newest, advantage, ratio, staleness or package.module:function",
        ),
    ] = Field(
        "fifo",
        description="The order in which groups are trained on (core/policy/experience.py): fifo, "
        "newest, advantage (greatest first), ratio (nearest to 1; costs a forward pass "
        "over the whole buffer before each step that has a choice), staleness (at "
        "random, fresher ones more often), or `package.module:function`.",
    )
