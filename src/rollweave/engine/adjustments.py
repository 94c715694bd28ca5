"""Changes what a row may sample, as `Sampling.adjustments` says, and reports the
likeliest tokens. Only rows that ask for either cost anything.

Adjustments are applied to a copy of the logits before the temperature, in vLLM's order:
biases and bans, then penalties; `min_p` cuts the result. Log-probs stay those of the
model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rollweave.schema.serving import Adjustments, GenerateRequest, TokenChances

NEVER = float("-inf")


class _Entry(Protocol):
    tokens: list[int]


class RowState(Protocol):
    """The state of a row's request: its tokens, of which `prompt_tokens` are the
    prompt, and the tokens that end it.
    """

    request: GenerateRequest
    prompt_tokens: int
    stop_ids: frozenset[int]

    @property
    def entry(self) -> _Entry: ...


@dataclass(slots=True)
class _Penalties:
    """Penalties of rows `at`. `counts` has the occurrences of each token among the
    sampled tokens, and `seen` is true also for the tokens of the prompt; both are
    [rows, vocab].
    """

    at: torch.Tensor
    counts: torch.Tensor
    seen: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor

    def apply(self, logits: torch.Tensor) -> None:
        own = logits[self.at]
        repeated = torch.where(own > 0, own / self.repetition, own * self.repetition)
        own = torch.where(self.seen, repeated, own)
        own -= self.frequency * self.counts + self.presence * (self.counts > 0)
        logits[self.at] = own

    def add(self, tokens: torch.Tensor) -> None:
        """Count the tokens that all adjusted rows have sampled."""
        own = tokens[self.at][:, None]
        self.counts.scatter_add_(1, own, torch.ones_like(own, dtype=self.counts.dtype))
        self.seen.scatter_(1, own, value=True)


class AdjustedRows:
    """The adjusted rows of a batch, of which `rows` are the indices."""

    def __init__(
        self, states: Sequence[RowState], rows: list[int], *, vocab: int, device: torch.device
    ) -> None:
        self.rows = torch.tensor(rows, device=device)
        self._states = [states[row] for row in rows]
        wanted = [_of(state) for state in self._states]
        self._words = [
            (at, [word for word in each.banned if len(word) > 1])
            for at, each in enumerate(wanted)
            if any(len(word) > 1 for word in each.banned)
        ]
        self._unended = [at for at, each in enumerate(wanted) if each.min_tokens]
        pairs = [
            (at, token, value)
            for at, each in enumerate(wanted)
            for token, value in (
                *each.bias,
                *((word[0], NEVER) for word in each.banned if len(word) == 1),
            )
        ]
        at, tokens, values = zip(*pairs, strict=True) if pairs else ((), (), ())
        self._at = torch.tensor(at, dtype=torch.int64, device=device)
        self._tokens = torch.tensor(tokens, dtype=torch.int64, device=device)
        self._values = torch.tensor(values, dtype=torch.float32, device=device)
        self._penalties = self._penalties_of(wanted, vocab=vocab, device=device)
        self._min_p = None
        if any(each.min_p for each in wanted):
            least = [math.log(each.min_p) if each.min_p else NEVER for each in wanted]
            self._min_p = torch.tensor(least, device=device)[:, None]

    def _penalties_of(
        self, wanted: Sequence[Adjustments], *, vocab: int, device: torch.device
    ) -> _Penalties | None:
        at = [at for at, each in enumerate(wanted) if each.has_penalties]
        if not at:
            return None
        counts = torch.zeros(len(at), vocab)
        seen = torch.zeros(len(at), vocab, dtype=torch.bool)
        for row, state in enumerate(self._states[place] for place in at):
            tokens = torch.tensor(state.entry.tokens)
            counts[row] = torch.bincount(tokens[state.prompt_tokens :], minlength=vocab)
            seen[row, tokens] = True

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, device=device)[:, None]

        return _Penalties(
            at=torch.tensor(at, device=device),
            counts=counts.to(device),
            seen=seen.to(device),
            repetition=column([wanted[place].repetition_penalty for place in at]),
            frequency=column([wanted[place].frequency_penalty for place in at]),
            presence=column([wanted[place].presence_penalty for place in at]),
        )

    def apply(self, logits: torch.Tensor, temperatures: torch.Tensor | None) -> torch.Tensor:
        """Return the adjusted logits of these rows at their temperatures, from the
        logits of all rows; [adjusted rows, vocab].
        """
        own = logits[self.rows]
        if len(self._at):
            own.index_put_((self._at, self._tokens), self._values, accumulate=True)
        for at, words in self._words:
            tokens, first = self._states[at].entry.tokens, self._states[at].prompt_tokens
            for word in words:
                begun = len(word) - 1
                if len(tokens) - first >= begun and tuple(tokens[-begun:]) == word[:-1]:
                    own[at, word[-1]] = NEVER
        for at in self._unended:
            state = self._states[at]
            if len(state.entry.tokens) - state.prompt_tokens < _of(state).min_tokens:
                own[at, list(state.stop_ids)] = NEVER
        if self._penalties is not None:
            self._penalties.apply(own)
        if temperatures is not None:
            own /= temperatures[self.rows]
        if self._min_p is not None:
            own.masked_fill_(own < own.amax(dim=1, keepdim=True) + self._min_p, NEVER)
        return own

    def add(self, tokens: torch.Tensor) -> None:
        """Take note of the tokens that all rows have sampled; [all rows]."""
        if self._penalties is not None:
            self._penalties.add(tokens[self.rows])


class ReportedRows:
    """The rows of a batch that report the log-probs of more tokens than the sampled
    one.
    """

    def __init__(self, states: Sequence[RowState], rows: list[int]) -> None:
        self._rows = rows
        self._requests = [states[row].request for row in rows]

    def of(self, logprobs: torch.Tensor) -> dict[int, TokenChances]:
        """Return what each of these rows reports, from the log-probs of all rows."""
        most = max(request.top_logprobs for request in self._requests)
        tops = likeliest(logprobs[self._rows], most)
        reports = {}
        for row, request, top in zip(self._rows, self._requests, tops, strict=True):
            ids = request.logprob_ids
            named = zip(ids, logprobs[row, list(ids)].tolist(), strict=True) if ids else ()
            reports[row] = (*top[: request.top_logprobs], *named)
        return reports


def likeliest(logprobs: torch.Tensor, count: int) -> list[TokenChances]:
    """Return the `count` likeliest tokens of each row with their log-probs, the
    likeliest first.
    """
    values, tokens = logprobs.topk(min(count, logprobs.shape[1]), dim=1)
    return [
        tuple(zip(*row, strict=True)) for row in zip(tokens.tolist(), values.tolist(), strict=True)
    ]


def _of(state: RowState) -> Adjustments:
    adjustments = state.request.sampling.adjustments
    assert adjustments is not None, "of adjusted rows alone"
    return adjustments
