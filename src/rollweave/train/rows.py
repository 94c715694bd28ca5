"""Converts a batch of scored groups to rows of tensors, and divides rows into
minibatches.

Invariants: a trajectory is never divided between minibatches; all ranks compute the
same division without communication; it depends only on the seed, the step and the pass.
"""

import dataclasses
import random
from collections.abc import Sequence

import torch

from rollweave.schema.config.sections import AlgorithmConfig
from rollweave.schema.work import Batch, SegmentKind, TokenSequence
from rollweave.train.advantages import token_advantages
from rollweave.train.packing import Example


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a trajectory, with one entry per output token (M) in all fields
    but `example.tokens`.
    """

    example: Example
    behavior: torch.Tensor  # [M] float32, log-probs of the engine
    advantages: torch.Tensor  # [M] float32
    current: torch.Tensor  # [M] bool, sampled by the weight version that the step starts from
    trajectory: int
    engine: str

    @property
    def outputs(self) -> int:
        return len(self.behavior)

    @property
    def tokens(self) -> int:
        return len(self.example.tokens)


def batch_rows(batch: Batch, algorithm: AlgorithmConfig) -> list[Row]:
    """Return the rows of all sequences with output, in the batch's order.

    Raises `ValueError` for a trajectory without a reward.
    """
    advantages = token_advantages(batch.groups, algorithm)
    rows: list[Row] = []
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    for index, (trajectory, values) in enumerate(zip(trajectories, advantages, strict=True)):
        for sequence, value in zip(trajectory.sequences, values, strict=True):
            targets = output_positions(sequence)
            if len(targets):
                current = _sampled_by_version(sequence, batch.version)[targets]
                rows.append(
                    Row(
                        example=Example(tokens=torch.tensor(sequence.tokens), targets=targets),
                        behavior=torch.tensor(sequence.logprobs, dtype=torch.float32)[targets],
                        advantages=value[targets],
                        current=current,
                        trajectory=index,
                        engine=trajectory.engine,
                    )
                )
    return rows


def output_positions(sequence: TokenSequence) -> torch.Tensor:
    """Return the positions of output tokens, int64, without the first position, which
    nothing predicts.
    """
    mask = torch.tensor(sequence.output_mask(), dtype=torch.bool)
    mask[:1] = False
    return mask.nonzero().flatten()


def minibatches(rows: Sequence[Row], *, parts: int, seed: str) -> list[list[int]]:
    """Divide rows into minibatches of whole trajectories, shuffled by `seed`, with
    about equal numbers of tokens; return their indices.

    There are fewer than `parts` if there are fewer trajectories.
    """
    if parts == 1:
        return [list(range(len(rows)))]
    by_trajectory: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        by_trajectory.setdefault(row.trajectory, []).append(index)
    units = list(by_trajectory.values())
    random.Random(seed).shuffle(units)
    sizes = [sum(rows[index].tokens for index in unit) for unit in units]
    bins = balance(sizes, parts)
    return [sorted(index for unit in part for index in units[unit]) for part in bins if part]


def balance(sizes: Sequence[int], bins: int) -> list[list[int]]:
    """Divide `sizes` among `bins` bins with about equal sums, the largest first, each
    into the bin with the smallest sum; return their indices.
    """
    filled: list[list[int]] = [[] for _ in range(bins)]
    totals = [0] * bins
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        lightest = min(range(bins), key=lambda place: (totals[place], len(filled[place])))
        filled[lightest].append(index)
        totals[lightest] += sizes[index]
    return filled


def _sampled_by_version(sequence: TokenSequence, version: int) -> torch.Tensor:
    mask = torch.zeros(len(sequence.tokens), dtype=torch.bool)
    for segment in sequence.segments:
        if segment.kind is SegmentKind.OUTPUT and segment.version == version:
            mask[segment.start : segment.end] = True
    return mask
