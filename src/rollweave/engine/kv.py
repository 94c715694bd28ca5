"""The KV tensors of one engine: an authoritative paged pool, and on CPU a dense mirror
of the decoding sequences.

The pool holds, per layer, one row per token: all key heads, then all value heads. A
block is `block_tokens` consecutive rows. Attention over blocks has to gather them
first, which costs more than the attention itself on CPU. Each decoding sequence
therefore also has a row of the mirror, in the layout that attention reads; its new
tokens are written to both.

Invariants: every computed token of a live sequence is in the pool; the mirror's rows
`[0, len(rows))` belong to `rows` in order, and hold what the pool holds for their
sequences' computed tokens. All unwritten memory is finite (it is masked, and masking
multiplies by zero).
"""

from collections.abc import Sequence

import torch

from rollweave.engine.batching import Entry
from rollweave.weights.checkpoint import ModelShape

LAYOUT = "block/layer/token/key heads, value heads; rotary pairs interleaved"
"""Name of the memory layout of KV that moves between engines. It changes with the
layout of the pool or the model.
"""
GROWTH_TOKENS = 128
"""Minimum number of tokens by which the mirror's rows grow: growing copies the whole
mirror.
"""
MIN_ROWS = 16
"""Number of rows that the mirror starts with, for the same reason."""


