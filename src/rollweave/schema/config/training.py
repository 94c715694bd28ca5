"""The sections `[trainer]`, `[warmup]`, `[weights]` and `[eval]`."""

from typing import Annotated, Literal

from pydantic import Field

from rollweave.schema.config.values import (
    WARM,
    Count,
    Flag,
    NotNegative,
    Positive,
    PositiveInt,
    Section,
    Share,
)
from rollweave.schema.weights import TransportName

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


class TrainerConfig(Section):
    """The trainer: its processes, and the optimizer."""

    ranks: PositiveInt = Field(
        1,
        description="Trainer processes (FSDP2 over gloo or NCCL beyond one); in a simulation its "
        "GPUs.",
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
    transport: TransportName = Field("tcp", description="Transport of weights between relays.")


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
