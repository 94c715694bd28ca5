"""Measures how far the current policy is from the policy that sampled a group: one
number per group, by which a buffer may choose.

Invariants: nothing is trained; a ratio is positive and finite, and the same on every
rank.
"""

import math
from collections.abc import Sequence

import torch

from rollweave.schema.errors import NonFiniteLossError
from rollweave.schema.work import ScoredGroup
from rollweave.train.losses import MAX_LOG_RATIO
from rollweave.train.passes import Passes
from rollweave.train.rows import Row


def group_ratios(
    passes: Passes, rows: Sequence[Row], groups: Sequence[ScoredGroup], *, temperature: float
) -> tuple[float, ...]:
    """Return exp(mean of current log-prob - rollout's log-prob over the output tokens)
    of each group; 1 if it has no output tokens. This is the geometric mean of the
    tokens' importance ratios, each bounded as in the loss. `rows` are the rows of all
    groups, in order. Raises `NonFiniteLossError` for a log-prob that is not finite.
    """
    chosen = range(len(rows))
    current = (
        passes.logprobs([row.example for row in rows], chosen, temperature=temperature)
        if rows
        else {}
    )
    owners = [place for place, group in enumerate(groups) for _ in group.trajectories]
    gaps: list[list[torch.Tensor]] = [[] for _ in groups]
    for index, row in enumerate(rows):
        gap = current[index].cpu().double() - row.behavior.double()
        gaps[owners[row.trajectory]].append(gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    means = [float(torch.cat(values).mean()) if values else 0.0 for values in gaps]
    for group, mean in zip(groups, means, strict=True):
        if not math.isfinite(mean):
            raise NonFiniteLossError(
                f"log-probs of group {group.id}: their mean difference to the rollout's is {mean}"
            )
    return tuple(map(math.exp, means))
