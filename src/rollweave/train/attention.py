"""Causal grouped-query attention with gradients, for sequences side by side in a grid.

Invariants: a query sees exactly the keys at its own and earlier positions; nothing
depends on the padding behind a sequence. On a CPU, small heads are bound by the number
of passes over the scores, so these are minimized: future keys of whole blocks of
queries are never computed, the shift of the exponential is omitted if the scores are
known to be small, and a column of ones next to the values sums the weights in the same
matrix product.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

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
    """Return whether `attend` computes with scores of its own for rows like these,
    unless they are too many.
    """
    return x.device.type == "cpu" and x.dtype == torch.float32


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
    # The heads that share keys become further queries of one matrix product.
    q = torch.unflatten(q, 2, (groups, heads // groups)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    k, v = k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1)
    if visible is not None:
        visible = visible.float()[:, None].expand(-1, groups, -1, -1).flatten(0, 1)[:, None]
    out = _apply_attend(q, k, v, visible, dim**-0.5)
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
