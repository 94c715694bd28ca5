"""Attention on a GPU by FlexAttention, whose kernel reads blocks where they lie in the
paged pool.

The pool of one layer is the only sequence of keys and values, and each row of queries
lists the blocks that it attends to. A step has at most two calls for each layer:

- *Decoding*: one row for each sequence, in which the query heads that share a key head
  are the queries. FlexAttention has a kernel for so few queries; it divides a long
  context among several processors, and is compiled for each number of rows.
  Therefore there are few such numbers (`padded_rows`).
- *Prefill*: the chunks one after the other, each padded to whole rows of `QUERY_BLOCK`
  queries. Rows at the end list no block and cost next to nothing, so that there are
  even fewer sizes.

The kernel visits listed blocks only. A mask therefore decides about positions, and not
about sequences. All tensors of a plan but `gather` and `scatter` are views of buffers
that stay where they are, so that a CUDA graph of a decoding step can be replayed
(`engine/cuda_graphs.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from rollweave.engine.attention import Attention, Chunk, Plan, slots_of
from rollweave.engine.batching import Entry
from rollweave.engine.kv import PagedPool
from rollweave.weights.checkpoint import ModelShape

QUERY_BLOCK = 64
"""Number of queries of one row of a prefill."""

DECODE_QUERIES = 128
"""Number of queries for which a decoding row lists its blocks: no fewer than a key head
has query heads.
"""

FIRST_PREFILL = 256
"""Minimum number of padded queries in a prefill; the others are its doubles."""

MIN_WIDTH = 16
"""Minimum head size and block size of the kernel: that of the GPU's matrix products."""

MIN_CAPABILITY = (8, 0)
"""Oldest compute capability of a GPU on which the kernel is used (Ampere)."""

MAX_SHAPES = 128
"""Maximum number of shapes for which the kernel is compiled."""

CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""Maximum difference from the other implementation at values of about 1."""

Kernel = Callable[..., torch.Tensor]
"""A function with the arguments of `flex_attention`."""


def padded_rows(count: int) -> int:
    """Return the number of rows in which `count` sequences decode: a power of two, or
    from 16 on also the number halfway between two of them.
    """
    power = 1 << (count - 1).bit_length()
    halfway = power * 3 // 4
    return halfway if power > 16 and count <= halfway else power


def obstacle(shape: ModelShape, pool: PagedPool) -> str:
    """Return why the kernel cannot be used for this model on this device; "" if it
    can.
    """
    device = pool.device
    if device.type != "cuda":
        return "there is no GPU"
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} is too old for it"
    if shape.head_dim < MIN_WIDTH or pool.block_tokens % MIN_WIDTH:
        return (
            f"heads must have at least {MIN_WIDTH} numbers and blocks a multiple of {MIN_WIDTH} "
            f"tokens, got {shape.head_dim} and {pool.block_tokens}"
        )
    if shape.heads // shape.kv_heads > DECODE_QUERIES:
        return f"more than {DECODE_QUERIES} query heads share a key head"
    return ""


def compiled_kernel() -> Kernel:
    """Return FlexAttention, which is compiled at the first call with each shape."""
    import torch._dynamo
    import torch._inductor.config

    limit = max(torch._dynamo.config.recompile_limit, MAX_SHAPES)
    torch._dynamo.config.recompile_limit = limit
    torch._inductor.config.compile_threads = 1  # an engine has no processes beside it
    kernel: Kernel = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return kernel


@dataclass(slots=True)
class Prefill:
    """The prefilling chunks: `gather` are the flat positions of the padded queries, and
    `scatter` the padded positions of the tokens.
    """

    gather: torch.Tensor
    scatter: torch.Tensor
    mask: BlockMask


@dataclass(slots=True)
class PagedPlan:
    """`slots[i]` is the pool position of token i's KV. The first `rows` tokens
    decode.
    """

    slots: torch.Tensor
    rows: int
    decode: BlockMask | None
    prefill: Prefill | None


class BlockLists:
    """Lists of blocks on the device, one a row; a row that has not changed since the
    last call is not copied again.
    """

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self._host = torch.zeros(rows, width, dtype=torch.int32)
        self._array = self._host.numpy()
        self._written: list[list[int]] = [[] for _ in range(rows)]
        self.indices = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self.counts = torch.zeros(rows, dtype=torch.int32, device=device)

    def write(self, lists: Sequence[list[int]], counts: Sequence[int]) -> None:
        """Set the first rows to the first `counts` blocks of `lists`, and the counts of
        all others to 0.
        """
        changed = [row for row, blocks in enumerate(lists) if blocks != self._written[row]]
        for row in changed:
            self._array[row, : len(lists[row])] = lists[row]
            self._written[row] = list(lists[row])
        if changed:
            rows = slice(changed[0], changed[-1] + 1)
            self.indices[rows].copy_(self._host[rows])
        padded = torch.zeros(len(self.counts), dtype=torch.int32)
        padded[: len(counts)] = torch.tensor(counts, dtype=torch.int32)
        self.counts.copy_(padded)


class PrefillBuffers:
    """The buffers of prefills of one padded size."""

    def __init__(self, queries: int, width: int, first: torch.Tensor, pool: PagedPool) -> None:
        device, size = pool.device, pool.block_tokens
        self.positions = positions = torch.zeros(queries, dtype=torch.int64, device=device)
        self.lists = BlockLists(queries // QUERY_BLOCK, width, device)

        def before(
            b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
        ) -> torch.Tensor:
            return first[kv // size] + kv % size <= positions[q]

        self.mask = _mask(
            (queries, pool.tokens),
            self.lists.counts[None, None],
            self.lists.indices[None, None],
            (QUERY_BLOCK, size),
            before,
        )


class PagedAttention(Attention[PagedPlan]):
    """Attention by `kernel` over the pool of an engine that decodes at most `max_rows`
    sequences of at most `context` tokens at once.
    """

    def __init__(
        self,
        shape: ModelShape,
        pool: PagedPool,
        *,
        max_rows: int,
        context: int,
        kernel: Kernel | None = None,
    ) -> None:
        self.pool = pool
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.shared = shape.heads // shape.kv_heads
        self.query_width = shape.heads * shape.head_dim
        self.scale = shape.head_dim**-0.5
        self.kernel = kernel or compiled_kernel()
        self._width = min(-(-context // pool.block_tokens), pool.blocks)
        most = padded_rows(max_rows)
        self._slots = torch.zeros(most, dtype=torch.int64, device=pool.device)
        self._lists = BlockLists(most, self._width, pool.device)
        self._decode_masks: dict[int, BlockMask] = {}
        self._first = torch.zeros(pool.blocks, dtype=torch.int32, device=pool.device)
        """Position of the first token of each block that a prefill lists. A block has
        the same one in all sequences that share it, since they share all tokens before
        it.
        """
        self._prefills: dict[int, PrefillBuffers] = {}

    def rows(self, decoding: list[Entry]) -> list[Entry]:
        """Return the sequences, and the shortest one as often as rows are missing."""
        missing = padded_rows(len(decoding)) - len(decoding) if decoding else 0
        if not missing:
            return decoding
        return decoding + [min(decoding, key=lambda entry: entry.computed)] * missing

    def plan(self, chunks: Sequence[Chunk], *, rows: int) -> PagedPlan:
        """Lay out one step, in the buffers of the last one."""
        slots = torch.tensor(slots_of(chunks, self.pool.block_tokens), dtype=torch.int64)
        plan = PagedPlan(slots=self._slots[:rows], rows=rows, decode=None, prefill=None)
        if rows:
            self._slots[:rows].copy_(slots[:rows])
            counts = [chunk.start // self.pool.block_tokens + 1 for chunk in chunks[:rows]]
            self._lists.write([chunk.entry.blocks for chunk in chunks[:rows]], counts)
            plan.decode = self._decode_mask(rows)
        if len(chunks) > rows:
            plan.slots = slots.to(self.pool.device)
            plan.prefill = self._prefill(chunks[rows:])
        return plan

    def _decode_mask(self, rows: int) -> BlockMask:
        mask = self._decode_masks.get(rows)
        if mask is None:
            slots, size = self._slots[:rows], self.pool.block_tokens

            def computed(
                b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
            ) -> torch.Tensor:
                # only the block of the newest token has positions without KV
                slot = slots[b]
                return (kv // size != slot // size) | (kv <= slot)

            mask = self._decode_masks[rows] = _mask(
                (self.shared, self.pool.tokens),
                self._lists.counts[:rows, None, None],
                self._lists.indices[:rows, None, None],
                (DECODE_QUERIES, size),
                computed,
            )
        return mask

    def _prefill(self, chunks: Sequence[Chunk]) -> Prefill:
        size = self.pool.block_tokens
        lists: list[list[int]] = []
        counts: list[int] = []
        gather: list[npt.NDArray[np.int64]] = []
        scatter: list[npt.NDArray[np.int64]] = []
        positions: list[npt.NDArray[np.int64]] = []
        first: dict[int, int] = {}
        for chunk in chunks:
            end, blocks = chunk.start + chunk.count, chunk.entry.blocks
            rows = -(-chunk.count // QUERY_BLOCK)
            queries = np.minimum(np.arange(rows * QUERY_BLOCK), chunk.count - 1)
            scatter.append(len(lists) * QUERY_BLOCK + np.arange(chunk.count))
            gather.append(chunk.offset + queries)
            positions.append(chunk.start + queries)
            lists += [blocks] * rows
            counts += [
                (min(chunk.start + (row + 1) * QUERY_BLOCK, end) - 1) // size + 1
                for row in range(rows)
            ]
            first.update(zip(blocks, range(0, end, size), strict=False))
        buffers = self._buffers(len(lists) * QUERY_BLOCK)
        padded = len(buffers.positions) - len(lists) * QUERY_BLOCK
        device = self.pool.device
        numbers = torch.tensor([list(first), list(first.values())], device=device)
        self._first[numbers[0]] = numbers[1].int()
        buffers.positions.copy_(_joined(positions, padded))
        buffers.lists.write(lists, counts)
        return Prefill(
            gather=_joined(gather, padded).to(device),
            scatter=_joined(scatter, 0).to(device),
            mask=buffers.mask,
        )

    def _buffers(self, queries: int) -> PrefillBuffers:
        size = max(FIRST_PREFILL, 1 << (queries - 1).bit_length())
        if size not in self._prefills:
            self._prefills[size] = PrefillBuffers(size, self._width, self._first, self.pool)
        return self._prefills[size]

    def attend(self, layer: int, qkv: torch.Tensor, plan: PagedPlan) -> torch.Tensor:
        width, rows = self.query_width, plan.rows
        q, kv = qkv.split_with_sizes((width, qkv.shape[1] - width), dim=1)
        tokens = self.pool.layer_tokens[layer]
        tokens.index_copy_(0, plan.slots, kv)
        heads = tokens.view(1, -1, 2 * self.kv_heads, self.head_dim).transpose(1, 2)
        keys, values = heads[:, : self.kv_heads], heads[:, self.kv_heads :]
        parts = []
        if plan.decode is not None:
            folded = q[:rows].view(rows, self.kv_heads, self.shared, self.head_dim)
            out = self.kernel(folded, keys, values, block_mask=plan.decode, scale=self.scale)
            parts.append(out.reshape(rows, width))
        if plan.prefill is not None:
            padded = q.index_select(0, plan.prefill.gather)
            queries = padded.view(1, -1, self.heads, self.head_dim).transpose(1, 2)
            out = self.kernel(
                queries,
                keys,
                values,
                block_mask=plan.prefill.mask,
                scale=self.scale,
                enable_gqa=self.shared > 1,
                kernel_options=self._prefill_options(),
            )
            flat = out.transpose(1, 2).reshape(len(padded), width)
            parts.append(flat.index_select(0, plan.prefill.scatter))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _prefill_options(self) -> dict[str, object]:
        """Return tiles that divide a row of queries and a block; the kernel's choice
        may be larger.
        """
        return {
            "FORCE_USE_FLEX_ATTENTION": True,
            "BLOCK_M": QUERY_BLOCK,
            "BLOCK_N": math.gcd(QUERY_BLOCK, self.pool.block_tokens),
        }

    def difference(self, reference: Attention[Plan]) -> float:
        """Return the largest difference of this attention from another one over the
        same pool, in a step that decodes and prefills. Clears the pool.
        """
        pool, size = self.pool, self.pool.block_tokens
        half = min(self._width, pool.blocks // 2, 3)
        decoding, prefilling = (
            Entry(id=id, tokens=[], limit=0, blocks=blocks)
            for id, blocks in (
                ("decoding", list(range(2 * half - 1, half - 1, -1))),
                ("prefilling", list(range(half))),
            )
        )
        generator = torch.Generator(pool.device).manual_seed(0)
        pool.data.normal_(generator=generator)
        decoding.computed = half * size - 1
        chunks = [
            Chunk(decoding, decoding.computed, 1, 0),
            Chunk(prefilling, 1, half * size - 1, 1),
        ]
        qkv = torch.empty(
            half * size, self.query_width + pool.width, device=pool.device, dtype=pool.data.dtype
        ).normal_(generator=generator)
        own = self.attend(0, qkv.clone(), self.plan(chunks, rows=1)).float()
        other = reference.attend(0, qkv, reference.plan(chunks, rows=1)).float()
        pool.clear()
        return float((own - other).abs().nan_to_num(float("inf")).max())


def _mask(
    lengths: tuple[int, int],
    counts: torch.Tensor,
    indices: torch.Tensor,
    sizes: tuple[int, int],
    visible: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> BlockMask:
    """Return a mask of listed blocks, without the transposed lists that only a backward
    pass needs.
    """
    return BlockMask(
        seq_lengths=lengths,
        kv_num_blocks=counts,
        kv_indices=indices,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=sizes,
        mask_mod=visible,
    )


def _joined(pieces: Sequence[npt.NDArray[np.int64]], zeros: int) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([*pieces, np.zeros(zeros, dtype=np.int64)]))
