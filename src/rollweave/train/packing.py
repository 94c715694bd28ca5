"""Token sequences packed for one forward pass.

The answers to one prompt begin with the same tokens, and so do the turns of a
trajectory that was cut into several sequences. Such a common beginning is one run of
rows, which all layers compute once; only attention, whose grid has a line for each
sequence, reads these rows again. A hidden state depends on the tokens before it alone,
so that values and gradients are those of separate rows, to rounding.

Invariants: a packed micro-batch has no padding outside attention; a sequence sees only
itself, at positions from 0; tokens after a sequence's last target are cut, because
nothing would learn from them; every target appears exactly once.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

FREE = -1
"""The number in place of an expert where the routes of a token are not known."""

MIN_SHARED = 0.1
"""Minimum share of the tokens that common beginnings must save. For less, attention's
copies cost more than they save.
"""

ATTENTION = 8192
"""Number of scores of attention that cost as much as a token in the other layers: about
ten times the width of a small model.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """One sequence to train on: `tokens`, and the positions in `[1, len)` whose tokens
    are to be predicted. `routes` are the experts of each token by layer, or `FREE`.
    """

    tokens: torch.Tensor  # [T] int64
    targets: torch.Tensor  # [M] int64, ascending
    routes: torch.Tensor | None = None  # [T, layers, top_k] int16


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """Maps rows of a packed tensor to a grid by sequence, `[B, W]`, and back.

    `rows[b, w]` is a packed row (any valid row in the padding); `flat` has a cell of
    each packed row, in packed order; `positions[b, w]` is the position in the sequence
    (0 in the padding). `dense` means that packed rows and grid have the same shape:
    there is no padding, and no row has several cells. If rows have several cells,
    `cells` are all cells without the padding, in order.
    """

    rows: torch.Tensor
    flat: torch.Tensor
    positions: torch.Tensor
    dense: bool
    cells: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """One micro-batch: N different input tokens of B sequences, M predictions. `keys`
    covers all inputs, `queries` the predicting inputs.

    `predicting[m]` is the packed row whose hidden state predicts `labels[m]`; both are
    in the order of the examples.
    """

    tokens: torch.Tensor  # [N]
    keys: Grid
    queries: Grid
    predicting: torch.Tensor  # [M]
    labels: torch.Tensor  # [M]
    longest: int
    routes: torch.Tensor | None = None  # [N, layers, top_k] int16

    def to(self, device: torch.device) -> "Packed":
        return self if device.type == "cpu" else _moved(self, device)


P = TypeVar("P", Grid, Packed)


def pack(examples: Sequence[Example]) -> Packed:
    """Pack `examples`, each with at least one target."""
    # inputs up to the input that predicts the last target
    lengths = [int(example.targets[-1]) for example in examples]
    rows, count = _rows_of(examples, lengths)
    every = torch.cat(rows)
    tokens = examples[0].tokens.new_empty(count)
    tokens[every] = torch.cat(
        [e.tokens[:length] for e, length in zip(examples, lengths, strict=True)]
    )
    places = [e.targets - 1 for e in examples]
    predicting = [own[at] for own, at in zip(rows, places, strict=True)]
    return Packed(
        tokens=tokens,
        keys=_grid([torch.arange(length) for length in lengths], rows, count),
        queries=_grid(places, predicting),
        predicting=torch.cat(predicting),
        labels=torch.cat([e.tokens[e.targets] for e in examples]),
        longest=max(lengths),
        routes=_packed_routes(examples, lengths),
    )


def _rows_of(examples: Sequence[Example], lengths: Sequence[int]) -> tuple[list[torch.Tensor], int]:
    """Return the packed rows of each example's inputs, and the number of rows. Where
    routes are to be replayed, nothing is shared: they may differ.
    """
    starts = list(itertools.accumulate(lengths, initial=0))
    apart = [torch.arange(start, stop) for start, stop in itertools.pairwise(starts)]
    if len(examples) == 1 or any(example.routes is not None for example in examples):
        return apart, starts[-1]
    tokens = [e.tokens[:length].numpy() for e, length in zip(examples, lengths, strict=True)]
    shared = dict(_shared(tokens, range(len(tokens))))
    if sum(shared.values()) < MIN_SHARED * starts[-1]:
        return apart, starts[-1]
    rows, count, before = dict[int, torch.Tensor](), 0, torch.empty(0, dtype=torch.int64)
    for index, common in shared.items():
        stop = count + lengths[index] - common
        rows[index] = before = torch.cat([before[:common], torch.arange(count, stop)])
        count = stop
    return [rows[index] for index in range(len(examples))], count


