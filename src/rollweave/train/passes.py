"""Forward and backward passes over examples, divided into micro-batches and among
ranks, and what needs only passes: the measures of buffered groups under the current
policy, and the supervised warm-up, in which a model with random weights learns the
format from scripted transcripts before reinforcement learning.

Invariants: all ranks make the same number of passes (their collectives must match), so
a rank without work repeats an example and discards the result; the ranks of a tensor
group make the same passes; the contribution of an example does not depend on the
division. The measures of a group are finite, a ratio is positive, and all are the same
on every rank. Every token of the warm-up counts the same within a step; the optimizer's
state is discarded after the warm-up.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from rollweave.schema.config.training import TrainerConfig
from rollweave.schema.errors import NonFiniteLossError, TrainerError
from rollweave.schema.work import Measures, ScoredGroup, SegmentKind, TokenSequence
from rollweave.train.distributed import RankGroup, sync_gradients
from rollweave.train.loading import TrainedModel
from rollweave.train.losses import MAX_LOG_RATIO
from rollweave.train.model import Reference, Scores
from rollweave.train.needs import CACHE_TOKENS
from rollweave.train.packing import Example, families, pack, split_micro_batches
from rollweave.train.rows import Row, balance
from rollweave.train.state import clip_gradients, new_optimizer, set_learning_rate
from rollweave.train.tensor_parallel import sync_tensor_group

LossOf = Callable[[list[int], Scores], torch.Tensor]
"""Computes the loss from indices of examples and the concatenated scores of their
targets.
"""

ReferenceOf = Callable[[list[int]], Reference]
"""Returns the reference at the concatenated targets of the examples with these indices.
"""

SCRATCH_LR = 1e-2
"""Learning rate for a model from scratch; a checkpoint is warmed up with the peak rate
of training.
"""

DOMAIN_TRANSCRIPTS = 16
"""Transcripts of each task domain in a step."""

FINAL_SHARE = 0.1
"""Fraction of the learning rate at the last step; it decreases linearly."""


class Passes:
    """Runs a model over examples.

    `micro_tokens` bounds one pass, unless a single example is longer. `device` is the
    model's device during a pass. `before_pass` is called before each pass of training.
    """

    def __init__(
        self,
        model: TrainedModel,
        ranks: RankGroup,
        *,
        micro_tokens: int,
        device: torch.device | None = None,
        before_pass: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self._before_pass = before_pass
        self.ranks = ranks
        self.device = device if device is not None else next(model.parameters()).device
        self._micro_tokens = (
            min(micro_tokens, CACHE_TOKENS) if self.device.type == "cpu" else micro_tokens
        )

    def backward(
        self,
        examples: Sequence[Example],
        chosen: Sequence[int],
        *,
        temperature: float,
        loss_of: LossOf,
        reference_of: ReferenceOf | None = None,
    ) -> float:
        """Add the gradient of the summed loss of `chosen` examples; return that loss,
        summed over ranks.
        """
        loss_sum = 0.0
        plan, work = self._plan(examples, chosen)
        for number, indices in enumerate(plan):
            sync_gradients(self.model, number == len(plan) - 1)
            self._before_pass()
            packed = pack([examples[index] for index in indices]).to(self.device)
            scores = self.model(
                packed, temperature, reference_of(indices) if reference_of is not None else None
            )
            if number < work:
                loss = loss_of(indices, scores)
                loss_sum += loss.item()
            else:
                loss = scores.logprobs.sum() * 0.0
            # Sharded gradients are averaged over the ranks, but the loss is a sum.
            (loss * self.ranks.data_size).backward()  # type: ignore[no-untyped-call]
        sync_tensor_group(self.model)
        return float(self.ranks.all_reduce_sum(torch.tensor(loss_sum, dtype=torch.float64)))

    @torch.no_grad()
    def logprobs(
        self, examples: Sequence[Example], chosen: Sequence[int], *, temperature: float
    ) -> dict[int, torch.Tensor]:
        """Return log-probs [M] of the targets of each chosen example, by index, on
        every rank.
        """
        scores = self.scores(examples, chosen, temperature=temperature)
        return {index: logprobs for index, (logprobs, _) in scores.items()}

    @torch.no_grad()
    def scores(
        self, examples: Sequence[Example], chosen: Sequence[int], *, temperature: float
    ) -> dict[int, torch.Tensor]:
        """Return log-probs and entropies [2, M] at the targets of each chosen example,
        by index, on every rank.
        """
        plan, work = self._plan(examples, chosen)
        sizes = [len(examples[index].targets) for index in chosen]
        total = torch.zeros(2, sum(sizes), device=self.device)
        scores = dict(zip(chosen, torch.split(total, sizes, dim=1), strict=True))
        for number, indices in enumerate(plan):
            self._before_pass()
            packed = pack([examples[index] for index in indices]).to(self.device)
            values = self.model(packed, temperature)
            if number < work:
                parts = torch.split(
                    torch.stack([values.logprobs, values.entropy]),
                    [len(examples[index].targets) for index in indices],
                    dim=1,
                )
                for index, part in zip(indices, parts, strict=True):
                    scores[index].copy_(part)
        if scores and self.ranks.data_size > 1:
            total = self.ranks.all_reduce_sum(total)
            scores = dict(zip(chosen, torch.split(total, sizes, dim=1), strict=True))
        return scores

    @torch.no_grad()
    def hidden(self, examples: Sequence[Example], chosen: Sequence[int]) -> dict[int, torch.Tensor]:
        """Return the last hidden states [M, H] at the targets of each chosen example,
        by index. Supports a single rank only.
        """
        hidden: dict[int, torch.Tensor] = {}
        for indices in self._plan(examples, chosen)[0]:
            packed = pack([examples[index] for index in indices]).to(self.device)
            parts = torch.split(
                self.model.hidden(packed), [len(examples[index].targets) for index in indices]
            )
            hidden.update(zip(indices, parts, strict=True))
        return hidden

    def _plan(
        self, examples: Sequence[Example], chosen: Sequence[int]
    ) -> tuple[list[list[int]], int]:
        """Return this rank's micro-batches, padded to the longest plan of any rank, and
        how many micro-batches are real work.
        """
        tokens = [examples[index].tokens for index in chosen]
        share = all(examples[index].routes is None for index in chosen)
        plans = []
        for part in divide(tokens, self.ranks.data_size, share=share):
            cut = split_micro_batches(
                [tokens[at] for at in part], max_tokens=self._micro_tokens, share=share
            )
            plans.append([[chosen[part[place]] for place in micro] for micro in cut])
        own_plan = plans[self.ranks.data_rank]
        missing = max(len(plan) for plan in plans) - len(own_plan)
        return own_plan + [[chosen[0]]] * missing, len(own_plan)


def divide(tokens: Sequence[torch.Tensor], ranks: int, *, share: bool) -> list[list[int]]:
    """Divide sequences among ranks with about equal numbers of tokens; return their
    indices. Sequences that begin alike stay together where that makes no rank's work
    longer. Where there are fewer such groups than ranks, each group is divided, and
    each of its ranks computes the common beginning.
    """
    lengths = [len(sequence) for sequence in tokens]
    plans = [balance(lengths, ranks)]
    if not share or ranks == 1:
        return plans[0]
    alike = [members for members, _ in families(tokens)]
    for parts in {1, -(-ranks // len(alike))}:
        pieces = [members[first::parts] for members in alike for first in range(parts)]
        sizes = [_different(tokens, piece) for piece in pieces]
        plans.append(
            [[index for at in part for index in pieces[at]] for part in balance(sizes, ranks)]
        )
    return min(reversed(plans), key=lambda plan: max(_different(tokens, part) for part in plan))


def _different(tokens: Sequence[torch.Tensor], part: Sequence[int]) -> int:
    """Return the number of tokens of a rank's part, of which common beginnings count
    once.
    """
    return sum(size for _, size in families([tokens[index] for index in part]))


def policy_measures(
    passes: Passes, rows: Sequence[Row], groups: Sequence[ScoredGroup], *, temperature: float
) -> list[Measures]:
    """Return the ratio and the entropy of each group by one forward pass over all of
    them; 1 and 0 for a group without output tokens.

    The ratio is exp(mean of current log-prob - rollout's log-prob), the geometric mean
    of the tokens' importance ratios, each bounded as in the loss. `rows` are the rows
    of all groups, in order. Raises `NonFiniteLossError` for a log-prob or an entropy
    that is not finite.
    """
    scores = (
        passes.scores([row.example for row in rows], range(len(rows)), temperature=temperature)
        if rows
        else {}
    )
    gaps, entropies = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
    for index, (logprobs, entropy) in scores.items():
        gap = logprobs.cpu().double() - rows[index].behavior.double()
        gaps[index] = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        entropies[index] = entropy
    means = zip(
        group_means(gaps, rows, groups, what="log-probs"),
        group_means(entropies, rows, groups, what="entropies"),
        strict=True,
    )
    return [
        # rounding may leave an entropy of 0 below 0
        Measures(ratio=math.exp(gap or 0.0), entropy=max(0.0, entropy or 0.0))
        for gap, entropy in means
    ]


def group_means(
    values: Mapping[int, torch.Tensor],
    rows: Sequence[Row],
    groups: Sequence[ScoredGroup],
    *,
    what: str,
) -> list[float | None]:
    """Return the mean of the values [N] of each group's rows, given by the rows'
    indices; None without values. Raises `NonFiniteLossError`, which names `what`, for a
    mean that is not finite.
    """
    owners = [place for place, group in enumerate(groups) for _ in group.trajectories]
    of_group: list[list[torch.Tensor]] = [[] for _ in groups]
    for index, each in values.items():
        of_group[owners[rows[index].trajectory]].append(each.cpu().double())
    means: list[float | None] = []
    for group, parts in zip(groups, of_group, strict=True):
        flat = torch.cat(parts) if parts else torch.empty(0)
        mean = float(flat.mean()) if len(flat) else None
        if mean is not None and not math.isfinite(mean):
            raise NonFiniteLossError(f"{what} of group {group.id}: their mean is {mean}")
        means.append(mean)
    return means


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
    optimizer = new_optimizer(passes.model, trainer, lr=lr, device=passes.device)
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
