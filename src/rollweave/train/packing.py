"""Token sequences concatenated for one forward pass.

Invariants: a packed micro-batch has no padding outside attention; a sequence sees only
itself, at positions from 0; tokens after a sequence's last target are cut, because
nothing would learn from them; every target appears exactly once.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

FREE = -1
"""The number in place of an expert where the routes of a token are not known."""


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

    `rows[b, w]` is a packed row (any valid row in the padding); `flat` are the cells
    that are not padding, in packed order; `positions[b, w]` is the position in the
    sequence (0 in the padding). `dense` means that the grid has no padding, so that
    both have the same shape.
    """

    rows: torch.Tensor
    flat: torch.Tensor
    positions: torch.Tensor
    dense: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """One micro-batch: N input tokens of B sequences, M predictions. `keys` covers all
    inputs, `queries` the predicting inputs.

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
    """Concatenate `examples`, each with at least one target."""
    # inputs up to the input that predicts the last target
    lengths = [int(example.targets[-1]) for example in examples]
    starts = list(itertools.accumulate(lengths, initial=0))[:-1]
    predicting = torch.cat(
        [e.targets - 1 + start for e, start in zip(examples, starts, strict=True)]
    )
    inputs = [torch.arange(length) for length in lengths]
    return Packed(
        tokens=torch.cat([e.tokens[:length] for e, length in zip(examples, lengths, strict=True)]),
        keys=_grid(inputs, starts),
        queries=_grid([e.targets - 1 for e in examples], starts),
        predicting=predicting,
        labels=torch.cat([e.tokens[e.targets] for e in examples]),
        longest=max(lengths),
        routes=_packed_routes(examples, lengths),
    )


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


def split_micro_batches(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Divide sequences into micro-batches of similar lengths, each of at most
    `max_tokens` (or one longer sequence); return their indices.

    Attention works on a grid as wide as the longest sequence of its micro-batch, so the
    grid's area is bounded, too: a new micro-batch starts when more than half of the
    grid would be padding.
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    batches: list[list[int]] = []
    tokens = 0
    for index in order:
        length = lengths[index]
        if (
            not batches
            or tokens + length > max_tokens
            or 2 * (tokens + length) < length * (len(batches[-1]) + 1)
        ):
            batches.append([])
            tokens = 0
        batches[-1].append(index)
        tokens += length
    return batches


def _grid(places: Sequence[torch.Tensor], starts: Sequence[int]) -> Grid:
    widths = torch.tensor([len(place) for place in places])
    width = int(widths.max())
    inside = torch.arange(width) < widths[:, None]
    positions = torch.zeros(inside.shape, dtype=torch.int64)
    positions[inside] = torch.cat(list(places))
    rows = positions + torch.tensor(starts)[:, None]
    return Grid(
        rows=rows.flatten(),
        flat=inside.flatten().nonzero().flatten(),
        positions=positions,
        dense=bool(inside.all()),
    )


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
