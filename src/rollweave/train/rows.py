"""Converts a batch of scored groups to rows of tensors, and divides rows into
minibatches.

Invariants: a trajectory is never divided between minibatches; all ranks compute the
same division without communication; it depends only on the seed, the step and the pass.
"""

import dataclasses
import math
import random
from collections.abc import Iterator, Mapping, Sequence

import torch

from rollweave.core.policy.modes import origin
from rollweave.schema.config.training import AlgorithmConfig
from rollweave.schema.work import (
    Batch,
    Limits,
    ScoredGroup,
    SegmentKind,
    TokenSequence,
    Trajectory,
)
from rollweave.train.advantages import is_overlong, token_advantages
from rollweave.train.packing import FREE, Example


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a trajectory, with one entry per output token (M) in all fields
    but `example.tokens`.
    """

    example: Example
    behavior: torch.Tensor  # [M] float32, log-probs of the engine
    advantages: torch.Tensor  # [M] float32
    ages: torch.Tensor  # [M] int64, versions from the sampling weights to the step's
    trajectory: int
    engine: str
    algorithm: AlgorithmConfig  # that of its task domain
    budget: int  # the most tokens that the agent may sample in a trajectory
    sequence: int  # among those of the trajectory
    returns: torch.Tensor | None = None  # [M] float32, what a critic is to predict
    valued: torch.Tensor | None = None  # [M] bool, the tokens at which it is to predict them

    @property
    def outputs(self) -> int:
        return len(self.behavior)

    @property
    def tokens(self) -> int:
        return len(self.example.tokens)

    @property
    def current(self) -> torch.Tensor:
        """The tokens that were sampled by the weights from which the step starts: [M]
        bool. With routes, a sequence that older weights sampled in part has no such
        tokens: the engine has computed its context again, with routes that it does not
        return.
        """
        current = self.ages == 0
        return current if self.example.routes is None else current & current.all()


def batch_rows(
    batch: Batch, algorithm: AlgorithmConfig, own: Mapping[str, AlgorithmConfig] | None = None
) -> list[Row]:
    """Return the rows of all sequences with output, in the batch's order, without the
    rows of trajectories that `algorithm.overlong` drops. `own` has the algorithms of
    task domains that differ.

    Raises `ValueError` for a trajectory without a reward.
    """
    algorithms = [(own or {}).get(group.env, algorithm) for group in batch.groups]
    advantages = _advantages(batch.groups, algorithms)
    rows: list[Row] = []
    index = -1
    for group, used, values in zip(batch.groups, algorithms, advantages, strict=True):
        for trajectory, by_sequence in zip(group.trajectories, values, strict=True):
            index += 1
            if not (algorithm.overlong == "drop" and is_overlong(trajectory)):
                versions = batch.version, group.restored_to.get(trajectory.id)
                rows += _rows_of(trajectory, index, by_sequence, used, versions)
    return rows


def _rows_of(
    trajectory: Trajectory,
    index: int,
    advantages: Sequence[torch.Tensor],
    algorithm: AlgorithmConfig,
    versions: tuple[int, int | None],
) -> Iterator[Row]:
    """Yield the rows of a trajectory, the `index`th of a batch, from the advantages [T]
    of each sequence. `versions` has that of the batch's weights, and the step to which
    the trainer was restored, if tokens may be of discarded weights.
    """
    for number, (sequence, values) in enumerate(zip(trajectory.sequences, advantages, strict=True)):
        targets = output_positions(sequence)
        if len(targets):
            yield Row(
                example=Example(
                    tokens=torch.tensor(sequence.tokens),
                    targets=targets,
                    routes=_routes(sequence) if algorithm.routing_replay else None,
                ),
                behavior=torch.tensor(sequence.logprobs, dtype=torch.float32)[targets],
                advantages=values[targets],
                ages=_ages(sequence, *versions)[targets],
                trajectory=index,
                engine=trajectory.engine,
                algorithm=algorithm,
                budget=_budget(trajectory.task.limits),
                sequence=number,
            )


def _routes(sequence: TokenSequence) -> torch.Tensor | None:
    """Return the experts of each token by layer, or `FREE`; None if no routes are
    known: [T, layers, top_k] int16.
    """
    if not sequence.routes:
        return None
    first = sequence.routes[0]
    routes = torch.full((len(sequence.tokens), first.layers, first.top_k), FREE, dtype=torch.int16)
    for part in sequence.routes:
        shape = (part.end - part.start, part.layers, part.top_k)
        wide = len(part.data) > math.prod(shape)
        numbers = torch.frombuffer(bytearray(part.data), dtype=torch.int16 if wide else torch.uint8)
        routes[part.start : part.end] = numbers.view(shape)
    return routes


def overlong_fraction(batch: Batch) -> float:
    """Return the share of the batch's trajectories that `is_overlong`."""
    trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
    return sum(map(is_overlong, trajectories)) / max(1, len(trajectories))


def teacher_kl(batch: Batch) -> dict[str, float]:
    """Return the mean of log p(student) - log p(teacher) over the output tokens for
    which a teacher's log-prob is known: an estimate of KL(student, teacher). Empty if
    there are no such tokens.
    """
    total, count = 0.0, 0
    for group in batch.groups:
        for trajectory in group.trajectories:
            for sequence in trajectory.sequences:
                if sequence.teacher:
                    # both are 0 outside output tokens
                    total += math.fsum(sequence.logprobs) - math.fsum(sequence.teacher)
                    count += sum(sequence.output_mask())
    return {"kl_teacher": total / count} if count else {}


def _advantages(
    groups: Sequence[ScoredGroup], algorithms: Sequence[AlgorithmConfig]
) -> list[list[list[torch.Tensor]]]:
    """Return advantages by group, trajectory and sequence. Groups with the same
    estimator form one batch for this estimator.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, used in enumerate(algorithms):
        key = (used.advantage, used.gamma, used.overlong, used.reward_weight)
        alike.setdefault(key, []).append(place)
    advantages: list[list[list[torch.Tensor]]] = [[] for _ in groups]
    for places in alike.values():
        values = iter(token_advantages([groups[at] for at in places], algorithms[places[0]]))
        for place in places:
            advantages[place] = [next(values) for _ in groups[place].trajectories]
    return advantages


def _budget(limits: Limits) -> int:
    return min(limits.max_tokens, limits.max_turns * limits.max_turn_tokens)


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


def _ages(sequence: TokenSequence, version: int, restored_to: int | None) -> torch.Tensor:
    """Return the number of versions from the weights that sampled each output token to
    `version`: [T]. Weights beyond step `restored_to` are discarded.
    """
    ages = torch.zeros(len(sequence.tokens), dtype=torch.int64)
    for segment in sequence.segments:
        if segment.kind is SegmentKind.OUTPUT:
            ages[segment.start : segment.end] = version - origin(segment.version, restored_to)
    return ages
