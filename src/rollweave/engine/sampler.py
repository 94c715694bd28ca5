"""Samples one token per row of logits, and returns it with its log-prob.

Randomness is a hash of the request's seed and the token's position in its sequence: one
uniform number per token, with no state. A request's draws depend neither on its
neighbors nor on how often it was preempted or recomputed. Log-probs are those of the
full distribution at the request's temperature, before adjustments, `allowed`, a
constraint, top-k and top-p change it; at temperature 0 they are those at temperature 1.
They can therefore be compared with a plain forward pass.

`Sampling.adjustments` change what a row may sample, and the likeliest tokens may be
reported; only rows that ask for either cost anything. Adjustments are applied to a copy
of the logits before the temperature, in vLLM's order: biases and bans, then penalties;
`min_p` cuts the result.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rollweave.engine.request_state import RequestState
from rollweave.schema.serving import Adjustments, Sampling, TokenChances

NEVER = float("-inf")


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
        self, states: Sequence[RequestState], rows: list[int], *, vocab: int, device: torch.device
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

    def __init__(self, states: Sequence[RequestState], rows: list[int]) -> None:
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


def _of(state: RequestState) -> Adjustments:
    adjustments = state.request.sampling.adjustments
    assert adjustments is not None, "of adjusted rows alone"
    return adjustments


_MASK = (1 << 64) - 1


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, position), broadcast: two rounds of
    splitmix64's finalizer, 53 bits.
    """
    with np.errstate(over="ignore"):
        mixed = _mix(
            _mix(seeds + np.uint64(0x9E3779B97F4A7C15)) + positions * np.uint64(0xD1B54A32D192ED03)
        )
    return np.asarray(mixed >> np.uint64(11), dtype=np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Draws:
    """The rows' uniform numbers.

    Rows mostly advance together, so from the second call on many positions are hashed
    at once.
    """

    AHEAD = 32

    def __init__(self, seeds: npt.NDArray[np.uint64], *, device: torch.device) -> None:
        self._seeds = seeds[:, None]
        self._device = device
        self._first: list[int] = []
        self._table = np.empty((0, 0), dtype=np.float32)

    def at(self, positions: Sequence[int]) -> torch.Tensor:
        """Return one number for each row, at its position; fp32, [rows, 1]."""
        ahead = positions[0] - self._first[0] if self._first else -1
        columns = self._table.shape[1]
        if not 0 <= ahead < columns or any(
            p - f != ahead for p, f in zip(positions, self._first, strict=True)
        ):
            self._first, ahead = list(positions), 0
            steps = np.arange(self.AHEAD if columns else 1, dtype=np.uint64)
            self._table = uniforms(
                self._seeds, np.add.outer(np.array(positions, dtype=np.uint64), steps)
            ).astype(np.float32)
        return torch.from_numpy(self._table[:, ahead : ahead + 1]).to(self._device)


@dataclass(slots=True)
class RowParams:
    """Sampling parameters of a batch of rows as tensors, built once for each set of
    rows. A field is None if no row uses it.
    """

    temperatures: torch.Tensor | None
    greedy: torch.Tensor | None
    all_greedy: bool
    draws: Draws
    cut_rows: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    allowed_rows: torch.Tensor | None
    allowed: torch.Tensor | None
    adjusted: AdjustedRows | None
    reported: ReportedRows | None


def pack(
    rows: Sequence[Sampling],
    *,
    vocab: int,
    device: torch.device,
    states: Sequence[RequestState] = (),
) -> RowParams:
    """Collect the rows' parameters. A parameter that no row uses costs nothing later.
    `states` are needed if rows are adjusted, or report more than their tokens.
    """
    adjusted = [index for index, row in enumerate(rows) if row.adjustments is not None]
    reported = [
        index
        for index, state in enumerate(states)
        if state.request.top_logprobs or state.request.logprob_ids
    ]
    warm = [row.temperature or 1.0 for row in rows]
    cold = [row.temperature == 0 for row in rows]
    cut = [
        index
        for index, row in enumerate(rows)
        if row.temperature > 0 and (row.top_p < 1 or 0 < row.top_k < vocab)
    ]
    masked = [index for index, row in enumerate(rows) if row.allowed]
    allowed = torch.ones(len(masked), vocab, dtype=torch.bool)
    for at, index in enumerate(masked):
        allowed[at, list(rows[index].allowed)] = False
    return RowParams(
        temperatures=None
        if all(t == 1.0 for t in warm)
        else torch.tensor(warm, device=device)[:, None],
        greedy=torch.tensor(cold, device=device) if any(cold) and not all(cold) else None,
        all_greedy=all(cold),
        draws=Draws(np.array([row.seed & _MASK for row in rows], dtype=np.uint64), device=device),
        cut_rows=torch.tensor(cut, device=device) if cut else None,
        top_k=torch.tensor([rows[index].top_k or vocab for index in cut], device=device)
        if cut
        else None,
        top_p=torch.tensor([rows[index].top_p for index in cut], device=device) if cut else None,
        allowed_rows=torch.tensor(masked, device=device) if masked else None,
        allowed=allowed.to(device) if masked else None,
        adjusted=AdjustedRows(states, adjusted, vocab=vocab, device=device) if adjusted else None,
        reported=ReportedRows(states, reported) if reported else None,
    )


def sample(
    logits: torch.Tensor,
    positions: Sequence[int],
    params: RowParams,
    forbidden: Mapping[int, npt.NDArray[np.bool_]] | None = None,
) -> tuple[list[int], list[float], dict[int, TokenChances]]:
    """Sample tokens and log-probs for rows of `logits` [rows, vocab] (fp32;
    overwritten), and return what rows report. `positions` are those of the new tokens,
    and `forbidden` the tokens [vocab] that a row must not get.

    A row that is not finite yields an arbitrary token and a log-prob of NaN, and one of
    which no token is left a log-prob of -inf; the caller turns both into errors.
    """
    own = None
    if params.adjusted is not None:
        own = params.adjusted.apply(logits, params.temperatures)
    if params.temperatures is not None:
        logits.div_(params.temperatures)
    logprobs = torch.log_softmax(logits, dim=-1)
    choice = logprobs
    if params.adjusted is not None and own is not None:
        choice = logprobs.clone()
        choice[params.adjusted.rows] = own
    if params.allowed_rows is not None and params.allowed is not None:
        choice = logprobs.clone() if choice is logprobs else choice
        choice[params.allowed_rows] = choice[params.allowed_rows].masked_fill_(
            params.allowed, float("-inf")
        )
    if forbidden:
        choice = logprobs.clone() if choice is logprobs else choice
        masked = torch.tensor(list(forbidden), device=logits.device)
        masks = torch.from_numpy(np.stack(list(forbidden.values()))).to(logits.device)
        choice[masked] = choice[masked].masked_fill_(masks, float("-inf"))
    best = choice.argmax(dim=-1) if params.all_greedy or params.greedy is not None else None
    mass = logprobs
    if best is not None and params.all_greedy:
        tokens = best
    else:
        if params.cut_rows is not None:
            choice = choice.clone() if choice is logprobs else choice
            choice[params.cut_rows] = _cut(choice[params.cut_rows], params)
        mass = choice.exp() if choice is logprobs else torch.softmax(choice, dim=-1)
        sums = mass.cumsum(dim=-1)
        # Draws are scaled by the true sum, so that rounding can never select a token
        # without mass at the end.
        points = params.draws.at(positions) * sums[:, -1:]
        tokens = torch.searchsorted(sums, points, right=True).view(-1)
        if params.greedy is not None and best is not None:
            tokens = torch.where(params.greedy, best, tokens)
    chosen = tokens.tolist()
    if max(chosen) >= logits.shape[1]:
        # The draw was rounded up to the full sum: take the last token that has mass.
        last = logits.shape[1] - 1 - (mass > 0).flip(1).to(torch.int8).argmax(dim=1)
        tokens = torch.minimum(tokens, last)
        chosen = tokens.tolist()
    picked = logprobs.gather(1, tokens.view(-1, 1)).view(-1)
    if params.adjusted is not None:
        params.adjusted.add(tokens)
        rows = params.adjusted.rows
        none_left = choice[rows].amax(dim=1).isneginf()
        picked[rows] = picked[rows].masked_fill(none_left, float("-inf"))
    reports = params.reported.of(logprobs) if params.reported is not None else {}
    return chosen, picked.tolist(), reports


def _cut(logprobs: torch.Tensor, params: RowParams) -> torch.Tensor:
    """Apply top-k, then top-p to the rest; set everything outside to -inf.

    The smallest set whose mass reaches p is kept, never empty.
    """
    assert params.top_k is not None
    assert params.top_p is not None
    ordered, index = logprobs.sort(dim=-1, descending=True, stable=True)
    drop = torch.arange(ordered.shape[1], device=ordered.device) >= params.top_k[:, None]
    mass = torch.softmax(ordered.masked_fill(drop, float("-inf")), dim=-1)
    drop |= mass.cumsum(dim=-1) - mass >= params.top_p[:, None]
    return torch.full_like(logprobs, float("-inf")).scatter_(
        1, index, ordered.masked_fill(drop, float("-inf"))
    )
