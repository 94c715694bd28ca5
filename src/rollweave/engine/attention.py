"""Attention of one engine step over the paged cache: planned once on the host, then
executed for each layer.

The step's tokens are one flat list: first one token of each decoding sequence, then the
chunks of the prefilling ones. Two classes implement `Attention`: `GatheredAttention`
here, for CPUs, for deterministic engines, and wherever the other one cannot be used;
and `PagedAttention` (`engine/paged_attention.py`), for GPUs.

`GatheredAttention` decodes from the dense mirror if there is one. All
other tokens are attended in *groups*: sequences of similar chunk and context length are
padded to a rectangle, their blocks gathered, and attended in one call. Query heads that
share a key head are folded into the query axis, so keys and values are never repeated.

`tiles` selects the deterministic layout (docs/decisions/0009): every token is computed
within its 16 aligned positions, against a context padded to a fixed multiple, so its
shape does not depend on chunk bounds or neighbors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from rollweave.engine.batching import Entry
from rollweave.engine.kv import DenseMirror, PagedPool
from rollweave.weights.checkpoint import ModelShape

TILE_ROWS = 16
"""Number of rows of a deterministic tile.

With sixteen rows, results were measured to be bit-identical at every position of the
tile.
"""
TILE_CONTEXT_BLOCKS = 4
"""Number of blocks to a multiple of which contexts are padded in deterministic mode,
counted from the sequence's start.
"""


@dataclass(slots=True)
class Chunk:
    """Tokens `[start, start + count)` of `entry`, which lie at `[offset, offset +
    count)` of the flat list.
    """

    entry: Entry
    start: int
    count: int
    offset: int


Plan = TypeVar("Plan")


class Attention(Protocol[Plan]):
    """Writes the step's KV and attends over it."""

    def rows(self, decoding: list[Entry]) -> list[Entry]:
        """Return the sequence of each of the first tokens of a step in which these
        decode: the same sequences, in another order if that is cheaper. Repetitions may
        follow them, whose results are not used.
        """
        ...

    def plan(self, chunks: Sequence[Chunk], *, rows: int) -> Plan:
        """Lay out one step. The first chunks are one token of each of its `rows`."""
        ...

    def attend(self, layer: int, qkv: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Compute attention from rotated queries, keys and values of the flat list,
        which lie side by side.

        [tokens, (heads + 2 kv_heads) * head_dim] becomes [tokens, heads * head_dim].
        """
        ...


@dataclass(slots=True)
class Group:
    """A padded rectangle, `sequences` by `queries`.

    `real` are the positions that hold tokens (None: all), `scatter` their flat
    positions.
    """

    sequences: int
    queries: int
    context: int
    gather: torch.Tensor
    blocks: torch.Tensor
    mask: torch.Tensor
    real: torch.Tensor | None
    scatter: torch.Tensor


@dataclass(slots=True)
class Dense:
    """Decoding through the mirror: where the new tokens are written, and the attended
    keys and values of each layer, rows and heads merged.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    mask: torch.Tensor


@dataclass(slots=True)
class GatheredPlan:
    """`slots[i]` is the pool position of token i's KV.

    The first `mirrored` tokens decode through the mirror.
    """

    slots: torch.Tensor
    mirrored: int
    groups: list[Group]
    dense: Dense | None


class GatheredAttention:
    """Attention over blocks that are gathered first, or over the mirror.

    It owns no state beyond the pool and the mirror.
    """

    def __init__(
        self, shape: ModelShape, pool: PagedPool, mirror: DenseMirror | None, *, tiles: bool
    ) -> None:
        self.pool = pool
        self.mirror = mirror
        self.tiles = tiles
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.shared = shape.heads // shape.kv_heads
        self.query_width = shape.heads * shape.head_dim
        self.scale = shape.head_dim**-0.5
        self.device, self.dtype = pool.data.device, pool.data.dtype
        self._rows = torch.arange(0, device=self.device)
        self._zero, self._hidden = (
            torch.tensor(value, device=self.device, dtype=self.dtype)
            for value in (0.0, float("-inf"))
        )

    def rows(self, decoding: list[Entry]) -> list[Entry]:
        """Return the mirror's rows, or `decoding` if the mirror has no room."""
        if self.mirror is not None and self.mirror.place(decoding):
            return self.mirror.rows
        return decoding

    def plan(self, chunks: Sequence[Chunk], *, rows: int) -> GatheredPlan:
        """Lay out one step."""
        mirrored = rows if self.mirror is not None and self.mirror.rows else 0
        slots = self._tensor(slots_of(chunks, self.pool.block_tokens))
        plan = GatheredPlan(slots=slots, mirrored=mirrored, groups=[], dense=None)
        if mirrored:
            plan.dense = self._plan_dense([chunk.start for chunk in chunks[:mirrored]])
        rest = chunks[mirrored:]
        if rest:
            pieces = [tile for chunk in rest for tile in _tiles(chunk)] if self.tiles else rest
            by_size: dict[tuple[int, int], list[Chunk]] = {}
            for piece in pieces:
                by_size.setdefault(self._bucket(piece), []).append(piece)
            plan.groups = [self._group(members) for _, members in sorted(by_size.items())]
        return plan

    def _plan_dense(self, starts: list[int]) -> Dense:
        assert self.mirror is not None
        if len(self._rows) < len(starts):
            self._rows = torch.arange(2 * len(starts), device=self.device)
        rows, positions = self._rows[: len(starts)], self._tensor(starts)
        self.mirror.mask[rows, ..., positions] = 0.0
        keys, values, mask = self.mirror.window(max(starts) + 1)
        return Dense(rows=rows, positions=positions, keys=keys, values=values, mask=mask)

    def _bucket(self, piece: Chunk) -> tuple[int, int]:
        """Return the bucket of a piece. Pieces of one bucket are padded to a common
        size, within a factor of two in each dimension, and exactly for tiles.
        """
        blocks = self._context_blocks(piece)
        return (
            (0, blocks)
            if self.tiles
            else ((piece.count - 1).bit_length(), (blocks - 1).bit_length())
        )

    def _context_blocks(self, piece: Chunk) -> int:
        size = self.pool.block_tokens
        if not self.tiles:
            return -(-(piece.start + piece.count) // size)
        end = (piece.start // TILE_ROWS + 1) * TILE_ROWS
        return -(-end // (size * TILE_CONTEXT_BLOCKS)) * TILE_CONTEXT_BLOCKS

    def _group(self, pieces: list[Chunk]) -> Group:
        blocks = max(self._context_blocks(piece) for piece in pieces)
        queries = TILE_ROWS if self.tiles else max(piece.count for piece in pieces)
        gather = np.zeros((len(pieces), queries), dtype=np.int64)
        positions = np.zeros((len(pieces), queries), dtype=np.int64)
        tables = np.zeros((len(pieces), blocks), dtype=np.int64)
        real = np.zeros((len(pieces), queries), dtype=bool)
        for row, piece in enumerate(pieces):
            first = piece.start % TILE_ROWS if self.tiles else 0
            span = slice(first, first + piece.count)
            gather[row, span] = np.arange(piece.offset, piece.offset + piece.count)
            positions[row, span] = np.arange(piece.start, piece.start + piece.count)
            real[row, span] = True
            held_blocks = piece.entry.blocks[:blocks]
            tables[row, : len(held_blocks)] = held_blocks
        context = blocks * self.pool.block_tokens
        seen = torch.arange(context, device=self.device) <= self._tensor(positions)[:, :, None]
        mask = torch.where(seen, self._zero, self._hidden)
        return Group(
            sequences=len(pieces),
            queries=queries,
            context=context,
            gather=self._tensor(gather.ravel()),
            blocks=self._tensor(tables.ravel()),
            mask=mask.repeat(1, self.shared, 1)[:, None],
            real=None if real.all() else self._tensor(np.flatnonzero(real)),
            scatter=self._tensor(gather[real]),
        )

    def _tensor(self, values: list[int] | npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)

    def attend(self, layer: int, qkv: torch.Tensor, plan: GatheredPlan) -> torch.Tensor:
        width = self.query_width
        q, kv = qkv.split_with_sizes((width, qkv.shape[1] - width), dim=1)
        self.pool.layer_tokens[layer].index_copy_(0, plan.slots, kv)
        decoded = self._decode(layer, qkv, plan.dense) if plan.dense is not None else None
        if decoded is not None and not plan.groups:
            return decoded
        out = torch.empty(len(qkv), width, device=self.device, dtype=self.dtype)
        if decoded is not None:
            out[: plan.mirrored] = decoded
        for group in plan.groups:
            out.index_copy_(0, group.scatter, self._attend_group(layer, q, group))
        return out

    def _decode(self, layer: int, qkv: torch.Tensor, dense: Dense) -> torch.Tensor:
        assert self.mirror is not None
        count, heads, size, width = len(dense.rows), self.kv_heads, self.head_dim, self.query_width
        row = qkv.stride(0)
        key = qkv.as_strided((count, heads, size), (row, size, 1), width)
        value = qkv.as_strided((count, heads, size), (row, size, 1), width + heads * size)
        self.mirror.keys[layer][dense.rows, :, :, dense.positions] = key
        self.mirror.values[layer][dense.rows, :, dense.positions] = value
        # The query heads of one key head are rows of one product.
        folded = qkv.as_strided((count, width), (row, 1)).reshape(count * heads, self.shared, size)
        scores = torch.baddbmm(dense.mask, folded, dense.keys[layer], alpha=self.scale)
        return torch.bmm(torch.softmax(scores, dim=-1), dense.values[layer]).view(count, width)

    def _attend_group(self, layer: int, q: torch.Tensor, group: Group) -> torch.Tensor:
        count, queries = group.sequences, group.queries
        padded = q.index_select(0, group.gather).view(
            count, queries, self.kv_heads, self.shared, self.head_dim
        )
        folded = padded.permute(0, 2, 3, 1, 4).reshape(
            count, self.kv_heads, self.shared * queries, self.head_dim
        )
        gathered = self.pool.layer_blocks[layer].index_select(0, group.blocks)
        kv = gathered.view(count, group.context, 2 * self.kv_heads, self.head_dim).transpose(1, 2)
        out = scaled_dot_product_attention(
            folded, kv[:, : self.kv_heads], kv[:, self.kv_heads :], attn_mask=group.mask
        )
        unfolded = (
            out.transpose(1, 2)
            .reshape(count, self.shared, queries, self.kv_heads, self.head_dim)
            .permute(0, 2, 3, 1, 4)
        )
        flat = unfolded.reshape(count * queries, self.query_width)
        return flat if group.real is None else flat.index_select(0, group.real)


def slots_of(chunks: Sequence[Chunk], size: int) -> list[int]:
    """Return the pool position of each token, in blocks of `size` tokens."""
    slots: list[int] = []
    for chunk in chunks:
        blocks = chunk.entry.blocks
        if chunk.count == 1:
            slots.append(blocks[chunk.start // size] * size + chunk.start % size)
        else:
            slots.extend(
                blocks[at // size] * size + at % size
                for at in range(chunk.start, chunk.start + chunk.count)
            )
    return slots


def _tiles(chunk: Chunk) -> list[Chunk]:
    """Cut the chunk at the aligned multiples of TILE_ROWS positions."""
    tiles = []
    start, end = chunk.start, chunk.start + chunk.count
    while start < end:
        stop = min(end, (start // TILE_ROWS + 1) * TILE_ROWS)
        tiles.append(
            Chunk(
                entry=chunk.entry,
                start=start,
                count=stop - start,
                offset=chunk.offset + start - chunk.start,
            )
        )
        start = stop
    return tiles