def _shared(
    tokens: Sequence[npt.NDArray[np.int64]], chosen: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield the chosen sequences in the order of their tokens, in which each one has
    its longest common beginning with the one before; and the length of that beginning.
    """
    before: npt.NDArray[np.int64] | None = None
    for index in sorted(chosen, key=lambda index: tokens[index].astype(">i8").tobytes()):
        own, common = tokens[index], 0
        if before is not None:
            least = min(len(before), len(own))
            differs = np.flatnonzero(before[:least] != own[:least])
            common = int(differs[0]) if len(differs) else least
        yield index, common
        before = own


def _packed_routes(examples: Sequence[Example], lengths: Sequence[int]) -> torch.Tensor | None:
    known = next((e.routes for e in examples if e.routes is not None), None)
    if known is None:
        return None
    free = known.new_full((1, *known.shape[1:]), FREE)
    return torch.cat(
        [
            free.expand(length, -1, -1) if e.routes is None else e.routes[:length]
            for e, length in zip(examples, lengths, strict=True)
        ]
    )


def to_grid(x: torch.Tensor, grid: Grid, packed_rows: torch.Tensor | None) -> torch.Tensor:
    """Arrange rows of x by sequence: [B, W, C].

    With `packed_rows`, x contains only those packed rows, in grid order.
    """
    batch, width = grid.positions.shape
    if grid.dense:
        return x.view(batch, width, -1)
    if packed_rows is None:
        return x.index_select(0, grid.rows).view(batch, width, -1)
    out = x.new_zeros(batch * width, x.shape[-1])
    return out.index_copy(0, grid.flat, x).view(batch, width, -1)


def split_micro_batches(
    tokens: Sequence[torch.Tensor], *, max_tokens: int, share: bool = True
) -> list[list[int]]:
    """Divide sequences into micro-batches of at most `max_tokens` (or one longer
    sequence); return their indices.

    Sequences stand in one micro-batch with sequences that begin alike, or with
    sequences of similar lengths, whichever costs less. A token that several sequences
    share counts fully for the first sequence, and half for each further sequence:
    attention keeps a shared token for each sequence, the other layers once. Attention's
    part is less than half, unless a small model has sequences of a thousand tokens.
    """
    arrays = [sequence.numpy() for sequence in tokens]
    lengths = [len(array) for array in arrays]
    by_length = sorted(range(len(lengths)), key=lambda index: lengths[index])
    plans = [_filled(((index, 0) for index in by_length), lengths, max_tokens)]
    if share and len(lengths) > 1:
        alike = itertools.chain(*_families(arrays))
        plans.append(_filled(alike, lengths, max_tokens))
    costs = [sum(_cost(arrays, micro, share) for micro in plan) for plan in plans]
    return plans[costs.index(min(costs))]


def families(tokens: Sequence[torch.Tensor]) -> list[tuple[list[int], int]]:
    """Return the indices of the sequences of each family, which have more than half of
    a sequence in common, and the number of different tokens of the family.
    """
    return [
        ([index for index, _ in family], sum(len(tokens[index]) - n for index, n in family))
        for family in _families([sequence.numpy() for sequence in tokens])
    ]


def _families(arrays: Sequence[npt.NDArray[np.int64]]) -> list[list[tuple[int, int]]]:
    """Return families with the length of each sequence's common beginning with the one
    before it in its family; families of short sequences first.
    """
    found: list[list[tuple[int, int]]] = []
    for index, common in _shared(arrays, range(len(arrays))):
        if not found or 2 * common <= min(len(arrays[index]), len(arrays[found[-1][-1][0]])):
            found.append([(index, 0)])
        else:
            found[-1].append((index, common))
    return sorted(found, key=lambda family: max(len(arrays[index]) for index, _ in family))


def _filled(
    order: Iterable[tuple[int, int]], lengths: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Fill micro-batches in this order of sequences with their common beginnings.

    Attention works on a grid as wide as the longest sequence of its micro-batch, so the
    grid's area is bounded, too: a new micro-batch starts when more than half of the
    grid would be padding.
    """
    batches: list[list[int]] = []
    cells = longest = 0
    size = 0.0
    for index, common in order:
        length = lengths[index]
        grid = max(longest, length) * (len(batches[-1]) + 1) if batches else 0
        if not batches or size + length - common / 2 > max_tokens or 2 * (cells + length) < grid:
            batches.append([])
            cells = longest = common = 0
            size = 0.0
        batches[-1].append(index)
        cells, longest = cells + length, max(longest, length)
        size += length - common / 2
    return batches


def _cost(arrays: Sequence[npt.NDArray[np.int64]], micro: Sequence[int], share: bool) -> float:
    """Return about what a micro-batch costs, in tokens of a layer."""
    total, width = sum(len(arrays[index]) for index in micro), max(len(arrays[i]) for i in micro)
    common = sum(common for _, common in _shared(arrays, micro)) if share else 0
    return (
        total
        - (common if common >= MIN_SHARED * total else 0)
        + (len(micro) * width * width / ATTENTION)
    )


def _grid(
    places: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], count: int | None = None
) -> Grid:
    """Return the grid of B sequences, which are at these places and packed rows. With
    `count`, they share some of so many packed rows.
    """
    widths = torch.tensor([len(place) for place in places])
    width = int(widths.max())
    inside = torch.arange(width) < widths[:, None]
    positions, table = (torch.zeros(inside.shape, dtype=torch.int64) for _ in range(2))
    positions[inside] = torch.cat(list(places))
    table[inside] = torch.cat(list(rows))
    cells = inside.flatten().nonzero().flatten()
    if count is None or count == len(cells):
        return Grid(rows=table.flatten(), flat=cells, positions=positions, dense=bool(inside.all()))
    # of a row's cells the first: all have the same queries and keys
    first = np.unique(table[inside].numpy(), return_index=True)[1]
    flat = cells[torch.from_numpy(first)]
    return Grid(rows=table.flatten(), flat=flat, positions=positions, dense=False, cells=cells)


def _moved(part: P, device: torch.device) -> P:
    """Return a grid, or a micro-batch with its grids, on a device."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if isinstance(value, torch.Tensor):
            changes[field.name] = value.to(device)
        elif isinstance(value, Grid):
            changes[field.name] = _moved(value, device)
    return dataclasses.replace(part, **changes)
