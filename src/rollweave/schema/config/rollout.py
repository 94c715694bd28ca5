"""The sections `[[tasks]]`, `[buffer]` and `[rollout]`: what agents do, what is kept of
it, and how far rollouts run ahead; and `[[rewards]]` with their judges.
"""

import enum
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)
from typing_extensions import TypedDict

from rollweave.schema.address import parse_url
from rollweave.schema.config.training import TaskAlgorithmConfig
from rollweave.schema.config.values import (
    FORMS,
    WARM,
    Count,
    Finite,
    Flag,
    Many,
    NotNegative,
    Positive,
    PositiveInt,
    Section,
    Spare,
    either,
    form,
    listed,
    matching,
)
from rollweave.schema.errors import FieldError
from rollweave.schema.work import Limits


class TaskConfig(Section):
    """One task domain. Groups are drawn from the domains in proportion to `weight`."""

    env: str = Field(
        description="Registered environment or handler, or `package.module:Class` of your own; in "
        "a simulation also a family of workloads (rollweave_sim/families.py), a .jsonl trace or a "
        "run."
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
    group_size: Many | None = Field(
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
    """Groups that are rolled out and not yet trained on (Laminar §3.1, §6)."""

    sample: Annotated[
        str,
        matching(
            r"fifo|newest|advantage|ratio|entropy|td_error|staleness|[\w.]+:\w+",
            "be fifo, newest, advantage, ratio, entropy, td_error, staleness or "
            "package.module:function",
        ),
    ] = Field(
        "fifo",
        description="The order in which groups are trained on (core/policy/experience.py): fifo, "
        "newest, advantage (greatest first), ratio (nearest to 1), entropy (of the current "
        "policy, greatest first), td_error (of the critic, greatest first), staleness (at "
        "random, fresher ones more often), or `package.module:function`. ratio, entropy and "
        "td_error cost a forward pass over the whole buffer before each step that has a choice.",
    )


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


STARTED = 2
"""Maximum number of environments for each place of INIT that are starting, or wait for
RUN.
"""


class Places(NamedTuple):
    """The number of attempts that may be in INIT, RUN and EVAL, and the number of
    environments that may be alive.
    """

    init: int
    run: int
    eval: int
    alive: int


class PoolSizes(TypedDict):
    """The sizes of the pools of INIT, RUN and EVAL (ProRL §3.3.1)."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    init: PositiveInt
    run: PositiveInt
    eval: PositiveInt


class RolloutConfig(Section):
    """The rollouts: what belongs to a step, and how far they run ahead of training."""

    mode: ModeName = Field(ModeName.BOUNDED, description="Preset of the four pacing policies.")
    alpha: Count | None = Field(
        None,
        description="Maximum staleness in steps of what is trained on (bounded: α of RollArt §6.2; "
        "partial: η of AReaL). Unset: 1 in modes bounded and partial; in mode decoupled unlimited "
        "(inherent staleness, Laminar §3).",
    )
    groups_per_step: Many = Field(8, description="Groups in one training batch.")
    group_size: Many = Field(8, description="Trajectories of one task in a group.")
    spare_groups: Annotated[
        Spare | Literal["learned"], either("be a whole number from 0 to 1000000, or learned")
    ] = Field(
        0,
        description="Groups launched beyond those that steps have a place for; the slowest are "
        "cancelled (sync, one_step, stream, bounded). learned: with dynamic_sampling, as many as "
        "replace those that were filtered in the step before, up to five batches (ROSE §6).",
    )
    spare_members: Spare = Field(
        0, description="Members launched beyond group_size; the slowest are cancelled."
    )
    dynamic_sampling: Flag = Field(
        False, description="Drop groups whose rewards are all equal and draw others (DAPO)."
    )
    max_running: Annotated[
        Annotated[PositiveInt, Tag(FORMS[0])] | Annotated[PoolSizes, Tag(FORMS[1])],
        Discriminator(form),
    ] = Field(
        64,
        description="Maximum number of trajectories whose environments are alive at once, and of "
        "rewards that are computed at once; or, as { init = 32, run = 256, eval = 32 }, of "
        "environments that start, of trajectories that roll out, and of rewards (ProRL §3.3.1). At "
        "most twice init environments are starting, or ready and waiting for a place of run. In "
        "mode decoupled run bounds them, too, and an engine has at most its share of run, and at "
        "most twice its slots.",
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
    scheduling: Literal["turn", "trajectory", "heddle"] = Field(
        "turn",
        description="Preset of the policies that decide when and where turns run "
        "(core/policy/scheduling.py). turn: fcfs, affinity, never migrated; trajectory: "
        "longest_first, partition, migrated by gain; heddle, as the paper prints it: "
        "longest_first, presorted, migrated by rank; in mode decoupled, which has a "
        "placement of its own, trajectory and heddle are longest_first alone.",
    )
    affinity: Literal["declared", "learned"] = Field(
        "declared",
        description="Pools that serve the task domains. declared: those that tasks.pool names. "
        "learned: after each step, those from which the fleet would be done earliest by what "
        "finished turns show; tasks.pool is where a domain begins (RollArt §9).",
    )

    @property
    def places(self) -> Places:
        """The sizes of the pools of the three stages."""
        if isinstance(self.max_running, int):
            return Places(*[self.max_running] * 4)
        init, run = self.max_running["init"], self.max_running["run"]
        # an engine of mode decoupled keeps its weights until what it launched is over
        alive = run if self.mode is ModeName.DECOUPLED else STARTED * init + run
        return Places(init=init, run=run, eval=self.max_running["eval"], alive=alive)


RUBRIC_FILES = (".md", ".txt")
"""Ends of a rubric that is the path of a file."""


class JudgeConfig(Section):
    """A model that grades trajectories from 0 to 1, behind the `url` of the reward: any
    endpoint with OpenAI's chat completions; without a `url`, an engine that the run
    starts when it needs the judge (RollArt §3.1).
    """

    model: str = Field(
        min_length=1,
        description="Its name at the endpoint; without a url, the directory of a checkpoint, or "
        "the name of a model on the hub.",
    )
    rubric: str = Field(
        min_length=1,
        description="What it grades by: text, or the path of a file that ends in .md or .txt.",
    )
    reference: str | None = Field(
        None,
        description="Key of the task's payload under which its reference answer is, which the "
        "judge is shown, too.",
    )
    pairwise: bool = Field(
        False,
        description="Compare members of a group with each other; the reward is a member's share "
        "of wins.",
    )
    request: dict[str, Any] = Field(
        default_factory=dict,
        description="More fields of the request, such as max_tokens or reasoning_effort.",
    )

    @property
    def has_file(self) -> bool:
        """True if the rubric is the path of a file, not text."""
        return self.rubric.endswith(RUBRIC_FILES) and "\n" not in self.rubric


ENV_REWARD = "env"
"""Name of the reward of the environment or handler among the components of a
reward.
"""


class RewardConfig(Section):
    """A reward that is added to that of the environment, computed by a function of the
    user's, a URL, or a judge (`docs/REWARDS.md`).
    """

    name: Annotated[
        str, matching(r"[A-Za-z0-9_][A-Za-z0-9_-]*", "consist of letters, digits, _ and -")
    ] = Field(description="Its name in metrics, traces and errors.", max_length=100)
    weight: Finite = Field(1.0, description="Its weight in the sum of all rewards.")
    tasks: Annotated[tuple[str, ...], BeforeValidator(listed)] = Field(
        (), description="Task domains to which it applies; all if empty."
    )
    run: Literal["serverless"] | None = Field(
        None,
        description="serverless: behind its URL, or for a function by Ray Serve, which the run "
        "deploys it on (it needs rollweave-ray). If unset, a function runs where the run "
        "evaluates its attempts.",
    )
    function: str | None = Field(
        None, description="The user's function, package.module:name (docs/REWARDS.md)."
    )
    url: str | None = Field(
        None,
        description="URL of an HTTP function that takes JSON and answers with the reward, or base "
        "URL of a judge's API, such as https://HOST/v1. Its bearer token, if it has one, is in the "
        "environment, as ROLLWEAVE_REWARD_NAME_TOKEN with the reward's name in capitals (and _ "
        "for -).",
    )
    judge: JudgeConfig | None = None
    timeout_s: Positive = Field(
        120.0,
        description="Maximum seconds for one reward, with all retries; then the attempt has no "
        "reward.",
    )

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        return None if url is None else parse_url(url)

    @property
    def token_variable(self) -> str:
        """The environment variable with the bearer token of the URL, if it has one."""
        return f"ROLLWEAVE_REWARD_{self.name.upper().replace('-', '_')}_TOKEN"

    @property
    def deployed(self) -> bool:
        """True if it is a function that the run deploys on Ray Serve."""
        return self.run == "serverless" and self.function is not None

    @property
    def embedded(self) -> bool:
        """True if it is a judge whose engine the run starts."""
        return self.judge is not None and self.url is None and self.function is None

    @property
    def pairwise(self) -> bool:
        """True if it compares members of a group with each other."""
        return self.judge is not None and self.judge.pairwise

    @property
    def kind(self) -> Literal["function", "url", "judge"]:
        """The kind of source that computes the reward."""
        if self.function is not None:
            return "function"
        return "url" if self.judge is None else "judge"

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = [kind for kind in ("function", "url") if getattr(self, kind) is not None]
        if len(kinds) != 1 and not self.embedded:
            rule = "have exactly one of function and url, or a judge"
            raise FieldError("", rule, " and ".join(kinds) or "neither")
        if self.judge is not None and self.function is not None:
            raise FieldError("judge", "be left out with a function", "a section")
        if self.name == ENV_REWARD:
            rule = f"not be {ENV_REWARD}, the name of the environment's own reward"
            raise FieldError("name", rule, repr(self.name))
        return self
