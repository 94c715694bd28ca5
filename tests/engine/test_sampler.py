"""The sampler agrees with its definition: distributions, truncation, masks, and
randomness that depends on seed and position alone.
"""

from typing import Any

import numpy as np
import pytest
import torch

from rollweave.engine.sampler import Draws, pack, sample, uniforms
from rollweave.schema.serving import Sampling

CPU = torch.device("cpu")
VOCAB = 12


def logits(rows: int, *, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def draw(
    source: torch.Tensor, positions: list[int], rows: list[Sampling]
) -> tuple[list[int], list[float]]:
    params = pack(rows, vocab=source.shape[1], device=CPU)
    return sample(source.clone(), positions, params)[:2]


def frequencies(row: torch.Tensor, count: int = 20_000, **settings: Any) -> torch.Tensor:
    rows = [Sampling(seed=i, **settings) for i in range(count)]
    tokens, _ = draw(row.expand(count, -1), [3] * count, rows)
    return torch.bincount(torch.tensor(tokens), minlength=len(row)) / count


def test_uniforms_are_uniform_and_uncorrelated_in_seed_and_position() -> None:
    numbers = uniforms(
        np.arange(300, dtype=np.uint64)[:, None], np.arange(300, dtype=np.uint64)[None, :]
    )
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.005
    assert len(np.unique(numbers)) == numbers.size
    bins, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert abs(bins / numbers.size - 0.05).max() < 0.004
    for other in (
        numbers[1:, :] * numbers[:-1, :],
        numbers[:, 1:] * numbers[:, :-1],
        numbers * numbers.T,
    ):
        assert abs(other.mean() - 0.25) < 0.01


def test_draws_ahead_are_those_of_each_position_alone() -> None:
    seeds = np.array([5, 6, 2**63], dtype=np.uint64)
    ahead = Draws(seeds, device=CPU)
    for positions in ([4, 9, 0], [5, 10, 1], [6, 11, 2], [6, 12, 2], [60, 70, 80], [3, 8, 1]):
        separately = uniforms(seeds, np.array(positions, dtype=np.uint64))
        assert ahead.at(positions)[:, 0].tolist() == pytest.approx(separately, abs=1e-7)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_distribution(temperature: float) -> None:
    row = logits(1)[0]
    expected = torch.softmax(row / temperature, dim=-1)
    assert (frequencies(row, temperature=temperature) - expected).abs().max() < 0.015


def test_top_k_and_top_p_keep_the_smallest_set_and_renormalise() -> None:
    row = torch.log(torch.tensor([0.05, 0.4, 0.3, 0.15, 0.1]))
    assert frequencies(row, top_k=2).tolist() == pytest.approx([0, 4 / 7, 3 / 7, 0, 0], abs=0.015)
    assert frequencies(row, top_p=0.75).tolist() == pytest.approx(
        [0, 40 / 85, 30 / 85, 15 / 85, 0], abs=0.015
    )
    assert frequencies(row, top_p=0.01).tolist() == [0, 1, 0, 0, 0]
    # top-k first: of the two that are left, 0.4 / 0.7 alone reaches 0.5.
    assert frequencies(row, top_k=2, top_p=0.5).tolist() == [0, 1, 0, 0, 0]


def test_logprobs_are_of_the_uncut_distribution_at_the_temperature() -> None:
    source = logits(4)
    rows = [
        Sampling(temperature=0.0),
        Sampling(temperature=0.7, top_k=2),
        Sampling(temperature=1.5, top_p=0.3),
        Sampling(temperature=1.0, allowed=(3, 4)),
    ]
    tokens, logprobs = draw(source, [1, 2, 3, 4], rows)
    for row, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        expected = torch.log_softmax(source[row] / (rows[row].temperature or 1.0), dim=-1)[token]
        assert logprob == pytest.approx(expected.item(), abs=1e-6)
    assert tokens[0] == source[0].argmax()
    assert tokens[3] in (3, 4)


def test_a_row_s_token_depends_on_nothing_but_its_seed_and_position() -> None:
    source = logits(40, vocab=50)
    rows = [
        Sampling(
            seed=i,
            temperature=(0.0, 1.0, 0.6)[i % 3],
            top_k=(0, 5)[i % 2],
            allowed=(1, 2, 30) if i % 7 == 0 else (),
        )
        for i in range(40)
    ]
    positions = [100 + 3 * i for i in range(40)]
    together, _ = draw(source, positions, rows)
    separately = [
        draw(source[i : i + 1], positions[i : i + 1], rows[i : i + 1])[0][0] for i in range(40)
    ]
    assert together == separately


def test_a_masked_row_never_leaves_its_mask_even_if_that_is_improbable() -> None:
    source = torch.zeros(200, VOCAB)
    source[:, 5] = 60.0
    rows = [Sampling(seed=i, allowed=(2, 9)) for i in range(200)]
    tokens, logprobs = draw(source, [7] * 200, rows)
    assert set(tokens) == {2, 9}
    assert max(logprobs) < -50


def test_nonfinite_row_is_marked_and_affects_no_other() -> None:
    source = logits(3)
    clean, _ = draw(source, [1, 1, 1], [Sampling(seed=i) for i in range(3)])
    source[1, 4] = float("nan")
    tokens, logprobs = draw(source, [1, 1, 1], [Sampling(seed=i) for i in range(3)])
    assert np.isnan(logprobs[1])
    assert 0 <= tokens[1] < VOCAB
    assert (tokens[0], tokens[2]) == (clean[0], clean[2])
