"""The KV tensors of one engine: a paged pool that is the truth, and on CPU a dense mirror of the sequences that decode.

The pool holds, per layer, one row per token: all key heads, then all value heads. A block is `block_tokens` rows in a
row. Attention over blocks has to gather them first, which on CPU costs more than the attention; so each decoding sequence also
has a row of the mirror, laid out as attention reads it, to which its new tokens are written alongside the pool.

Invariants: every computed token of a live sequence is in the pool; the mirror's rows `[0, len(rows))` belong to `rows` in
order, and hold what the pool holds for their sequence's computed tokens. All unwritten memory is finite (it is masked, and
masking multiplies by zero).
"""

import torch

from rollweave.engine.checkpoint import ModelShape
from rollweave.policy.batching import Entry

GROWTH_TOKENS = 128
"""The mirror's rows grow in steps of this many tokens at least: growing copies all of it."""


class PagedPool:
    """KV of all blocks: `data[layer, block * block_tokens + offset]` is one token, `2 * kv_heads * head_dim` wide."""

    def __init__(self, shape: ModelShape, *, blocks: int, block_tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.width = 2 * shape.kv_heads * shape.head_dim
        self.data = torch.zeros(shape.layers, blocks * block_tokens, self.width, device=device, dtype=dtype)
        self.by_block = self.data.view(shape.layers, blocks, block_tokens * self.width)

    def clear(self) -> None:
        self.data.zero_()


class DenseMirror:
    """`data[layer, row, head, position]`: key heads, then value heads. At most `budget` tokens over all rows and padding."""

    def __init__(self, shape: ModelShape, pool: PagedPool, *, budget: int) -> None:
        self.pool = pool
        self.heads = 2 * shape.kv_heads
        self.head_dim = shape.head_dim
        self.budget = budget
        self.rows: list[Entry] = []
        self._row_of: dict[Entry, int] = {}
        self.capacity = 0
        self.data, self.mask = self._empty(rows=0, capacity=0)

    def _empty(self, *, rows: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = (self.pool.data.shape[0], rows, self.heads, capacity, self.head_dim)
        device, dtype = self.pool.data.device, self.pool.data.dtype
        mask = torch.full((rows, capacity), float("-inf"), device=device, dtype=dtype)
        return torch.zeros(size, device=device, dtype=dtype), mask

    def _size(self, count: int, longest: int) -> tuple[int, int] | None:
        """Rows and capacity for `count` sequences: with room to grow where the budget has it. None where they do not fit."""
        for rows in (1 << (count - 1).bit_length(), count):
            if rows * longest <= self.budget:
                roomy = max(longest * 3 // 2, longest + GROWTH_TOKENS, self.capacity)
                return rows, min(roomy, self.budget // rows)
        return None

    def _allocate(self, rows: int, capacity: int) -> None:
        old, kept, length = self.data, len(self.rows), min(self.capacity, capacity)
        self.data, self.mask = self._empty(rows=rows, capacity=capacity)
        self.data[:, :kept, :, :length] = old[:, :kept, :, :length]
        self.capacity = capacity
        for row, entry in enumerate(self.rows):
            self.mask[row, : entry.computed] = 0.0

    def place(self, entries: list[Entry]) -> bool:
        """Give every one of `entries`, which decode now, its row, and take the others' away. False where they do not fit."""
        if len(entries) != len(self.rows) or any(entry not in self._row_of for entry in entries):
            wanted = set(entries)
            for entry in [entry for entry in self.rows if entry not in wanted]:
                self.drop(entry)
        longest = max((len(entry.tokens) for entry in entries), default=0)
        if longest > self.capacity or len(entries) > self.data.shape[1]:
            size = self._size(len(entries), longest)
            if size is None:
                self.forget()
                return False
            self._allocate(*size)
        if len(self.rows) < len(entries):
            for entry in entries:
                if entry not in self._row_of:
                    self._load(entry)
        return True

    def drop(self, entry: Entry) -> None:
        """Take a sequence's row away; the last row moves into the gap. Unknown entries are ignored."""
        row = self._row_of.pop(entry, None)
        if row is None:
            return
        last = self.rows.pop()
        if last is not entry:
            length = last.computed
            self.data[:, row, :, :length] = self.data[:, len(self.rows), :, :length]
            self.mask[row] = self.mask[len(self.rows)]
            self.rows[row] = last
            self._row_of[last] = row

    def forget(self) -> None:
        """Take all rows away, and the memory with them."""
        self.rows.clear()
        self._row_of.clear()
        self.capacity = 0
        self._allocate(0, 0)

    def _load(self, entry: Entry) -> None:
        row, length, size = len(self.rows), entry.computed, self.pool.block_tokens
        self.rows.append(entry)
        self._row_of[entry] = row
        self.mask[row, :length] = 0.0
        self.mask[row, length:] = float("-inf")
        if length:
            blocks = torch.tensor(entry.blocks[: -(-length // size)], device=self.pool.data.device)
            gathered = self.pool.by_block.index_select(1, blocks)
            tokens = gathered.view(gathered.shape[0], -1, self.heads, self.head_dim)[:, :length]
            self.data[:, row, :, :length] = tokens.transpose(1, 2)
