"""Forward and backward passes over examples, divided into micro-batches and among
ranks.

Invariants: all ranks make the same number of passes (their collectives must match), so
a rank without work repeats an example and discards the result; the ranks of a tensor
group make the same passes; the contribution of an example does not depend on the
division.
"""

from collections.abc import Callable, Sequence

import torch

from rollweave.train.distributed import RankGroup, sync_gradients
from rollweave.train.loading import TrainedModel
from rollweave.train.model import Reference, Scores
from rollweave.train.needs import CACHE_TOKENS
from rollweave.train.packing import Example, pack, split_micro_batches
from rollweave.train.rows import balance
from rollweave.train.tensor_parallel import sync_tensor_group

LossOf = Callable[[list[int], Scores], torch.Tensor]
"""Computes the loss from indices of examples and the concatenated scores of their
targets.
"""

ReferenceOf = Callable[[list[int]], Reference]
"""Returns the reference at the concatenated targets of the examples with these indices.
"""


class Passes:
    """Runs a model over examples.

    `micro_tokens` bounds one pass, unless a single example is longer. `device` is the
    model's device during a pass.
    """

    def __init__(
        self,
        model: TrainedModel,
        ranks: RankGroup,
        *,
        micro_tokens: int,
        device: torch.device | None = None,
    ) -> None:
        self.model = model
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
        plan, work = self._plan(examples, chosen)
        sizes = [len(examples[index].targets) for index in chosen]
        logprobs = dict(
            zip(
                chosen, torch.split(torch.zeros(sum(sizes), device=self.device), sizes), strict=True
            )
        )
        for number, indices in enumerate(plan):
            packed = pack([examples[index] for index in indices]).to(self.device)
            values = self.model(packed, temperature).logprobs
            if number < work:
                parts = torch.split(values, [len(examples[index].targets) for index in indices])
                for index, part in zip(indices, parts, strict=True):
                    logprobs[index].copy_(part)
        if logprobs and self.ranks.data_size > 1:
            total = self.ranks.all_reduce_sum(torch.cat(list(logprobs.values())))
            logprobs = dict(zip(chosen, torch.split(total, sizes), strict=True))
        return logprobs

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
        lengths = [len(examples[index].tokens) for index in chosen]
        plans = []
        for share in balance(lengths, self.ranks.data_size):
            share_lengths = [lengths[place] for place in share]
            cut = split_micro_batches(share_lengths, max_tokens=self._micro_tokens)
            plans.append([[chosen[share[place]] for place in micro] for micro in cut])
        own_plan = plans[self.ranks.data_rank]
        missing = max(len(plan) for plan in plans) - len(own_plan)
        return own_plan + [[chosen[0]]] * missing, len(own_plan)
