"""Compares a fused function with its plain definition, and tensors by their names."""

from collections.abc import Callable, Mapping

import torch

Function = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


def assert_equal(
    fused: Function, plain: Function, *inputs: torch.Tensor, tolerance: float = 2e-5
) -> None:
    """Assert the same outputs and gradients for a random cotangent; `plain` runs in
    float64.
    """
    fused_inputs = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    plain_inputs = [
        (tensor.double() if tensor.is_floating_point() else tensor)
        .clone()
        .requires_grad_(tensor.is_floating_point())
        for tensor in inputs
    ]
    actual, expected = fused(*fused_inputs), plain(*plain_inputs)
    actual = actual if isinstance(actual, tuple) else (actual,)
    expected = expected if isinstance(expected, tuple) else (expected,)
    generator = torch.Generator().manual_seed(5)
    cotangents = [torch.randn(out.shape, generator=generator) for out in actual]
    sum((out * c).sum() for out, c in zip(actual, cotangents, strict=True)).backward()  # type: ignore[union-attr]
    sum((out * c.double()).sum() for out, c in zip(expected, cotangents, strict=True)).backward()  # type: ignore[union-attr]
    for out, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
    for fused_input, plain_input in zip(fused_inputs, plain_inputs, strict=True):
        if fused_input.is_floating_point():
            assert fused_input.grad is not None
            assert plain_input.grad is not None
            scale = float(plain_input.grad.abs().max().clamp(min=1.0))
            torch.testing.assert_close(
                fused_input.grad.double() / scale,
                plain_input.grad / scale,
                atol=tolerance,
                rtol=tolerance,
            )


def assert_all_close(
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    *,
    atol: float = 1e-4,
    rtol: float = 1e-3,
) -> None:
    """Assert the same names, and close values of each."""
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            tensors[name],
            tensor,
            atol=atol,
            rtol=rtol,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
