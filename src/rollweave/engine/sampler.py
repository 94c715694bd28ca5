"""Samples one token per row of logits, and returns it with its log-prob.

Randomness is a hash of the request's seed and the token's position in its sequence: one
uniform number per token, with no state. A request's draws depend neither on its
neighbors nor on how often it was preempted or recomputed. Log-probs are those of the
full distribution at the request's temperature, before adjustments, `allowed`, a
constraint, top-k and top-p change it; at temperature 0 they are those at temperature 1.
They can therefore be compared with a plain forward pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rollweave.engine.adjustments import AdjustedRows, ReportedRows, RowState
from rollweave.schema.serving import Sampling, TokenChances

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
    states: Sequence[RowState] = (),
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
