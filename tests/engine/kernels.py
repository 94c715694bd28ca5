"""FlexAttention's unfused reference, a slower one, and recorded steps, for machines
without a GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def listed(mask: BlockMask) -> torch.Tensor:
    """Return which blocks each row of queries lists: [batch, rows, blocks]."""
    counts, indices = mask.kv_num_blocks[:, 0], mask.kv_indices[:, 0].long()
    blocks = mask.seq_lengths[1] // mask.BLOCK_SIZE[1]
    used = torch.arange(indices.shape[-1]) < counts[..., None]
    listed_blocks = torch.zeros(*counts.shape, blocks + 1, dtype=torch.bool)
    return listed_blocks.scatter(-1, torch.where(used, indices, blocks), True)[..., :blocks]


def whole_mask(mask: BlockMask) -> Callable[..., torch.Tensor]:
    """Return a function that also hides the blocks that a row does not list, which the
    compiled kernel never visits.
    """
    listed_blocks, (queries, tokens), visible = listed(mask), mask.BLOCK_SIZE, mask.mask_mod

    def shown(b: Any, h: Any, q: Any, kv: Any) -> torch.Tensor:
        return visible(b, h, q, kv) & listed_blocks[b, q // queries, kv // tokens]

    return shown


def unfused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block_mask: BlockMask,
    **rest: Any,
) -> torch.Tensor:
    """FlexAttention without compilation."""
    mask = BlockMask(
        seq_lengths=block_mask.seq_lengths,
        kv_num_blocks=block_mask.kv_num_blocks,
        kv_indices=block_mask.kv_indices,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=block_mask.BLOCK_SIZE,
        mask_mod=whole_mask(block_mask),
    )
    return flex_attention(query, key, value, block_mask=mask, **rest)  # type: ignore[no-any-return]


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool = False,
    kernel_options: object = None,
) -> torch.Tensor:
    """The same by operations of tensors alone, which can be recorded."""
    batch, queries = query.shape[0], query.shape[2]
    mask = whole_mask(block_mask)(
        torch.arange(batch)[:, None, None, None],
        torch.zeros(1, dtype=torch.int64)[:, None, None, None],
        torch.arange(queries)[:, None],
        torch.arange(key.shape[2]),
    )
    out = scaled_dot_product_attention(
        query,
        key.expand(batch, -1, -1, -1),
        value.expand(batch, -1, -1, -1),
        attn_mask=mask,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return out.nan_to_num()


class _Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out


class Recorder:
    """Like a CUDA graph: a replay repeats the operations on tensors, with the numbers
    that Python had when they were recorded, between the same addresses.
    """

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        with _Record() as record:
            work()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            for func, args, kwargs, out in record.calls:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay
