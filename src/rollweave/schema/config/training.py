"""The sections `[model]` and `[lora]`: what is trained; `[algorithm]`, `[critic]` and
`[teacher]`: from rewards to a loss; `[trainer]`, `[warmup]`, `[weights]` and `[eval]`.
"""

import math
from typing import Annotated, Any, Literal, NamedTuple, Required, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from rollweave.schema.address import parse_address
from rollweave.schema.config.values import (
    FORMS,
    WARM,
    Count,
    Flag,
    NotNegative,
    Positive,
    PositiveInt,
    Processes,
    Section,
    Share,
    form,
    listed,
)
from rollweave.schema.errors import FieldError
from rollweave.schema.weights import TransportName

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


def _json(given: Any) -> Any:
    """Require values that JSON has as well: TOML also has dates, times, nan and inf."""
    pending = [given]
    while pending:
        value, known = pending.pop(), True
        if isinstance(value, dict | list | tuple):
            pending += value.values() if isinstance(value, dict) else value
        elif isinstance(value, float):
            known = math.isfinite(value)
        else:
            known = value is None or isinstance(value, str | int)
        if not known:
            rule = "hold text, finite numbers, booleans, lists and tables"
            raise PydanticCustomError("rule", rule)
    return given


class ModelConfig(Section):
    """The model that is trained: a checkpoint, or random weights."""

    path: str | None = Field(
        None,
        description="Model to start from: a directory with config.json, safetensors and tokenizer, "
        "or the name of a model of the Hugging Face hub, such as Qwen/Qwen3-0.6B, with an optional "
        "@revision.",
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
    template_arguments: Annotated[dict[str, JsonValue], BeforeValidator(_json)] = Field(
        {},
        description="Arguments of the checkpoint's chat template for all conversations of the "
        "run, such as { enable_thinking = false } for Qwen 3. A client of the gateway may give "
        "others with a request.",
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
            given = "neither" if self.path is None else "both"
            raise FieldError("", "have exactly one of path and [model.scratch]", given)
        return self


ALL_LINEAR = "all-linear"
"""Every linear layer but the output head, as peft names them."""


class LoraConfig(Section):
    """Low-rank adapters, which are trained instead of the model's weights
    (`docs/LORA.md`).
    """

    rank: PositiveInt = Field(16, description="Rank of each adapter.")
    alpha: Positive = Field(32.0, description="An adapter's output is multiplied by alpha / rank.")
    targets: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(listed)] = Field(
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
    """The settings of a task domain in place of the run's [algorithm]."""

    advantage: Estimator | None = Field(
        None, description="Its advantage estimator; algorithm.advantage if unset."
    )

    def over(self, algorithm: "AlgorithmConfig") -> "AlgorithmConfig":
        """Return the run's `algorithm` with what the domain has instead."""
        own = self.model_dump(exclude_none=True)
        return algorithm.model_copy(update=own) if own else algorithm


class ForwardKl(TypedDict):
    """The coefficient of the forward KL divergence."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    forward: Positive


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
    clip: tuple[Share, NotNegative] | None = Field(
        None,
        description="Bounds of the ratio below and above 1 (dppo: of the decrease and the "
        "increase of a probability), as [0.2, 0.28]; the loss's published ones if unset.",
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
    kl: Annotated[
        Annotated[NotNegative, Tag(FORMS[0])] | Annotated[ForwardKl, Tag(FORMS[1])],
        Discriminator(form),
    ] = Field(
        0.0,
        description="Coefficient of the KL divergence to the starting weights: the k3 estimate of "
        "KL(policy, start) on sampled tokens. Or, as { forward = 0.01 }, of the exact KL(start, "
        "policy) over the vocabulary, which keeps every choice of the start alive; it falls to 0 "
        "from 45 % to 90 % of the run.",
    )
    entropy: NotNegative = Field(0.0, description="Coefficient of the entropy bonus.")
    routing_replay: Flag = Field(
        False,
        description="Train a mixture of experts with the experts that the engine has chosen for "
        "each token (R3), weighted by the trainer's router; engines of kind vllm return them.",
    )

    @property
    def kl_coefficient(self) -> float:
        """The coefficient of the KL divergence, in either direction."""
        return self.kl["forward"] if isinstance(self.kl, dict) else self.kl

    @property
    def kl_forward(self) -> bool:
        """True if the KL divergence is KL(start, policy) over the vocabulary."""
        return isinstance(self.kl, dict)

    @property
    def loss_values(self) -> LossValues:
        """The values in effect: the loss's published ones where unset."""
        published = PUBLISHED_LOSSES[self.loss]
        return LossValues(
            *(published[:2] if self.clip is None else self.clip),
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


class TeacherConfig(Section):
    """The teacher of the estimator distill: a model behind HTTP, with the student's
    vocabulary.
    """

    url: str = Field(
        description="Address of its server, http://HOST:PORT, which every rollout worker reaches: "
        "one with prompt_logprobs at /v1/completions (vLLM, `rollweave engine`), or SGLang. Its "
        "bearer token, if it has one, is in the environment, as ROLLWEAVE_TEACHER_TOKEN."
    )
    model: str = Field("", description="Its name at the server; the server's only model if empty.")

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        return parse_address(url, field="url")


EVAL_EPISODES = 1_000_000
"""Maximum episodes of a task domain in one evaluation. The tasks of periodic and final
evaluations are drawn from separate ranges of this size.
"""

FINAL_TASKS_FROM = EVAL_EPISODES
"""Index of the final evaluation's first task: the periodic evaluations, which choose
the checkpoint, never see these.
"""


TRAINER_THREADS = 1
"""CPU threads of one trainer process."""


class Schedule(TypedDict, total=False):
    """The schedule of the learning rate."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    peak: Required[Positive]
    final: Share
    warmup: Count


class RankCounts(TypedDict):
    """The bounds of a number of ranks that changes."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    minimum: Processes
    maximum: Processes


WARMUP_STEPS = 5
"""Steps of linear warm-up of the learning rate, unless the schedule has others."""


class TrainerConfig(Section):
    """The trainer: its processes, and the optimizer."""

    ranks: Annotated[
        Annotated[Processes, Tag(FORMS[0])] | Annotated[RankCounts, Tag(FORMS[1])],
        Discriminator(form),
    ] = Field(
        1,
        description="Trainer processes (FSDP2 over gloo or NCCL beyond one); in a simulation its "
        "GPUs. Or, as { minimum = 1, maximum = 3 }: the run begins with the minimum, and between "
        "steps gives places of engines to further ranks, or back, where that shortens its steps "
        "(docs/SCHEDULING.md).",
    )
    tensor_parallel: PositiveInt = Field(
        1,
        description="Consecutive ranks that compute the same rows together and divide the layers, "
        "by the model's own plan (implementation transformers); FSDP2 shards over the others.",
    )
    pool: str | None = Field(
        None, description="Pool of hosts on which its ranks run; unset: compute (docs/CLUSTER.md)."
    )
    colocated: Flag = Field(
        False,
        description="The trainer and the engines take turns on the same devices, and each gives "
        "its memory back to the other (mode sync).",
    )
    lr: Annotated[
        Annotated[Positive, Tag(FORMS[0])] | Annotated[Schedule, Tag(FORMS[1])],
        Discriminator(form),
    ] = Field(
        1e-5,
        description="Learning rate, after 5 steps of linear warm-up. Or its schedule, as { peak = "
        "1e-5, final = 0.2, warmup = 5 }, of which final and warmup may be left out: final is the "
        "rate at the last step as a share of the peak, linear in between (1 if left out), and "
        "warmup the number of steps of linear warm-up (5 if left out).",
    )
    weight_decay: NotNegative = Field(0.0, description="AdamW's decoupled weight decay.")
    max_grad_norm: Positive = Field(
        1.0, description="Gradient norm above which gradients are scaled down."
    )
    epochs: PositiveInt = Field(1, description="Passes over one batch.")
    minibatches: PositiveInt = Field(1, description="Optimizer steps in one pass.")
    micro_tokens: PositiveInt = Field(
        16384,
        description="Tokens packed into one forward pass, on a CPU at most 2,048; gradients "
        "accumulate beyond it. If several sequences begin with the same tokens, these tokens count "
        "fully for the first sequence, and half for each further sequence.",
    )
    save_memory: tuple[Literal["activations", "optimizer"], ...] = Field(
        (),
        description="activations: compute them again in the backward pass, for about a third more "
        "computation (activation checkpointing); optimizer: keep its moments in the host's memory "
        "and move them to the GPU for each step (CPU offload).",
    )

    @property
    def first_ranks(self) -> int:
        """The number of ranks with which a run begins."""
        return self.ranks if isinstance(self.ranks, int) else self.ranks["minimum"]

    @property
    def most_ranks(self) -> int:
        """The number of ranks that there may be at once."""
        return self.ranks if isinstance(self.ranks, int) else self.ranks["maximum"]

    @property
    def elastic(self) -> bool:
        """True if the number of ranks changes."""
        return self.first_ranks < self.most_ranks

    @property
    def peak_lr(self) -> float:
        """The highest learning rate."""
        return self.lr["peak"] if isinstance(self.lr, dict) else self.lr

    @property
    def final_lr(self) -> float:
        """The learning rate at the last step, as a share of the peak."""
        return self.lr.get("final", 1.0) if isinstance(self.lr, dict) else 1.0

    @property
    def warmup_steps(self) -> int:
        """The number of steps of linear warm-up of the learning rate."""
        given = self.lr if isinstance(self.lr, dict) else Schedule(peak=self.lr)
        return given.get("warmup", WARMUP_STEPS)


class WarmupConfig(Section):
    """Supervised warm-up on scripted transcripts before RL.

    The environment says what they contain.
    """

    steps: Count = Field(
        0, description="Optimizer steps of 16 transcripts of each task domain; 0 is no warm-up."
    )


class WeightsConfig(Section):
    """The transfer of weights to the engines."""

    relays: Count = Field(
        0,
        description="Number of machines among which engines are divided, each with a relay that "
        "holds the weights for them (Laminar §4); 0: engines read the trainer's memory.",
    )
    transport: TransportName = Field(
        "tcp",
        description="Transport of weights between relays; `collective`: without relays, the "
        "trainer broadcasts them to all engines, over NCCL between GPUs and Gloo between CPUs.",
    )

    @property
    def collective(self) -> bool:
        """True if trainer and engines form a group, and there are no relays."""
        return self.transport == "collective"


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
    temperature: Annotated[NotNegative, WARM] = Field(
        0.0, description="Sampling temperature of evaluations; 0 is greedy."
    )
    stop_at: Share | None = Field(
        None,
        description="Stop training once the held-out success of every task domain reaches this "
        "rate; its environment must define success.",
    )
