"""Token sequences laid end to end for one forward pass.

Invariants: a packed micro-batch holds no padding outside attention; a sequence sees
itself alone, at positions from 0; what follows a sequence's last target is cut, because
nothing would learn from it; every target appears exactly once.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """One sequence to train on: `tokens`, and the positions in `[1, len)` whose tokens
    are to be predicted.
    """

    tokens: torch.Tensor  # [T] int64
    targets: torch.Tensor  # [M] int64, ascending


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """Rows of a packed tensor arranged by sequence, `[B, W]`, and the way back.

    `rows[b, w]` is a packed row (any valid one in the padding); `flat` are the cells,
    in packed order, that are not padding; `positions[b, w]` is the place in the
    sequence (0 in the padding). `None` rows say: already in this shape.
    """

    rows: torch.Tensor
    flat: torch.Tensor
    positions: torch.Tensor
    dense: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """One micro-batch: N input tokens of B sequences, M predictions. `keys` covers all
    inputs, `queries` the predicting ones.

    `predicting[m]` is the packed row whose hidden state predicts `labels[m]`; both
    follow the order of the examples.
    """

    tokens: torch.Tensor  # [N]
    keys: Grid
    queries: Grid
    predicting: torch.Tensor  # [M]
    labels: torch.Tensor  # [M]
    longest: int

    def to(self, device: torch.device) -> "Packed":
        if device.type == "cpu":
            return self
        return Packed(
            tokens=self.tokens.to(device),
            keys=_grid_to(self.keys, device),
            queries=_grid_to(self.queries, device),
            predicting=self.predicting.to(device),
            labels=self.labels.to(device),
            longest=self.longest,
        )


def pack(examples: Sequence[Example]) -> Packed:
    """Lay `examples` (each with at least one target) end to end."""
    # inputs up to the one that predicts the last target
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
    )


def split_micro_batches(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Indices of sequences by micro-batch: similar lengths together, at most
    `max_tokens` each (or one longer sequence).

    Attention works on a grid as wide as the longest sequence of its micro-batch, so the
    grid's area is bounded too: a micro-batch is cut where more than half of the grid
    would be padding.
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


def _grid_to(grid: Grid, device: torch.device) -> Grid:
    return Grid(
        rows=grid.rows.to(device),
        flat=grid.flat.to(device),
        positions=grid.positions.to(device),
        dense=grid.dense,
    )
