"""Attention equals its definition in float64, values and gradients, for all blocks,
positions and sizes of scores.
"""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rollweave.train.attention import attend
from tests.support.properties import examples
from tests.train.compare import assert_equal, randn


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Attend with one query head of one sequence at a time."""
    batch, width, heads, dim = q.shape
    shared = heads // k.shape[2]
    out = torch.empty_like(q)
    for row in range(batch):
        for head in range(heads):
            for query in range(width):
                seen = int(positions[row, query]) + 1
                keys, values = k[row, :seen, head // shared], v[row, :seen, head // shared]
                out[row, query, head] = (keys @ q[row, query, head] / dim**0.5).softmax(0) @ values
    return out


def rounding(sharpness: float) -> float:
    """Bound the rounding error: a weight is the exponential of a score, whose float32
    has a relative error, and scores grow with the square.
    """
    return 2e-5 * max(1.0, sharpness**2 / 16)


def assert_attends(
    width: int,
    length: int,
    heads: tuple[int, int],
    sharpness: float,
    seed: int,
    chosen: torch.Tensor | None,
    batch: int,
) -> None:
    """Compare with the definition, by own scores and by torch's kernels, for queries at
    `chosen` positions [B, W], or at all.
    """
    q = randn(seed, batch, width, heads[0], 4) * sharpness
    k = randn(seed + 1, batch, length, heads[1], 4) * sharpness
    v = randn(seed + 2, batch, length, heads[1], 4)
    positions = torch.arange(length).expand(batch, -1) if chosen is None else chosen
    for max_scores in (0, 1 << 20):
        assert_equal(
            lambda *a, most=max_scores: attend(*a, chosen, max_scores=most),
            lambda *a: plain(*a, positions),
            q,
            k,
            v,
            tolerance=rounding(sharpness),
        )


HEADS = st.sampled_from([(1, 1), (2, 1), (4, 2)])
SHARPNESS = st.sampled_from([0.1, 1.0, 12.0])


@settings(max_examples=examples(15))
@given(st.integers(1, 2), st.sampled_from([1, 3, 32, 33, 70]), HEADS, SHARPNESS, st.integers(0, 9))
def test_attends_from_every_position(
    batch: int, length: int, heads: tuple[int, int], sharpness: float, seed: int
) -> None:
    assert_attends(length, length, heads, sharpness, seed, None, batch)


@settings(max_examples=examples(40))
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 9), HEADS, SHARPNESS, st.integers(0, 9))
def test_attends_from_chosen_positions(
    batch: int, width: int, length: int, heads: tuple[int, int], sharpness: float, seed: int
) -> None:
    chosen = torch.randint(length, (batch, width), generator=torch.Generator().manual_seed(seed))
    assert_attends(width, length, heads, sharpness, seed, chosen, batch)


@pytest.mark.parametrize("sharpness", [1.0, 50.0])
def test_future_keys_have_no_effect(sharpness: float) -> None:
    q, k, v = (randn(seed, 1, 70, 2, 4) * sharpness for seed in range(3))
    changed_k, changed_v = k.clone(), v.clone()
    changed_k[:, 40:] *= -3
    changed_v[:, 40:] = 1e6
    assert torch.equal(attend(q, k, v, None)[:, :32], attend(q, changed_k, changed_v, None)[:, :32])
    positions = torch.arange(40)[None]
    before, after = (
        attend(q[:, :40], k, v, positions),
        attend(q[:, :40], changed_k, changed_v, positions),
    )
    torch.testing.assert_close(before, after, atol=1e-6 * sharpness, rtol=1e-6)
