"""Differentiable functions that need fewer passes over memory than their composition
from torch's operators.

On a CPU, a small model is bound by memory and operator count, not by arithmetic. Each
function is tested against its plain definition, including gradients.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

LOWEST_LOGIT = -60.0
"""Lower bound of logits relative to the greatest, in nats.

Exponentials below -87 are denormal: they, and operations on them, are 20 to 150 times
slower.
"""

BLOCK = 1 << 21
"""Number of logits of one temporary tensor."""


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = torch.linalg.vecdot(x, x, dim=-1).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        normal = x * scale
        ctx.save_for_backward(normal, scale, weight)
        out: torch.Tensor = normal * weight
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        normal, scale, weight = ctx.saved_tensors
        d_weight = (grad * normal).flatten(0, -1 - weight.dim()).sum(0)
        grad = grad * weight
        along = torch.linalg.vecdot(grad, normal, dim=-1).div_(-normal.shape[-1]).unsqueeze(-1)
        return torch.addcmul(grad, normal, along).mul_(scale), d_weight, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rotations)
        return _as_pairs(torch.complex(*x.chunk(2, -1)).mul_(rotations))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rotations,) = ctx.saved_tensors
        pairs = torch.view_as_complex(grad.contiguous().view(*grad.shape[:-1], -1, 2))
        turned = pairs * rotations.conj_physical()
        return torch.cat([turned.real, turned.imag], -1), None


def _as_pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x).flatten(-2)


class _Linear(torch.autograd.Function):
    """Multiplies x [N, H] by the weights [O, H] of a layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        d_weight = _d_weight(weight, grad, x) if needs_weight else None
        return torch.mm(grad, weight) if needs_x else None, d_weight


class _SwiGluLinear(torch.autograd.Function):
    """Multiplies silu(gate) · up [N, F], which the backward pass computes again, by the
    weights [O, F] of a layer.
    """

    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(gate, up, weight)
        return torch.mm(torch.nn.functional.silu(gate).mul_(up), weight.T)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        gate, up, weight = ctx.saved_tensors
        gated = torch.nn.functional.silu(gate)
        d_weight = _d_weight(weight, grad, gated * up) if ctx.needs_input_grad[2] else None
        d_product = torch.mm(grad, weight)
        d_up = gated.mul_(d_product)
        return torch.ops.aten.silu_backward(d_product.mul_(up), gate), d_up, d_weight


def _d_weight(weight: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a layer's weights, or None after adding it to the gradient
    of earlier passes, which needs no tensor in between.
    """
    if not weight.is_leaf or weight.grad is None:
        return torch.mm(grad.T, x)
    weight.grad.addmm_(grad.T, x)
    return None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = logits.gather(1, labels[:, None]).squeeze(1)
        top = logits.amax(-1, keepdim=True)
        logprobs = (logits - top).clamp_(min=LOWEST_LOGIT)  # of all tokens, up to log_total
        log_total, entropy = torch.empty_like(top), torch.empty_like(chosen)
        for rows in _blocks(logprobs):
            shares = logprobs[rows].exp()
            total = shares.sum(-1, keepdim=True)
            log_total[rows] = total.log()
            own = logprobs[rows].sub_(log_total[rows])
            entropy[rows] = torch.linalg.vecdot(shares.div_(total), own).neg_()
        ctx.save_for_backward(logprobs, entropy, labels)
        return chosen - top.squeeze(1) - log_total.squeeze(1), entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_chosen: torch.Tensor, d_entropy: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        logprobs, entropy, labels = ctx.saved_tensors
        # d entropy / d logit_i = -p_i (log p_i + H);  d chosen / d logit_i = [i =
        # label] - p_i
        slope = (d_entropy * entropy + d_chosen).unsqueeze(1)
        d_logits = torch.addcmul(slope, logprobs, d_entropy.unsqueeze(1))
        for rows in _blocks(logprobs):
            d_logits[rows].mul_(logprobs[rows].exp().neg_())
        return d_logits.scatter_add_(1, labels[:, None], d_chosen.unsqueeze(1)), None


def _blocks(logits: torch.Tensor) -> list[slice]:
    """Return slices of rows with about `BLOCK` logits each."""
    size = max(1, BLOCK // logits.shape[1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]


_apply_tokenlogprobs = cast(Callable[..., tuple[torch.Tensor, torch.Tensor]], _TokenLogprobs.apply)
_apply_rmsnorm = cast(Callable[..., torch.Tensor], _RmsNorm.apply)
_apply_rotate = cast(Callable[..., torch.Tensor], _Rotate.apply)
linear = cast(Callable[..., torch.Tensor], _Linear.apply)
swiglu_linear = cast(Callable[..., torch.Tensor], _SwiGluLinear.apply)


def token_logprobs(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-prob of `labels` [M] under `logits` [M, V] (float32), and the
    entropy, both [M].

    In the entropy, tokens with less than exp(-60) of the likeliest token's probability
    count as having this share, a difference that no float32 sum can show.
    """
    return _apply_tokenlogprobs(logits, labels)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide x [..., D] by its root mean square along the last axis, and multiply by
    weight: [D], or [heads, D] for x [..., heads, D].
    """
    return _apply_rmsnorm(x, weight, eps)


def rotate(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x[..., i], x[..., D / 2 + i]) as complex numbers by the
    constant `rotations` [..., D / 2], which is broadcast. The numbers of a pair stand
    side by side in the result; queries and keys in the same order have the same
    products.
    """
    return _apply_rotate(x, rotations)
