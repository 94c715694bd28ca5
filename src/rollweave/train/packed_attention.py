"""Attention of transformers' models over packed rows, registered as an implementation
of transformers' attention interface.

A model computes its masks and its attention here, and everything else on one row with
all sequences. Invariants: a sequence sees only itself; the model's own mask function
decides which keys a query sees, at positions in the sequence, so that sliding windows
and chunks are the same as for the sequence alone; nothing is computed between two
sequences.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from rollweave.schema.errors import TrainerError
from rollweave.train.attention import attend
from rollweave.train.packing import Grid, Packed, to_grid

IMPLEMENTATION = "rollweave_packed"
"""Name of this attention in transformers' registry."""

VARLEN_DTYPES = (torch.bfloat16, torch.float16)
"""Number formats of torch's kernels for sequences of various lengths."""

MAX_VARLEN_DIM = 256
"""Maximum size of a head in these kernels."""

MIN_CAPABILITY = (8, 0)
"""Oldest generation of GPUs with these kernels."""

UNSUPPORTED = ("position_bias",)
"""Arguments of transformers' attention functions that this function does not implement.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """The sequences of one forward pass. `ends` are the cumulative lengths, from 0."""

    grid: Grid
    longest: int
    ends: torch.Tensor  # [B + 1] int32

    @classmethod
    def of(cls, packed: Packed) -> "Rows":
        lengths = packed.keys.positions.amax(1) + 1
        ends = functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        return cls(grid=packed.keys, longest=packed.longest, ends=ends)


@dataclasses.dataclass(frozen=True, slots=True)
class PackedMask:
    """The object that transformers passes through a model as its attention mask.

    `visible[q, k]` is whether position q of a sequence sees position k of it; None if
    it sees all earlier positions. `window` is the number of positions that each
    position sees if `visible` is exactly such a sliding window, else None.
    """

    rows: Rows
    visible: torch.Tensor | None  # [W, W] bool
    window: int | None = None


_current = threading.local()


@contextlib.contextmanager
def packed_rows(packed: Packed) -> Iterator[None]:
    """Compute a model's forward pass over these sequences in this context."""
    _current.rows = Rows.of(packed)
    try:
        yield
    finally:
        del _current.rows


def register() -> None:
    """Make this implementation known to transformers. Raises ImportError without it."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, packed_mask)


def packed_mask(
    *,
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> PackedMask:
    """Return the mask that a model asks transformers for.

    `mask_function(batch, head, query, key)` tells whether a query sees a key. It is
    evaluated once, at positions of a sequence, because it is the same for all.
    """
    from transformers import masking_utils

    causal_mask: Callable[..., Any] = masking_utils.causal_mask_function
    rows: Rows | None = getattr(_current, "rows", None)
    if rows is None:
        raise TrainerError("the model builds attention masks outside of its forward pass")
    if use_vmap:
        raise TrainerError("the model's mask depends on more than positions")
    if mask_function is causal_mask:
        return PackedMask(rows, None)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    place = torch.arange(rows.longest, device=device)
    query, key = place[:, None], place[None, :]
    visible = mask_function(zero, zero, query, key).expand(rows.longest, rows.longest)
    causal = key <= query
    if torch.equal(visible, causal):
        return PackedMask(rows, None)
    sliding = local_size is not None and torch.equal(visible, causal & (key > query - local_size))
    return PackedMask(rows, visible, local_size if sliding else None)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend query [1, heads, N, D] to key and value [1, groups, N, D] of packed rows;
    return [1, N, heads, D].

    `softcap` bounds the scores, and `s_aux` are the scores of each head's attention
    sink. A window is part of the mask.
    """
    if not isinstance(attention_mask, PackedMask):
        raise TrainerError(
            f"{type(module).__name__} attends without a mask of transformers' mask interface"
        )
    refused = [name for name in UNSUPPORTED if others.get(name) is not None]
    if refused or dropout:
        raise TrainerError(f"{type(module).__name__} attends with {(refused or ['dropout'])[0]}")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [N, heads, D]
    plain = softcap is None and s_aux is None
    if plain and _has_varlen(q, v, attention_mask):
        return _varlen(q, k, v, attention_mask, scale)[None], None
    grid = attention_mask.rows.grid
    heads, groups, dim = q.shape[1], k.shape[1], v.shape[-1]
    q, k, v = (
        torch.unflatten(to_grid(tensor.flatten(1), grid, None), -1, tensor.shape[1:])
        for tensor in (q, k, v)
    )  # [B, W, heads, D]
    if plain:
        out = _attend(q, k, v, attention_mask.visible, scale)
    else:
        out = _attend_slowly(q, k, v, attention_mask, scale, softcap, s_aux)
    assert heads % groups == 0, "transformers' heads share keys evenly"
    out = out.reshape(-1, heads, dim)
    return (out if grid.dense else out.index_select(0, grid.flat))[None], None


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attend in a grid [B, W, heads, D]. Padding is behind the tokens of a sequence,
    which do not see it.
    """
    if visible is None and q.shape[-1] == v.shape[-1]:
        natural = q.shape[-1] ** -0.5
        return attend(q if scale == natural else q * (scale / natural), k, v, None)
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=visible,
        is_causal=visible is None,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


def _attend_slowly(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: PackedMask,
    scale: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """Attend in a grid with all scores in memory, for features that torch's kernels
    lack.
    """
    repeats = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    width = scores.shape[-1]
    visible = mask.visible
    if visible is None:
        visible = torch.ones(width, width, dtype=torch.bool, device=q.device).tril_()
    scores = scores.float().masked_fill(~visible, float("-inf"))
    if s_aux is not None:
        sinks = s_aux.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights.to(v.dtype), v)


def _has_varlen(q: torch.Tensor, v: torch.Tensor, mask: PackedMask) -> bool:
    """Return whether a kernel of torch computes this without padding."""
    device = q.device
    if device.type != "cuda" or (mask.visible is not None and mask.window is None):
        return False
    return (
        q.dtype in VARLEN_DTYPES
        and q.shape[-1] == v.shape[-1] <= MAX_VARLEN_DIM
        and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
    )


def _varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: PackedMask, scale: float
) -> torch.Tensor:
    """Attend on packed rows [N, heads, D], with torch's kernel for them."""
    from torch.nn.attention.varlen import varlen_attn

    rows = mask.rows
    out = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        rows.ends,
        rows.ends,
        rows.longest,
        rows.longest,
        scale=scale,
        window_size=(-1, 0) if mask.window is None else (mask.window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(out, torch.Tensor), "no auxiliary results are requested"
    return out
