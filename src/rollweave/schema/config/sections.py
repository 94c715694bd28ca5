"""The sections of a configuration: every setting is stated once, here, with a
sentence.

`root.py` combines them.
"""

import enum
import re
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rollweave.schema.address import Hosts, parse_address, parse_url
from rollweave.schema.serving import ServerName
from rollweave.schema.weights import TransportName
from rollweave.schema.work import Limits

# Strict: `true` is no number, nor is a number in quotes. Whole numbers pass as floats.
Flag = Annotated[bool, Field(strict=True)]
# Whole numbers fit into 64 bits, as journals and messages require.
PositiveInt = Annotated[int, Field(ge=1, lt=2**63, strict=True)]
Count = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True)]  # torch takes no larger one
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Finite = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(ge=0, le=1, strict=True)]

EVAL_EPISODES = 1_000_000
"""Maximum episodes of a task domain in one evaluation. The tasks of periodic and final
evaluations are drawn from separate ranges of this size.
"""

FINAL_TASKS_FROM = EVAL_EPISODES
"""Index of the final evaluation's first task: the periodic evaluations, which choose
the checkpoint, never see these.
"""


def matching(pattern: str, rule: str) -> AfterValidator:
    """Require text to match the whole `pattern`; otherwise the error says that the
    field must `rule`.
    """

    def check(value: str) -> str:
        if re.fullmatch(pattern, value) is None:
            raise PydanticCustomError("rule", rule)
        return value

    return AfterValidator(check)


Variable = Annotated[str, matching(r"[A-Za-z_]\w*", "be the name of an environment variable")]


def _listed(given: Any) -> Any:
    """Return a list of one name for a name alone."""
    return (given,) if isinstance(given, str) else given


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


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


HEAD_DIM = 16
"""Width of an attention head of a model from scratch; two heads share keys and
values.
"""

VLLM_HEAD_DIM = 32
"""Width of an attention head of a model from scratch in a run with engines of kind
vllm, which on a CPU compute no narrower heads.
"""


class ScratchModel(Section):
    """A Qwen3-style model that starts from random weights, with a word-level tokenizer
    of the tasks' words.
    """

    hidden: Annotated[PositiveInt, Field(multiple_of=2 * HEAD_DIM)] = Field(
        64, description="Width of the model; an MLP is three times as wide."
    )
    layers: PositiveInt = Field(2, description="Number of layers.")

    @property
    def ffn(self) -> int:
        """Width of an MLP."""
        return 3 * self.hidden


