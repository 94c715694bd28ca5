"""Compares a fused function with its plain definition."""

from collections.abc import Callable

import torch

Function = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


def assert_equal(
    fused: Function, plain: Function, *inputs: torch.Tensor, tolerance: float = 2e-5
) -> None:
    """Assert the same outputs and gradients for a random cotangent; `plain` runs in
    float64.
    """
    ours = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    theirs = [
        (tensor.double() if tensor.is_floating_point() else tensor)
        .clone()
        .requires_grad_(tensor.is_floating_point())
        for tensor in inputs
    ]
    found, wanted = fused(*ours), plain(*theirs)
    found = found if isinstance(found, tuple) else (found,)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    generator = torch.Generator().manual_seed(5)
    cotangents = [torch.randn(out.shape, generator=generator) for out in found]
    sum((out * c).sum() for out, c in zip(found, cotangents, strict=True)).backward()  # type: ignore[union-attr]
    sum((out * c.double()).sum() for out, c in zip(wanted, cotangents, strict=True)).backward()  # type: ignore[union-attr]
    for out, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
    for mine, their in zip(ours, theirs, strict=True):
        if mine.is_floating_point():
            assert mine.grad is not None
            assert their.grad is not None
            scale = float(their.grad.abs().max().clamp(min=1.0))
            torch.testing.assert_close(
                mine.grad.double() / scale, their.grad / scale, atol=tolerance, rtol=tolerance
            )


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
