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
        return _as_pairs(torch.view_as_complex(x.view(*x.shape[:-1], -1, 2)) * rotations)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (rotations,) = ctx.saved_tensors
        pairs = torch.view_as_complex(grad.contiguous().view(*grad.shape[:-1], -1, 2))
        return _as_pairs(pairs * rotations.conj_physical()), None


def _as_pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x).flatten(-2)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.nn.functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        d_up = torch.nn.functional.silu(gate).mul_(grad)
        return torch.ops.aten.silu_backward(grad * up, gate), d_up


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = logits.gather(1, labels[:, None]).squeeze(1)
        top = logits.amax(-1, keepdim=True)
        shifted = (logits - top).clamp_(min=LOWEST_LOGIT)
        probabilities = shifted.exp()
        total = probabilities.sum(-1, keepdim=True)
        probabilities.div_(total)
        log_total = total.log_()
        shifted.sub_(log_total)  # log-probs of all tokens
        entropy = torch.linalg.vecdot(probabilities, shifted).neg_()
        ctx.save_for_backward(probabilities, shifted, entropy, labels)
        return chosen - top.squeeze(1) - log_total.squeeze(1), entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_chosen: torch.Tensor, d_entropy: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        probabilities, logprobs, entropy, labels = ctx.saved_tensors
        # d entropy / d logit_i = -p_i (log p_i + H);  d chosen / d logit_i = [i =
        # label] - p_i
        slope = (d_entropy * entropy + d_chosen).unsqueeze(1)
        d_logits = torch.addcmul(slope, logprobs, d_entropy.unsqueeze(1)).mul_(probabilities).neg_()
        return d_logits.scatter_add_(1, labels[:, None], d_chosen.unsqueeze(1)), None


_apply_tokenlogprobs = cast(Callable[..., tuple[torch.Tensor, torch.Tensor]], _TokenLogprobs.apply)
_apply_rmsnorm = cast(Callable[..., torch.Tensor], _RmsNorm.apply)
_apply_rotate = cast(Callable[..., torch.Tensor], _Rotate.apply)
_apply_swiglu = cast(Callable[..., torch.Tensor], _SwiGlu.apply)


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
    """Rotate the pairs (x[..., 2i], x[..., 2i + 1]) as complex numbers by the constant
    `rotations` [..., D / 2], which is broadcast.
    """
    return _apply_rotate(x, rotations)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) · up [..., F]."""
    return _apply_swiglu(gate, up)