class ModelConfig(Section):
    """The model that is trained: a checkpoint, or random weights."""

    path: str | None = Field(
        None,
        description="Checkpoint directory (config.json, safetensors, tokenizer) to start from.",
    )
    scratch: ScratchModel | None = Field(
        None, description="Start from random weights of this shape instead of a checkpoint."
    )
    implementation: Literal["native", "transformers"] | None = Field(
        None,
        description="Code with which the trainer computes the model: this package's own, for "
        "Llama, Qwen2 and Qwen3, or that of transformers, for any causal language model. If "
        "unset, native where it supports the model.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Number format of weights and activations."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="Device of engines and trainer: auto is a GPU where their host has one, which "
        "CUDA_VISIBLE_DEVICES may choose.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.scratch is None):
            raise ValueError("model must have exactly one of path and [model.scratch]")
        return self


LossName = Literal["ppo", "dual_clip", "gspo", "cispo", "dppo"]
Estimator = Literal[
    "grpo",
    "grpo_no_std",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gigpo",
    "gigpo_no_std",
    "gae",
    "gae_turn",
    "distill",
]
GROUPLESS: frozenset[Estimator] = frozenset({"reinforce_pp", "gae", "gae_turn", "distill"})
"""Estimators that compare no members of a group: one member is enough; distill does
with a reward_weight.
"""

OF_CRITIC: frozenset[Estimator] = frozenset({"gae", "gae_turn"})
"""Estimators that need a critic."""

OF_TURNS: frozenset[Estimator] = OF_CRITIC | {"gigpo", "gigpo_no_std"}
"""Estimators that take the rewards of single turns."""

Aggregate = Literal["token_mean", "sequence_mean", "budget"]
Correction = Literal["bypass", "decoupled", "tis", "icepop", "sequence_mask", "reject"]
Overlong = Literal["train", "drop", "punish"]
Discount = Annotated[float, Field(gt=0, le=1, strict=True)]


class LossValues(NamedTuple):
    """The bounds of a loss, and how its tokens are averaged."""

    clip_low: float
    clip_high: float
    aggregate: Aggregate


PUBLISHED_LOSSES: dict[LossName, LossValues] = {
    "ppo": LossValues(0.2, 0.28, "token_mean"),
    "dual_clip": LossValues(0.2, 0.2, "token_mean"),
    "gspo": LossValues(3e-4, 4e-4, "sequence_mean"),
    "cispo": LossValues(1.0, 4.0, "token_mean"),
    "dppo": LossValues(0.2, 0.2, "token_mean"),
}
"""The published values of each loss: for ppo those of DAPO (arXiv:2503.14476); for
dual_clip arXiv:1912.09729; for gspo arXiv:2507.18071 §5.1; for cispo no lower bound
(arXiv:2506.13585), and a weight of at most 5 as in ScaleRL (arXiv:2510.13786), because
its own paper gives no number; for dppo arXiv:2602.04879.
"""


class TaskAlgorithmConfig(Section):
    """Settings of a task domain that replace those of the run's [algorithm]; one that
    is unset is the run's.
    """

    advantage: Estimator | None = Field(None, description="Its advantage estimator.")
    gamma: Discount | None = Field(None, description="Its discount per turn.")
    reward_weight: NotNegative | None = Field(
        None, description="Its weight of the reward beside the teacher."
    )
    loss: LossName | None = Field(
        None,
        description="Its policy loss; another one than the run's has its own published "
        "clip_low, clip_high and aggregate where the domain leaves them unset.",
    )
    clip_low: Share | None = Field(None, description="Its lower bound.")
    clip_high: NotNegative | None = Field(None, description="Its upper bound.")
    aggregate: Aggregate | None = Field(None, description="How its token losses are averaged.")
    correction: Correction | None = Field(
        None, description="Its correction for stale or differing log-probs."
    )
    overlong: Overlong | None = Field(
        None, description="What it does with trajectories that reach max_tokens."
    )

    def inherits(self, field: str, algorithm: "AlgorithmConfig") -> bool:
        """Return whether the domain takes `field` from the run's `algorithm`."""
        if getattr(self, field) is not None:
            return False
        return field not in LossValues._fields or self.loss in (None, algorithm.loss)

    def over(self, algorithm: "AlgorithmConfig") -> "AlgorithmConfig":
        """Return the run's `algorithm` with what the domain has instead."""
        own = {
            field: getattr(self, field)
            for field in type(self).model_fields
            if not self.inherits(field, algorithm)
        }
        return algorithm.model_copy(update=own) if own else algorithm


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
    pin: Flag = Field(
        False,
        description="True: this domain stays in its pool, whatever rollout.affinity learns.",
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


class RolloutConfig(Section):
    """The rollouts: what belongs to a step, and how far they run ahead of training."""

    mode: ModeName = Field(ModeName.BOUNDED, description="Preset of the four pacing policies.")
    alpha: Count = Field(
        1,
        description="Maximum staleness in steps (bounded: α of RollArt §6.2; partial: η of AReaL).",
    )
    groups_per_step: PositiveInt = Field(8, description="Groups in one training batch.")
    group_size: PositiveInt = Field(8, description="Trajectories of one task in a group.")
    spare_groups: Count = Field(
        0,
        description="Groups launched beyond those that steps have a place for; the slowest are "
        "cancelled (sync, one_step, bounded).",
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
        "rewards that are computed at once.",
    )
    temperature: Positive = Field(1.0, description="Sampling temperature in training.")
    top_p: Annotated[float, Field(gt=0, le=1, strict=True)] = Field(
        1.0, description="Nucleus sampling in training."
    )
    retries: Count = Field(
        2, description="Number of retries of a turn or an environment start after a failure."
    )
    engine_batch: PositiveInt | None = Field(
        None,
        description="Maximum number of trajectories on one engine in mode decoupled, within its "
        "share of max_running; twice its slots if unset.",
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
    predictor: Literal["ridge", "boosted", "lm", "prompt", "history"] = Field(
        "ridge",
        description="The predictor of trajectory lengths (train/lengths/), for policies that need "
        "one.",
    )


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
"""The scheduling policies, by what they decide (core/policy/)."""

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


Sharing = Literal[
    "cooperative",
    "ttft",
    "tpot",
    "spatial",
    "preemption",
    "partition",
    "multiplexing",
    "autoscaling",
]
"""Ways in which serving and rollouts share an engine (sim/coserving.py)."""


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
        "exposed cost).",
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
    sharing: Sharing = Field(
        "cooperative",
        description="How serving and rollouts share a simulated serving engine (ROSE §6). "
        "cooperative: rollouts compute while serving meets both of its limits; ttft, tpot: "
        "while it meets that one; spatial: both compute step by step in turn; preemption: the "
        "same, and lent engines forget finished turns; partition: and each has half of the "
        "memory for KV; multiplexing: the one whose next token is due first computes, rollouts "
        "by four times the limit of serving; autoscaling: an engine holds one model at a time, "
        "and loads rollouts once it had no requests for a minute.",
    )

    @model_validator(mode="after")
    def _one_of_each_kind(self) -> Self:
        known = (*PRIORITIES, *PLACEMENTS, *MIGRATIONS)
        for name in self.policies:
            if name not in known:
                raise ValueError(
                    f"ablation.policies must be among {', '.join(known)}, got {name!r}"
                )
        for kind in (PRIORITIES, PLACEMENTS, MIGRATIONS):
            chosen = [name for name in self.policies if name in kind]
            if len(chosen) > 1:
                raise ValueError(
                    f"ablation.policies must have at most one of {', '.join(kind)}, got "
                    f"{' and '.join(chosen)}"
                )
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

    def _chosen(self, kind: tuple[str, ...]) -> str | None:
        return next((name for name in self.policies if name in kind), None)


BLOCK_TOKENS = 16
"""Tokens in one KV block."""


EnginePhase = Literal["both", "prefill", "decode"]
"""Parts of turns that an engine computes."""


class EngineConfig(Section):
    """A group of equal engines.

    `[engines]` is one group, several `[[engines]]` are several.
    """

    kind: Literal["embedded", "vllm", "sglang"] = Field(
        "embedded",
        description="embedded is Rollweave's own engine; vllm and sglang are servers that the run "
        "starts, or, with address, servers that already run.",
    )
    count: PositiveInt = Field(1, description="Engine processes.")
    pool: str | None = Field(
        None, description="Pool of hosts on which these engines run; any host if unset."
    )
    phase: EnginePhase = Field(
        "both",
        description="decode: the engine samples, and prefill engines compute prompts for it, from "
        "which the KV moves, where that saves time; prefill: it samples nothing; both: it "
        "computes its own prompts.",
    )
    degree: PositiveInt = Field(
        1,
        description="Parallel degree of one engine: CPU threads, a server's tensor parallelism, "
        "or GPUs in a simulation.",
    )
    python: str = Field(
        "python3", description="Interpreter that has vLLM or SGLang, on the engine's host."
    )
    args: tuple[str, ...] = Field(
        (), description="More arguments of the server, which take precedence."
    )
    address: Annotated[tuple[str, ...], BeforeValidator(_listed)] = Field(
        (),
        description="Address of a server that already runs, http://HOST:PORT, as the host of "
        "the engine reaches it, or a list of them, one for each engine.",
    )
    token_env: Variable | None = Field(
        None, description="Environment variable that holds the token of the servers at address."
    )
    token_file: str | None = Field(
        None, description="File that holds the token of the servers at address."
    )
    borrowed: Flag = Field(
        False,
        description="Borrow up to `count` serving engines that lend their slack, those with the "
        "lowest use of KV, while they lend it (ROSE §4); so far in simulations with "
        "[sim.serving].",
    )
    max_slots: PositiveInt = Field(
        64, description="Maximum number of sequences that one engine decodes at once."
    )
    kv_tokens: Annotated[PositiveInt, Field(multiple_of=BLOCK_TOKENS)] = Field(
        65536,
        description="Size of one engine's KV cache in tokens; a simulation lowers it to what its "
        "GPUs have room for.",
    )
    prefill_chunk_tokens: PositiveInt = Field(
        512, description="Maximum number of prompt tokens that one engine step computes."
    )
    deterministic: Flag = Field(
        False,
        description="Use fixed tiles, so that results do not depend on the rest of the batch, bit "
        "for bit; slower.",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_for_each_address(cls, data: Any) -> Any:
        if isinstance(data, dict) and "count" not in data:
            addresses = _listed(data.get("address"))
            if isinstance(addresses, list | tuple) and addresses:
                return {**data, "count": len(addresses)}
        return data

    @field_validator("address")
    @classmethod
    def _are_addresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(parse_address(address) for address in addresses)

    @property
    def server(self) -> ServerName | None:
        """The kind of the engines' inference servers; None if they have none."""
        return None if self.kind == "embedded" else self.kind

    @property
    def moves_kv(self) -> bool:
        """True if these engines can export KV to others of their kind and import it."""
        return self.kind == "embedded" or (self.kind == "vllm" and not self.address)


class AllocationConfig(Section):
    """Engines of several degrees, as many of each as `core/policy/allocation` finds
    best for the lengths seen (Heddle §6).
    """

    budget: PositiveInt = Field(description="Sum of all engines' degrees.")
    degrees: Annotated[tuple[PositiveInt, ...], Field(min_length=2)] = Field(
        (1, 2, 4, 8), description="Degrees to choose from; unless set, those within the budget."
    )

    @model_validator(mode="before")
    @classmethod
    def _within_budget(cls, data: Any) -> Any:
        if isinstance(data, dict) and "degrees" not in data and isinstance(data.get("budget"), int):
            return {
                **data,
                "degrees": tuple(
                    degree for degree in (1, 2, 4, 8) if degree <= max(2, data["budget"])
                ),
            }
        return data


TRAINER_THREADS = 1
"""CPU threads of one trainer process."""


class TrainerConfig(Section):
    """The trainer: its processes, and the optimizer."""

    ranks: PositiveInt = Field(
        1, description="Trainer processes (FSDP2 over gloo or NCCL beyond one)."
    )
    tensor_parallel: PositiveInt = Field(
        1,
        description="Consecutive ranks that compute the same rows together and divide the layers, "
        "by the model's own plan (implementation transformers); FSDP2 shards over the others.",
    )
    pool: str | None = Field(
        None, description="Pool of hosts on which the trainer's ranks run; any host if unset."
    )
    colocated: Flag = Field(
        False,
        description="The trainer and the engines take turns on the same devices, and each gives "
        "its memory back to the other (mode sync).",
    )
    lr: Positive = Field(1e-5, description="Peak learning rate.")
    final_lr: Share = Field(
        1.0,
        description="Learning rate at the last step, as a share of the peak; linear in between.",
    )
    warmup_steps: Count = Field(5, description="Steps of linear learning-rate warm-up.")
    weight_decay: NotNegative = Field(0.0, description="AdamW's decoupled weight decay.")
    max_grad_norm: Positive = Field(
        1.0, description="Gradient norm above which gradients are scaled down."
    )
    epochs: PositiveInt = Field(1, description="Passes over one batch.")
    minibatches: PositiveInt = Field(1, description="Optimizer steps in one pass.")
    micro_tokens: PositiveInt = Field(
        16384, description="Tokens packed into one forward pass; gradients accumulate beyond it."
    )
    save_memory: tuple[Literal["activations", "optimizer"], ...] = Field(
        (),
        description="activations: compute them again in the backward pass, for about a third more "
        "computation (activation checkpointing); optimizer: keep its moments in the host's memory "
        "and move them to the GPU for each step (CPU offload).",
    )


class AlgorithmConfig(Section):
    """The policy loss and the estimator of advantages (`docs/ALGORITHMS.md`)."""

    advantage: Estimator = Field("grpo", description="Advantage estimator (train/advantages.py).")
    gamma: Discount = Field(
        1.0, description="Discount per turn, for environments with rewards per turn."
    )
    reward_weight: NotNegative = Field(
        0.0,
        description="With advantage distill: weight of (reward - mean of the group), which is "
        "added to what the teacher says of each token.",
    )
    loss: LossName = Field("ppo", description="Policy loss (train/losses.py).")
    clip_low: Share | None = Field(
        None,
        description="Bound of the ratio below 1 (dppo: of the decrease of a probability); the "
        "loss's published value if unset.",
    )
    clip_high: NotNegative | None = Field(
        None,
        description="Bound of the ratio above 1 (dppo: of the increase of a probability); the "
        "loss's published value if unset.",
    )
    aggregate: Aggregate | None = Field(
        None,
        description="How token losses are averaged: over all tokens, over sequences of their means,"
        " or over sequences of their sums divided by the most tokens that one may sample (budget, "
        "Dr. GRPO); as the loss was published if unset.",
    )
    correction: Correction = Field(
        "bypass",
        description="bypass: the ratio to the rollout's log-probs. Others: to recomputed ones, "
        "with a weight w = proximal/behavior of each token: decoupled drops tokens with w above 2, "
        "tis truncates w to 2, icepop drops tokens outside [0.5, 5]; sequence_mask and reject are "
        "tis, and drop sequences: with a geometric mean of w outside [0.5, 5], or with any w "
        "outside [1e-4, 100].",
    )
    overlong: Overlong = Field(
        "train",
        description="Trajectories that reach tasks.max_tokens: train on them like others, drop "
        "them from the loss, or punish: subtract up to 1 from the reward over the last fifth of "
        "max_tokens (DAPO).",
    )
    kl: NotNegative = Field(
        0.0, description="Coefficient of the KL divergence to the starting weights."
    )
    kl_direction: Literal["reverse", "forward"] = Field(
        "reverse",
        description="reverse: k3 estimate of KL(policy, start) on sampled tokens, with a constant "
        "coefficient; forward: exact KL(start, policy) over the vocabulary, which keeps "
        "every choice of the start alive, with a coefficient that falls to 0 from 45 % to 90 % "
        "of the run.",
    )
    entropy: NotNegative = Field(0.0, description="Coefficient of the entropy bonus.")
    routing_replay: Flag = Field(
        False,
        description="Train a mixture of experts with the experts that the engine has chosen for "
        "each token (R3), weighted by the trainer's router; engines of kind vllm return them.",
    )

    @property
    def loss_values(self) -> LossValues:
        """The values in effect: the loss's published ones where unset."""
        published = PUBLISHED_LOSSES[self.loss]
        return LossValues(
            published.clip_low if self.clip_low is None else self.clip_low,
            published.clip_high if self.clip_high is None else self.clip_high,
            self.aggregate or published.aggregate,
        )


class CriticConfig(Section):
    """The critic of the estimators gae and gae_turn: a separate model, which starts
    like the policy and is trained beside it.
    """

    lr: Positive | None = Field(
        None, description="Its peak learning rate, with the policy's schedule; trainer.lr if unset."
    )
    gae_lambda: Share = Field(
        0.95,
        description="λ of generalized advantage estimation: 1 trusts what was observed, 0 the "
        "critic's value of the next state.",
    )


ALL_LINEAR = "all-linear"
"""Every linear layer but the output head, as peft names them."""


class LoraConfig(Section):
    """Low-rank adapters, which are trained instead of the model's weights
    (`docs/LORA.md`).
    """

    rank: PositiveInt = Field(16, description="Rank of each adapter.")
    alpha: Positive = Field(32.0, description="An adapter's output is multiplied by alpha / rank.")
    targets: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_listed)] = Field(
        (ALL_LINEAR,),
        description="Linear layers with an adapter: all-linear for all but the output head, or a "
        'list of names or of their ends, such as ["q_proj", "v_proj"].',
    )

    path: str | None = Field(
        None,
        description="Directory of an adapter of the model, as peft writes it, to start from; new "
        "ones if unset.",
    )

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        return self.alpha / self.rank


class TeacherConfig(Section):
    """The teacher of the estimator distill: a model behind HTTP, with the student's
    vocabulary.
    """

    url: str = Field(
        description="Address of its server, http://HOST:PORT, which every rollout worker reaches."
    )
    dialect: Literal["completions", "sglang"] = Field(
        "completions",
        description="completions: /v1/completions with prompt_logprobs (vLLM, `rollweave engine`); "
        "sglang: SGLang's /generate.",
    )
    model: str = Field("", description="Its name at the server; the server's only model if empty.")
    token_env: Variable | None = Field(
        None,
        description="Environment variable that holds the server's bearer token, if it has one.",
    )
    timeout_s: Positive = Field(
        120.0,
        description="Maximum seconds for the log-probs of one trajectory, with all retries; then "
        "the attempt fails as teacher_error.",
    )

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        return parse_address(url, field="teacher.url")


RUBRIC_FILES = (".md", ".txt")
"""Ends of a rubric that is the path of a file."""


UNIT_SCALE = (0.0, 1.0)
"""Scale of a judge that names none, and of a share of wins."""


class JudgeConfig(Section):
    """A model that grades trajectories, behind any endpoint with OpenAI's chat
    completions.
    """

    url: str = Field(description="Base URL of its API, such as https://HOST/v1.")
    model: str = Field(min_length=1, description="Its name at the endpoint.")
    rubric: str = Field(
        min_length=1,
        description="What it grades by: text, or the path of a file that ends in .md or .txt.",
    )
    reference: str | None = Field(
        None,
        description="Key of the task's payload under which its reference answer is, which the "
        "judge is shown, too.",
    )
    scale: tuple[Finite, Finite] = Field(
        UNIT_SCALE, description="Lowest and highest grade; the grade is the reward."
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

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        return parse_url(url, field="rewards.judge.url").rstrip("/")

    @property
    def has_file(self) -> bool:
        """True if the rubric is the path of a file, not text."""
        return self.rubric.endswith(RUBRIC_FILES) and "\n" not in self.rubric

    @model_validator(mode="after")
    def _is_a_scale(self) -> Self:
        if not self.scale[0] < self.scale[1]:
            raise ValueError(
                f"rewards.judge.scale must have a lower end below the upper one, got "
                f"{list(self.scale)}"
            )
        if self.pairwise and self.scale != UNIT_SCALE:
            raise ValueError(
                "rewards.judge.scale must be left out with pairwise, whose reward is a share of "
                f"wins, got {list(self.scale)}"
            )
        return self


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
    tasks: Annotated[tuple[str, ...], BeforeValidator(_listed)] = Field(
        (), description="Task domains to which it applies; all if empty."
    )
    run: Literal["inline", "workers", "serverless"] | None = Field(
        None,
        description="Where it is computed: inline, by the controller, or workers, by rollout "
        "workers, which are declarations that are checked; serverless, behind its URL, or for a "
        "function by Ray Serve, which the run deploys it on. If unset, a function runs where the "
        "run evaluates its attempts.",
    )
    function: str | None = Field(
        None, description="The user's function, package.module:name (docs/REWARDS.md)."
    )
    url: str | None = Field(
        None, description="URL of an HTTP function that takes JSON and answers with the reward."
    )
    judge: JudgeConfig | None = None
    token_env: Variable | None = Field(
        None, description="Environment variable with the bearer token of the URL or judge."
    )
    token_file: str | None = Field(
        None, description="File with the bearer token of the URL or judge."
    )
    timeout_s: Positive = Field(
        120.0,
        description="Maximum seconds for one reward, with all retries; then the attempt has no "
        "reward.",
    )

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        return None if url is None else parse_url(url, field="rewards.url")

    @property
    def deployed(self) -> bool:
        """True if it is a function that the run deploys on Ray Serve."""
        return self.run == "serverless" and self.function is not None

    @property
    def pairwise(self) -> bool:
        """True if it compares members of a group with each other."""
        return self.judge is not None and self.judge.pairwise

    @property
    def kind(self) -> Literal["function", "url", "judge"]:
        """The kind of source that computes the reward."""
        if self.function is not None:
            return "function"
        return "url" if self.url is not None else "judge"

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        where = f"rewards ({self.name})"
        kinds = [kind for kind in ("function", "url", "judge") if getattr(self, kind) is not None]
        if len(kinds) != 1:
            raise ValueError(
                f"{where} must have exactly one of function, url and judge, got "
                f"{' and '.join(kinds) or 'none'}"
            )
        if self.name == ENV_REWARD:
            raise ValueError(
                f"rewards.name must not be {ENV_REWARD}, the name of the environment's own "
                f"reward, got {self.name!r}"
            )
        tokens = [name for name in ("token_env", "token_file") if getattr(self, name) is not None]
        if self.function is not None and tokens:
            raise ValueError(f"{where}.{tokens[0]} must be left out with a function, got one")
        if len(tokens) > 1:
            raise ValueError(f"{where} must have one of token_env and token_file, got both")
        if self.run not in (None, "serverless") and self.function is None:
            raise ValueError(f"{where}.run must be serverless with a {kinds[0]}, got {self.run}")
        return self


class WarmupConfig(Section):
    """Supervised warm-up on scripted transcripts before RL.

    The environment says what they contain.
    """

    steps: Count = Field(0, description="Optimizer steps; 0 is no warm-up.")
    batch: PositiveInt = Field(16, description="Transcripts in one step.")


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
    evict: Annotated[
        str, matching(r"age|size|[\w.]+:\w+", "be age, size or package.module:function")
    ] = Field(
        "age",
        description="The order in which groups leave a full buffer: age, size (in tokens), or "
        "`package.module:function`.",
    )
    max_age: Count | None = Field(
        None,
        description="Maximum staleness in steps of what is trained on; unlimited if unset (inherent"
        " staleness).",
    )


ENDPOINT = r"(\[[0-9a-fA-F:.]+\]|[^\[\]:@/?#\s]+):[0-9]{1,5}"
"""Pattern of an address and a port."""

Endpoint = Annotated[str, matching(ENDPOINT, "be an address and a port, HOST:PORT")]
RayAddress = Annotated[
    str,
    matching(f"auto|{ENDPOINT}", "be auto, or HOST:PORT of a Ray cluster with a node here"),
]


class ClusterConfig(Section):
    """The hosts of a run. Without this section, it uses this machine alone.

    Every host runs an agent, which joins the controller; the controller's own machine
    takes part only if an agent is there, too.
    """

    launcher: Literal["manual", "local", "ray"] = Field(
        "manual",
        description="How agents are started: manual, by the user (`rollweave host`); ray, by Ray, "
        "on its nodes; local, by the controller on this machine, to try a "
        "configuration.",
    )
    address: Endpoint | None = Field(
        None,
        description="Address of this machine, and port, on which the controller listens for "
        "hosts; port 0 is any free one. Unset: the loopback address with launcher local, the "
        "address of this node with launcher ray.",
    )
    hosts: PositiveInt | None = Field(
        None,
        description="Number of hosts that must have joined before the run begins; others may join "
        "later. With launcher ray, also the maximum number of nodes that the run takes; unset: "
        "all nodes, and the run begins with those that Ray has at the start.",
    )
    join_s: Positive = Field(600.0, description="Maximum seconds to wait for these hosts.")
    ray: RayAddress = Field(
        "auto",
        description="Address of the Ray cluster, of which this machine is a node; auto: that of "
        "the node that runs here.",
    )
    env: tuple[Variable, ...] = Field(
        (),
        description="Environment variables of the controller that processes on all hosts get, too; "
        "for example HF_TOKEN.",
    )
    files: tuple[str, ...] = Field(
        (),
        description="Files and folders below the working directory that every host gets, beside "
        "the modules and files that the tasks name.",
    )

    @property
    def host(self) -> str:
        """The address without the port; "" if it is unset."""
        return (self.address or "").rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port; 0 if it is unset."""
        return 0 if self.address is None else int(self.address.rpartition(":")[2])

    @model_validator(mode="after")
    def _launcher_has_what_it_needs(self) -> Self:
        if self.hosts is None and self.launcher != "ray":
            raise ValueError(f"cluster.hosts must be given with launcher {self.launcher}")
        if self.address is None and self.launcher == "manual":
            raise ValueError("cluster.address must be given with launcher manual")
        if self.port >= 1 << 16:
            raise ValueError(
                f"cluster.address must have a port below {1 << 16}, got {self.address}"
            )
        return self


class PoolConfig(Section):
    """A class of hosts with the same resource (RollArt §5.2)."""

    resource: str = Field(
        min_length=1,
        description="Resource of all hosts of this pool: one that the agent names "
        "(`--resource`), or whole words of the name of the GPUs. If it has an amount, that "
        "limits the processes on a host's CPUs.",
    )
    fallback: tuple[str, ...] = Field(
        (), description="Pools that are used where this one has no free devices, in this order."
    )
    site: str = Field(
        "",
        description="Name of the cluster or data center of these hosts, if the link to the others "
        "is slow: each version of the weights crosses the link between two sites once.",
    )


class WorkersConfig(Section):
    """Rollout workers: processes that run environments, handlers and rewards (RollArt
    §6.1).
    """

    count: Count = Field(
        0, description="Number of worker processes; 0: all of this runs in the controller."
    )
    minimum: Count | None = Field(
        None,
        description="Number of workers that are always there; up to `count` start when attempts "
        "wait for a place, and end when they are idle. All `count`, always, if unset.",
    )
    idle_s: NotNegative = Field(
        60.0,
        description="Seconds for which a worker is kept that has not been needed; at least as "
        "long as a start takes.",
    )
    pool: str | None = Field(
        None, description="Pool of hosts on which the workers run; any host if unset."
    )

    @property
    def elastic(self) -> bool:
        """True if the number of workers changes."""
        return self.minimum is not None and self.minimum < self.count

    @property
    def first(self) -> int:
        """The number of workers with which a world begins."""
        return self.count if self.minimum is None else self.minimum

    @model_validator(mode="after")
    def _minimum_is_at_most_count(self) -> Self:
        if self.minimum is not None and self.minimum > self.count:
            raise ValueError(
                f"workers.minimum must be at most workers.count ({self.count}), got {self.minimum}"
            )
        return self


class WeightsConfig(Section):
    """The transfer of weights to the engines."""

    relays: Count = Field(
        0,
        description="Number of machines among which engines are divided, each with a relay that "
        "holds the weights for them (Laminar §4); 0: engines read the trainer's memory.",
    )
    transport: TransportName = Field("tcp", description="Transport of weights between relays.")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None, description="Number format of published weights; model.dtype if unset."
    )


class EvalConfig(Section):
    """Evaluations on held-out tasks, while the run trains and at its end."""

    every: Count = Field(
        0,
        description="Steps between held-out evaluations, which choose the checkpoint `best`; the "
        "last step always has one. 0: only the final one.",
    )
    episodes: Annotated[Count, Field(le=EVAL_EPISODES)] = Field(
        64, description="Episodes of each task domain in a periodic evaluation."
    )
    final_episodes: Annotated[Count, Field(le=EVAL_EPISODES)] = Field(
        200, description="Episodes of each task domain in the final evaluation; 0: none."
    )
    temperature: NotNegative = Field(
        0.0, description="Sampling temperature of evaluations; 0 is greedy."
    )
    stop_at: Share | None = Field(
        None,
        description="Stop training once the held-out success of every task domain reaches this "
        "rate; its environment must define success.",
    )


RATES = ("env_error", "env_hang", "env_garbage", "reward_error")
"""Kinds of injected failures; each has a rate."""

Fault = Literal[
    "env_error", "env_hang", "env_garbage", "reward_error", "latency_s", "latency_sigma"
]


class Faults(Section):
    """The failures of [faults], with those that are not injected."""

    env_error: Share = Field(0.0, description="Share of environment calls that raise.")
    env_hang: Share = Field(0.0, description="Share of environment calls that never return.")
    env_garbage: Share = Field(
        0.0, description="Share of environment calls that return no observation."
    )
    reward_error: Share = Field(0.0, description="Share of rewards that raise.")
    latency_s: NotNegative = Field(
        0.0, description="Median of a log-normal latency added to each step of an environment."
    )
    latency_sigma: NotNegative = Field(1.0, description="Sigma of the logarithm of latency_s.")


class WatchdogConfig(Section):
    """Deadlines, in seconds. A wait that exceeds its deadline is logged by name, acted
    on and counted.
    """

    turn_s: Positive = Field(
        60.0,
        description="Maximum seconds of one turn on an engine, after which it is aborted and "
        "retried elsewhere.",
    )
    train_s: Positive = Field(
        600.0,
        description="Maximum seconds of one training step, measurement, publication or checkpoint. "
        "A fifth of it is the maximum until an engine, relay, rollout worker or trainer is "
        "ready; a tenth, of an engine that receives new weights, suspends, loads or resumes, "
        "and of a relay that fetches a version.",
    )
    restarts: Count = Field(
        3,
        description="Maximum number of restarts of one engine, relay or rollout worker, or of "
        "the trainer.",
    )

    @property
    def start_s(self) -> float:
        """Maximum seconds until an engine, relay, rollout worker or trainer is
        ready.
        """
        return self.train_s / 5

    @property
    def weights_s(self) -> float:
        """Maximum seconds in which an engine receives new weights, suspends, loads or
        resumes, or a relay fetches a version.
        """
        return self.train_s / 10


class SimPoolConfig(Section):
    """The simulated hosts of a pool."""

    gpu: str | None = Field(
        None,
        description="GPU of these hosts, by name (sim/hardware.py); the one that the pool's "
        "`resource` names if unset.",
    )
    hosts: PositiveInt | None = Field(
        None,
        description="Number of these hosts, with eight GPUs each; as many as the pool's engines "
        "need if unset.",
    )


class SimServingConfig(Section):
    """Simulated serving engines beside a run, and their users' requests (ROSE §3.2)."""

    model: str = Field(description="Shape of the model that is served (sim/models.py).")
    engines: PositiveInt = Field(description="Number of serving engines; all of them lend.")
    prefill: Count = Field(
        0,
        description="Number of these that compute prompts for the others, which sample; 0: each "
        "does both.",
    )
    rate: Positive | None = Field(
        None, le=100_000, description="Mean number of requests per second, drawn with bursts."
    )
    trace: str | None = Field(
        None,
        description="CSV file of requests instead, with the columns TIMESTAMP, ContextTokens and "
        "GeneratedTokens, as the public Azure traces have.",
    )
    ttft_s: Positive = Field(0.5, description="Promised seconds to the first token.")
    tpot_s: Positive = Field(0.15, description="Promised seconds of each further token.")
    lease_s: Positive = Field(
        10.0, description="Seconds for which rollouts keep the KV of a finished turn (ROSE App. C)."
    )

    @model_validator(mode="after")
    def _has_requests(self) -> Self:
        if (self.rate is None) == (self.trace is None):
            raise ValueError(
                f"sim.serving must have a rate or a trace, got rate {self.rate} and trace "
                f"{self.trace}"
            )
        if self.prefill >= self.engines:
            raise ValueError(
                f"sim.serving.prefill must be less than the {self.engines} engines, got "
                f"{self.prefill}"
            )
        return self


class SimConfig(Section):
    """The simulated engines, environments and trainer of `rollweave simulate`
    (sim/).
    """

    model: str = Field(description="Model shape, by name (sim/models.py).")
    gpu: str = Field(
        "h800",
        description="GPU of engines and trainer, by name (sim/hardware.py), or a .json file with "
        "measured step times of an engine; an h800 trains where this one does not. Pools have "
        "their own.",
    )
    pools: dict[str, SimPoolConfig] = Field(default_factory=dict)
    trainer_gpus: PositiveInt = Field(8, description="GPUs of the trainer.")
    serving: SimServingConfig | None = None
    link: str = Field(
        "rdma",
        description="Link over which weights reach the engines and the relays of other sites, by "
        "name (sim/hardware.py).",
    )


class RunSection(Section):
    """The run: its name, its length and its checkpoints."""

    name: Annotated[
        str,
        matching(
            r"[A-Za-z0-9_][A-Za-z0-9._-]*",
            "consist of letters, digits and . _ -, and not begin with . or -",
        ),
    ] = Field(
        description="Name of the run directory: letters, digits, `._-`; dot and hyphen not first.",
        max_length=100,
    )
    dir: Annotated[str, matching(r"[^\x00]+", "be a path, without a null byte")] = Field(
        "runs", description="Directory in which run directories are created."
    )
    seed: Seed = Field(0, description="Seed of tasks, sampling and training.")
    steps: Count = Field(100, description="Training steps.")
    checkpoint_every: Count | None = Field(
        None,
        description="Steps between checkpoints, in addition to those by time: at least 30 s apart, "
        "and 20 times as long as writing one takes. Unset: by time alone; 0: none before the "
        "end.",
    )
    sinks: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = Field(
        (), description="Metric sinks in addition to metrics.jsonl."
    )


class SandboxConfig(Section):
    """The sandboxes in which handlers run what their agents write."""

    backend: Literal["bubblewrap", "zygote", "apptainer", "plain"] | None = Field(
        None,
        description="Kind of sandbox (docs/SANDBOX.md); bubblewrap if unset. plain isolates "
        "nothing.",
    )
    warm: Count = Field(
        0,
        description="Number of started sandboxes of each kind that are kept ready for the next "
        "attempts.",
    )
    mirror: (
        Annotated[
            str,
            matching(r"https?://[^\s/]+\S*|/[^\x00]*", "be http(s)://HOST/… or an absolute path"),
        ]
        | None
    ) = Field(
        None,
        description="Source of images that no host of the run has: an http or https URL, or a "
        "directory, which also receives the images that the run builds (docs/SANDBOX.md).",
    )
    cache_dir: (
        Annotated[str, matching(r"(/|~/)[^\x00]*", "be an absolute path, or begin with ~/")] | None
    ) = Field(
        None,
        description="Directory of each host for images, which runs share; unset: rollweave/images "
        "in $XDG_CACHE_HOME, or in ~/.cache.",
    )
    cache_gb: Positive = Field(
        50.0,
        description="Maximum size of that directory in GB; the least recently used images make "
        "room for others.",
    )


class ServeConfig(Section):
    """`rollweave serve`: rollouts over HTTP."""

    engines: Literal["local", "registered"] = Field(
        "local",
        description="local: [[engines]] on the model's checkpoint, and those that are registered; "
        "registered: only the latter.",
    )
    engine_hosts: tuple[str, ...] = Field(
        ("127.0.0.0/8", "::1", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"),
        description="Hosts of engines that clients may register: names, addresses, networks.",
    )

    @model_validator(mode="after")
    def _hosts_are_hosts(self) -> Self:
        Hosts.parse(self.engine_hosts, field="serve.engine_hosts")
        return self
