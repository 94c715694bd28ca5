"""Supervised warm-up: a model with random weights learns the format from scripted
transcripts before reinforcement learning.

Invariants: every learned token counts the same within a step; the optimizer's state is
discarded after the warm-up.
"""

import itertools
import math
from collections.abc import Iterator

import torch

from rollweave.schema.config.training import TrainerConfig
from rollweave.schema.errors import NonFiniteLossError, TrainerError
from rollweave.schema.work import SegmentKind, TokenSequence
from rollweave.train.optimizer import clip_gradients, new_optimizer, set_learning_rate
from rollweave.train.packing import Example
from rollweave.train.passes import Passes

SCRATCH_LR = 1e-2
"""Learning rate for a model from scratch; a checkpoint is warmed up with the peak rate
of training.
"""

DOMAIN_TRANSCRIPTS = 16
"""Transcripts of each task domain in a step."""

FINAL_SHARE = 0.1
"""Fraction of the learning rate at the last step; it decreases linearly."""


def warm_up(
    passes: Passes,
    transcripts: Iterator[TokenSequence],
    *,
    steps: int,
    batch: int,
    lr: float,
    observations: bool,
    trainer: TrainerConfig,
) -> list[float]:
    """Take optimizer steps with `batch` transcripts per step; return the loss (nats per
    token) of each step.

    Trains on the output tokens, with `observations` on prompt and observation
    tokens, too. Raises `TrainerError` if transcripts run out, and `NonFiniteLossError`.
    """
    optimizer = new_optimizer(
        passes.model,
        lr=lr,
        weight_decay=trainer.weight_decay,
        offload="optimizer" in trainer.save_memory,
    )
    losses = []
    for step in range(steps):
        examples = [
            warmup_example(sequence, observations=observations)
            for sequence in _take_transcripts(transcripts, batch)
        ]
        examples = [example for example in examples if len(example.targets)]
        if not examples:
            raise TrainerError("warm-up needs transcripts with output tokens")
        set_learning_rate(optimizer, lr * (1 - (1 - FINAL_SHARE) * step / max(1, steps - 1)))
        optimizer.zero_grad(set_to_none=True)
        weight = 1 / sum(len(example.targets) for example in examples)
        loss = passes.backward(
            examples,
            range(len(examples)),
            temperature=1.0,
            loss_of=lambda _, scores, weight=weight: -scores.logprobs.sum() * weight,  # type: ignore[misc]
        )
        norm = clip_gradients(passes.model, trainer.max_grad_norm)
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise NonFiniteLossError(
                f"warm-up step {step}: loss {loss:g}, gradient norm {norm:g}; the learning rate is "
                f"{lr:g}"
            )
        optimizer.step()
        losses.append(loss)
    optimizer.zero_grad(set_to_none=True)
    return losses


def warmup_example(sequence: TokenSequence, *, observations: bool) -> Example:
    """Select the targets of a transcript: its output tokens, or with `observations` all
    tokens but the first.
    """
    mask = torch.zeros(len(sequence.tokens), dtype=torch.bool)
    for segment in sequence.segments:
        if observations or segment.kind is SegmentKind.OUTPUT:
            mask[segment.start : segment.end] = True
    mask[:1] = False
    return Example(tokens=torch.tensor(sequence.tokens), targets=mask.nonzero().flatten())


def _take_transcripts(transcripts: Iterator[TokenSequence], count: int) -> list[TokenSequence]:
    chosen = list(itertools.islice(transcripts, count))
    if len(chosen) < count:
        raise TrainerError(
            f"warm-up needs {count} transcripts per step, only {len(chosen)} were left"
        )
    return chosen
