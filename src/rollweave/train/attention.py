"""Causal grouped-query attention with gradients, for sequences side by side in a grid;
and attention of transformers' models over packed rows, registered as an implementation
of transformers' attention interface.

A model of transformers computes its masks and its attention here, and everything else
on one row with all sequences. Invariants: a query sees exactly the keys at its own and
earlier positions of its sequence, of which the model's own mask function may hide some,
at positions in the sequence, so that sliding windows and chunks are the same as for the
sequence alone; nothing depends on the padding behind a sequence, or is computed between
two sequences. On a CPU, small heads are bound by the number of passes over the scores,
so these are minimized: future keys of whole blocks of queries are never computed, the
shift of the exponential is omitted if the scores are known to be small, and a column of
ones next to the values sums the weights in the same matrix product.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rollweave.schema.errors import TrainerError
from rollweave.train.packing import Grid, Packed, to_grid

MAX_SCORES = 1 << 26
"""Maximum attention scores in memory at the same time (elements, 256 MB in fp32);
larger attention goes through torch's own kernels.
"""

SAFE_SCORE = 30.0
"""Scores known to be within ± this value need no shift, because exp(±30) is far from
float32's limits.
"""

LOWEST_SCORE = -40.0
"""Lower bound of shifted scores: exp(-40) vanishes in the rounding of a sum that
contains a 1, while exponentials below -87 are denormal and 20 to 150 times slower.
"""

BLOCKS = 4
"""Number of blocks of queries, each with the keys up to its end: 5/8 of the scores are
computed.

More blocks need more calls.
"""

MIN_BLOCK = 32
"""Minimum queries of a block; shorter blocks save less than their calls cost."""

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


class _Attend(torch.autograd.Function):
    """Attention of q [G, R, W, D] over k and v [G, T, D]; visible is [G, 1, W, T] of 0
    and 1, or None if query w is at position w.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        visible: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        dim = q.shape[-1]
        summing = torch.cat([v, v.new_ones(*v.shape[:-1], 1)], -1)
        q = q * scale
        norms = (
            torch.linalg.vector_norm(q, dim=-1).amax() * torch.linalg.vector_norm(k, dim=-1).amax()
        )
        small = bool(norms < SAFE_SCORE)
        out = torch.empty_like(q)
        saved = []
        for start, end, length in _blocks(q, k, visible):
            rows = q[:, :, start:end]
            scores = torch.bmm(rows.flatten(1, 2), k[:, :length].mT).view(*rows.shape[:-1], length)
            seen, masked = _mask(scores, start, visible)
            if not small:
                masked.masked_fill_(seen == 0, float("-inf"))
                scores.sub_(scores.amax(-1, keepdim=True)).clamp_(min=LOWEST_SCORE)
            scores.exp_()
            masked.mul_(seen)
            result = torch.bmm(scores.flatten(1, 2), summing[:, :length]).view(
                *rows.shape[:-1], dim + 1
            )
            total = result[..., dim:]
            torch.div(result[..., :dim], total, out=out[:, :, start:end])
            saved.extend([scores, total])
        ctx.scale = scale
        ctx.blocks = _blocks(q, k, visible)
        ctx.save_for_backward(q, k, summing, out, *saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        q, k, summing, out, *saved = ctx.saved_tensors
        dim = q.shape[-1]
        d_q = torch.empty_like(q)
        d_k, d_v = torch.zeros_like(k), torch.zeros_like(k)
        for (start, end, length), scores, total in zip(
            ctx.blocks, saved[::2], saved[1::2], strict=True
        ):
            rows = grad[:, :, start:end] / total
            along = torch.linalg.vecdot(rows, out[:, :, start:end], dim=-1).neg_().unsqueeze(-1)
            # With the column of ones, the product with the values subtracts each row's
            # mean at no cost.
            rows = torch.cat([rows, along], -1).flatten(1, 2)
            weights = scores.flatten(1, 2)
            d_v[:, :length] += torch.bmm(weights.mT, rows[..., :dim])
            d_scores = torch.bmm(rows, summing[:, :length].mT).mul_(weights)
            d_q[:, :, start:end] = torch.bmm(d_scores, k[:, :length]).view(
                *grad.shape[:2], end - start, dim
            )
            d_k[:, :length] += torch.bmm(d_scores.mT, q[:, :, start:end].flatten(1, 2))
        return d_q.mul_(ctx.scale), d_k, d_v, None, None


_apply_attend = cast(Callable[..., torch.Tensor], _Attend.apply)


def keeps_scores(x: torch.Tensor) -> bool:
    """Return whether `attend` computes with scores of its own, in float32, for rows
    like these, unless they are too many.
    """
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor | None,
    *,
    max_scores: int = MAX_SCORES,
) -> torch.Tensor:
    """Attend queries [B, W, heads, D] to keys and values [B, T, groups, D]; return
    outputs [B, W, heads, D].

    Query w of row b is at `positions[b, w]`, or at w without `positions` (then W = T),
    and sees keys up to there. The heads of a group are adjacent.
    """
    batch, width, heads, dim = q.shape
    length, groups = k.shape[1], k.shape[2]
    visible = (
        None
        if positions is None
        else torch.arange(length, device=q.device) <= positions[:, :, None]
    )
    if not keeps_scores(q) or batch * heads * width * length > max_scores:
        out = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=None if visible is None else visible[:, None],
            is_causal=visible is None,
            enable_gqa=True,
        )
        return out.transpose(1, 2)
    # In bfloat16, the backward pass of torch's kernel takes several times as long.
    dtype, q, k, v = q.dtype, q.float(), k.float(), v.float()
    # The heads that share keys become further queries of one matrix product.
    q = torch.unflatten(q, 2, (groups, heads // groups)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    k, v = k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1)
    if visible is not None:
        visible = visible.float()[:, None].expand(-1, groups, -1, -1).flatten(0, 1)[:, None]
    with torch.autocast(q.device.type, enabled=False):
        out = _apply_attend(q, k, v, visible, dim**-0.5).to(dtype)
    return out.view(batch, groups, heads // groups, width, dim).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _blocks(
    q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor | None
) -> list[tuple[int, int, int]]:
    """Return queries `[start, end)` with the number of keys that any of them may
    see.
    """
    width, length = q.shape[2], k.shape[1]
    if visible is not None:
        return [(0, width, length)]
    size = max(MIN_BLOCK, -(-width // BLOCKS))
    return [
        (start, min(start + size, width), min(start + size, width))
        for start in range(0, width, size)
    ]


def _mask(
    scores: torch.Tensor, start: int, visible: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask of zeros and ones, and the part of the scores [G, R, W, T] that
    it applies to.
    """
    if visible is not None:
        return visible, scores
    size = scores.shape[2]
    return torch.ones(size, size).tril_(), scores[..., start:]


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

    rows, grid = mask.rows, mask.rows.grid
    if grid.cells is not None:
        every = grid.rows.index_select(0, grid.cells)
        q, k, v = (tensor.index_select(0, every) for tensor in (q, k, v))
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
    if grid.cells is None:
        return out
    return out.index_select(0, torch.searchsorted(grid.cells, grid.flat))