class PagedPool:
    """KV of all blocks: `data[layer, block * block_tokens + offset]` is one token, `2 *
    kv_heads * head_dim` wide. A pool that is `released` has no memory.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        blocks: int,
        block_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
        released: bool = False,
    ) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.width = 2 * shape.kv_heads * shape.head_dim
        self.device = device
        self._layers, self._dtype = shape.layers, dtype
        self._place(0 if released else blocks)

    def _memory(self, blocks: int) -> torch.Tensor:
        """Return the memory of this many blocks, zero where it is written or read."""
        return torch.zeros(
            self._layers,
            blocks * self.block_tokens,
            self.width,
            device=self.device,
            dtype=self._dtype,
        )

    def _place(self, blocks: int) -> None:
        self.data = self._memory(blocks)
        self.by_block = self.data.view(self._layers, blocks, self.block_tokens * self.width)
        self.layer_tokens, self.layer_blocks = (self.data.unbind(0), self.by_block.unbind(0))

    @property
    def tokens(self) -> int:
        """Number of tokens that fit, also of a pool that is released."""
        return self.blocks * self.block_tokens

    def release(self) -> None:
        """Free the memory."""
        self._place(0)

    def allocate(self) -> None:
        """Take the memory of a released pool again. Raises RuntimeError without
        room.
        """
        self._place(self.blocks)

    def clear(self) -> None:
        self.data.zero_()

    def erase(self, blocks: Sequence[int]) -> None:
        """Reset `blocks` to zero, their initial content."""
        self.by_block.index_fill_(1, self._tensor(blocks), 0)

    def read(self, blocks: Sequence[int], out: torch.Tensor) -> None:
        """Copy `blocks` to the front of `out`, [blocks or more, layer, block_tokens *
        width] on the CPU.
        """
        by_block, out = self.by_block.transpose(0, 1), out[: len(blocks)]
        if by_block.is_cpu:
            torch.index_select(by_block, 0, self._tensor(blocks), out=out)
        else:
            out.copy_(by_block.index_select(0, self._tensor(blocks)))

    def write(self, blocks: Sequence[int], content: torch.Tensor) -> None:
        """Copy the content returned by `read` into `blocks`."""
        self.by_block.transpose(0, 1).index_copy_(
            0, self._tensor(blocks), content.to(self.data.device)
        )

    def _tensor(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self.data.device)


class DenseMirror:
    """Rows of decoding sequences, per layer: `keys` [row, head, dim, position],
    `values` [row, head, position, dim].

    Keys are transposed because products with so few queries are fastest that way.
    `mask` [row, head, 1, position] is 0 at the positions of tokens and -inf elsewhere.
    Rows times positions stay within `budget` tokens, padding included.
    """

    def __init__(self, shape: ModelShape, pool: PagedPool, *, budget: int) -> None:
        self.pool = pool
        self.heads = shape.kv_heads
        self.head_dim = shape.head_dim
        self.budget = budget
        self.rows: list[Entry] = []
        self._row_of: dict[Entry, int] = {}
        self._size = (0, 0)
        self._keys, self._values, self.mask = self._empty(0, 0)
        self.keys, self.values = self._keys.unbind(0), self._values.unbind(0)
        self._edge = self.mask.new_zeros(0)

    def _empty(self, rows: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layers, like = self.pool.data.shape[0], self.pool.data
        return (
            like.new_zeros(layers, rows, self.heads, self.head_dim, capacity),
            like.new_zeros(layers, rows, self.heads, capacity, self.head_dim),
            like.new_full((rows, self.heads, 1, capacity), float("-inf")),
        )

    def window(
        self, longest: int
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], torch.Tensor]:
        """Return the keys and values of each layer, and the mask, over all rows' first
        `longest` positions, with rows and heads merged.
        """
        layers, (rows, capacity), size = len(self.keys), self._size, self.head_dim
        merged, row = len(self.rows) * self.heads, size * capacity
        layer = rows * self.heads * row
        keys = self._keys.as_strided((layers, merged, size, longest), (layer, row, capacity, 1))
        values = self._values.as_strided((layers, merged, longest, size), (layer, row, size, 1))
        mask = self.mask.as_strided((merged, 1, longest), (capacity, capacity, 1))
        return keys.unbind(0), values.unbind(0), mask

    def _fitting(self, count: int, longest: int) -> tuple[int, int] | None:
        """Return rows and capacity for `count` sequences, with room to grow if the
        budget allows it; None if they do not fit.
        """
        for rows in (max(MIN_ROWS, 1 << (count - 1).bit_length()), count):
            if rows * longest <= self.budget:
                roomy = max(longest * 3 // 2, longest + GROWTH_TOKENS, self._size[1])
                return rows, min(roomy, self.budget // rows)
        return None

    def _allocate(self, rows: int, capacity: int) -> None:
        old_keys, old_values, row_count = self._keys, self._values, len(self.rows)
        length = min(self._size[1], capacity)
        self._size = (rows, capacity)
        self._keys, self._values, self.mask = self._empty(rows, capacity)
        self._keys[:, :row_count, :, :, :length] = old_keys[:, :row_count, :, :, :length]
        self._values[:, :row_count, :, :length] = old_values[:, :row_count, :, :length]
        self.keys, self.values = self._keys.unbind(0), self._values.unbind(0)
        # The `capacity` entries from `capacity - n` on are n zeros and then -inf: the
        # mask of a row of n tokens.
        self._edge = torch.cat(
            (self.mask.new_zeros(capacity), self.mask.new_full((capacity,), float("-inf")))
        )
        for row, entry in enumerate(self.rows):
            self.mask[row] = self._edge[capacity - entry.computed : 2 * capacity - entry.computed]

    def place(self, entries: list[Entry]) -> bool:
        """Give each of `entries`, which decode now, its row, and drop all other rows.
        Return False if they do not fit.
        """
        if len(entries) != len(self.rows) or any(entry not in self._row_of for entry in entries):
            current = set(entries)
            for entry in [entry for entry in self.rows if entry not in current]:
                self.drop(entry)
        longest = max((len(entry.tokens) for entry in entries), default=0)
        if longest > self._size[1] or len(entries) > self._size[0]:
            size = self._fitting(len(entries), longest)
            if size is None:
                self.forget(memory=True)
                return False
            self._allocate(*size)
        if len(self.rows) < len(entries):
            for entry in entries:
                if entry not in self._row_of:
                    self._load(entry)
        return True

    def drop(self, entry: Entry) -> None:
        """Drop a sequence's row; the last row moves into the gap.

        Unknown entries are ignored.
        """
        row = self._row_of.pop(entry, None)
        if row is None:
            return
        last = self.rows.pop()
        if last is not entry:
            length = last.computed
            self._keys[:, row, :, :, :length] = self._keys[:, len(self.rows), :, :, :length]
            self._values[:, row, :, :length] = self._values[:, len(self.rows), :, :length]
            self.mask[row] = self.mask[len(self.rows)]
            self.rows[row] = last
            self._row_of[last] = row

    def forget(self, *, memory: bool) -> None:
        """Drop all rows, and with `memory` free their memory too."""
        self.rows.clear()
        self._row_of.clear()
        if memory:
            self._allocate(0, 0)

    def _load(self, entry: Entry) -> None:
        row, length, size = len(self.rows), entry.computed, self.pool.block_tokens
        self.rows.append(entry)
        self._row_of[entry] = row
        self.mask[row] = self._edge[self._size[1] - length : 2 * self._size[1] - length]
        if length:
            blocks = torch.tensor(entry.blocks[: -(-length // size)], device=self.pool.data.device)
            gathered = self.pool.by_block.index_select(1, blocks)
            tokens = gathered.view(gathered.shape[0], -1, 2, self.heads, self.head_dim)[:, :length]
            self._keys[:, row, :, :, :length] = tokens[:, :, 0].permute(0, 2, 3, 1)
            self._values[:, row, :, :length] = tokens[:, :, 1].transpose(1, 2)
