"""Each fused function equals its plain definition in float64, values and gradients."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional

from rollweave.train.functions import linear, rms_norm, rotate, swiglu_linear, token_logprobs
from tests.support.properties import examples
from tests.train.compare import assert_equal, randn


@settings(max_examples=examples(25))
@given(
    rows=st.integers(1, 6),
    heads=st.integers(0, 3),
    size=st.sampled_from([2, 8, 16]),
    seed=st.integers(0, 9),
)
def test_rms_norm(rows: int, heads: int, size: int, seed: int) -> None:
    shape = (heads, size) if heads else (size,)

    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    assert_equal(
        lambda x, w: rms_norm(x, w, 1e-6), plain, randn(seed, rows, *shape), randn(seed + 1, *shape)
    )


@settings(max_examples=examples(20))
@given(rows=st.integers(1, 5), size=st.integers(1, 9), seed=st.integers(0, 9))
def test_swiglu_linear(rows: int, size: int, seed: int) -> None:
    def plain(gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.linear(functional.silu(gate) * up, weight)

    gate, up, weight = randn(seed, rows, size) * 4, randn(seed + 1, rows, size), randn(2, 3, size)
    assert_equal(swiglu_linear, plain, gate, up, weight)
    assert_equal(linear, functional.linear, up, weight)


def test_gradients_of_several_passes_add_up() -> None:
    gate, up, weight = randn(2, 5, 4), randn(3, 5, 4), randn(4, 3, 4)
    ours, plain = (torch.nn.Parameter(weight.clone()) for _ in range(2))
    for _ in range(3):
        (linear(gate, ours).sin() + swiglu_linear(gate, up, ours)).sum().backward()
        product = functional.silu(gate) * up
        (functional.linear(gate, plain).sin() + product @ plain.T).sum().backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, plain.grad)


def test_rotate() -> None:
    angle = randn(3, 1, 5, 4).double()
    turns = torch.complex(angle.cos(), angle.sin())

    def plain(x: torch.Tensor) -> torch.Tensor:
        even, odd = x.chunk(2, -1)
        turned = torch.stack(
            [even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1
        )
        return turned.flatten(-2)

    assert_equal(lambda x: rotate(x, turns.to(torch.complex64)), plain, randn(1, 2, 5, 8))


@settings(max_examples=examples(30))
@given(
    rows=st.integers(1, 6),
    size=st.integers(1, 12),
    spread=st.sampled_from([0.5, 5.0, 200.0]),
    seed=st.integers(0, 9),
)
def test_token_logprobs(rows: int, size: int, spread: float, seed: int) -> None:
    labels = torch.randint(size, (rows,), generator=torch.Generator().manual_seed(seed))

    def plain(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = logits.log_softmax(-1)
        return logprobs.gather(1, labels[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(-1)

    assert_equal(
        lambda logits: token_logprobs(logits, labels),
        plain,
        randn(seed, rows, size) * spread,
        tolerance=1e-4,
    )


def test_a_certain_policy_has_no_entropy_and_finite_gradients() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    chosen, entropy = token_logprobs(logits, torch.tensor([0]))
    (chosen + entropy).sum().backward()
    assert chosen.item() == 0
    assert entropy.item() == pytest.approx(0, abs=1e-20)
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
