"""The sections `[algorithm]`, `[critic]` and `[teacher]`: from rewards to a loss."""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, field_validator

from rollweave.schema.address import parse_address
from rollweave.schema.config.values import Flag, NotNegative, Positive, Section, Share, Variable

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


class TeacherConfig(Section):
    """The teacher of the estimator distill: a model behind HTTP, with the student's
    vocabulary.
    """

    url: str = Field(
        description="Address of its server, http://HOST:PORT, which every rollout worker reaches: "
        "one with prompt_logprobs at /v1/completions (vLLM, `rollweave engine`), or SGLang."
    )
    model: str = Field("", description="Its name at the server; the server's only model if empty.")
    token_env: Variable | None = Field(
        None,
        description="Environment variable that holds the server's bearer token, if it has one.",
    )

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        return parse_address(url, field="url")
