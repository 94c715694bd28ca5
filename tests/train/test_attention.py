"""Attention equals its definition in float64, values and gradients, for all blocks,
positions and sizes of scores.
"""

import itertools
from types import SimpleNamespace
from typing import Any, cast

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rollweave.schema.errors import TrainerError
from rollweave.train import attention
from rollweave.train.packing import Example, Packed, pack
from tests.support.properties import examples
from tests.support.trainers import make_examples
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
            lambda *a, most=max_scores: attention.attend(*a, chosen, max_scores=most),
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
    assert torch.equal(
        attention.attend(q, k, v, None)[:, :32],
        attention.attend(q, changed_k, changed_v, None)[:, :32],
    )
    positions = torch.arange(40)[None]
    before, after = (
        attention.attend(q[:, :40], k, v, positions),
        attention.attend(q[:, :40], changed_k, changed_v, positions),
    )
    torch.testing.assert_close(before, after, atol=1e-6 * sharpness, rtol=1e-6)


SHORT, FULL = torch.float16, torch.float32
KERNELS = [
    (("cuda", torch.bfloat16, (256, 256), None, None, (8, 0)), True),
    (("cuda", SHORT, (8, 8), True, 4, (9, 0)), True),
    (("cuda", SHORT, (8, 8), True, None, (9, 0)), False),
    (("cuda", FULL, (8, 8), None, None, (9, 0)), False),
    (("cuda", SHORT, (8, 4), None, None, (9, 0)), False),
    (("cuda", SHORT, (257, 257), None, None, (9, 0)), False),
    (("cuda", SHORT, (8, 8), None, None, (7, 5)), False),
    (("cpu", SHORT, (8, 8), None, None, (9, 0)), False),
]


def test_bfloat16_is_computed_in_float32_on_a_cpu() -> None:
    """Values and gradients are those of the same numbers in float32, rounded once."""
    given = [randn(seed, 2, 9, heads, 8).bfloat16() for seed, heads in enumerate((4, 2, 2))]
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in given)
        out = attention.attend(q, k, v, None)
        out.float().square().sum().backward()
        results.append([x.detach().float() for x in (out, q.grad, k.grad, v.grad)])
    for short, whole in zip(*results, strict=True):
        torch.testing.assert_close(short, whole, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("case", "has"), KERNELS)
def test_what_the_kernel_of_gpus_supports(
    monkeypatch: pytest.MonkeyPatch, case: tuple[Any, ...], has: bool
) -> None:
    device, dtype, dims, visible, window, capability = case
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    q, v = (
        SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(3, 2, dim)) for dim in dims
    )
    mask: Any = SimpleNamespace(visible=visible, window=window)
    assert attention._has_varlen(cast(Any, q), cast(Any, v), mask) is has


@pytest.mark.parametrize("prompts", [0, 2])
def test_the_kernel_of_gpus_attends_to_sequences_in_a_row(
    monkeypatch: pytest.MonkeyPatch, prompts: int
) -> None:
    """Rows that sequences share are there once for each, as they are in the grid."""

    def kernel(q: Any, k: Any, v: Any, ends: Any, *rest: Any, scale: float, **_: Any) -> Any:
        del rest
        parts = itertools.pairwise(ends.tolist())
        return torch.cat(
            [
                attention.packed_attention(
                    torch.nn.Identity(),
                    *(x[start:end].transpose(0, 1)[None] for x in (q, k, v)),
                    attention.PackedMask(attention.Rows.of(alone(end - start)), None),
                    scaling=scale,
                )[0][0]
                for start, end in parts
            ]
        )

    def alone(length: int) -> Packed:
        return pack([Example(torch.arange(length + 1), torch.tensor([length]))])

    packed = pack(make_examples(6, prompts=prompts))
    assert (packed.keys.cells is not None) == bool(prompts)
    mask = attention.PackedMask(attention.Rows.of(packed), None)
    q, k, v = (randn(seed, 1, 2, len(packed.tokens), 4) for seed in range(3))
    expected, _ = attention.packed_attention(torch.nn.Identity(), q, k, v, mask)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    torch.testing.assert_close(attention._varlen(*rows, mask, 0.5), expected[0])


@pytest.mark.parametrize(
    ("mask", "options", "problem"),
    [
        (None, {}, "attends without a mask of transformers' mask interface"),
        (attention.PackedMask(Any, None), {"position_bias": 1}, "attends with position_bias"),  # type: ignore[arg-type]
        (attention.PackedMask(Any, None), {"dropout": 0.1}, "attends with dropout"),  # type: ignore[arg-type]
    ],
)
def test_attention_that_packing_lacks_is_refused(
    mask: object, options: dict[str, Any], problem: str
) -> None:
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(TrainerError, match=f"^Identity {problem}$"):
        attention.packed_attention(torch.nn.Identity(), x, x, x, mask, **options)


@pytest.mark.parametrize(
    ("width", "ends"), [(33, [32, 33]), (128, [32, 64, 96, 128]), (130, [33, 66, 99, 130])]
)
def test_blocks_of_queries(width: int, ends: list[int]) -> None:
    q = torch.zeros(1, 1, width, 2)
    assert attention._blocks(q, q[0], None) == [
        (start, end, end) for start, end in itertools.pairwise([0, *ends])
    ]
    assert attention._blocks(q, q[0, :, :5], torch.ones(1)) == [(0, width, 5)]
