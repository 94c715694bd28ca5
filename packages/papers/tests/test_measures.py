"""Measures of predictions against their sentences."""

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave_papers.measures import pearson, recall_of_longest
from tests.support.properties import examples


def slow_recall(
    predicted: Sequence[float], actual: Sequence[float], share: float, rng: random.Random
) -> float:
    """One order of equal numbers."""
    count = math.ceil(share * len(actual))
    longest = [
        set(sorted(range(len(values)), key=lambda index: (-values[index], rng.random()))[:count])
        for values in (predicted, actual)
    ]
    return len(longest[0] & longest[1]) / count


numbers = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12)


@settings(max_examples=examples(40))
@given(pairs=numbers, share=st.sampled_from([0.1, 0.3, 0.5, 1.0]))
def test_recall_averages_over_all_orders_of_equal_numbers(
    pairs: list[tuple[int, int]], share: float
) -> None:
    predicted, actual = ([float(value) for value in values] for values in zip(*pairs, strict=True))
    rng = random.Random(0)
    mean = sum(slow_recall(predicted, actual, share, rng) for _ in range(3000)) / 3000
    recall = recall_of_longest(predicted, actual, share)
    assert recall == pytest.approx(mean, abs=0.06)
    assert 0.0 <= recall <= 1.0 + 1e-12


def test_recall_does_not_depend_on_the_order_and_has_exact_extremes() -> None:
    actual = [float(value) for value in range(100)]
    assert recall_of_longest(actual, actual) == 1.0
    assert recall_of_longest(actual[::-1], actual) == 0.0
    assert recall_of_longest([1.0] * 100, actual) == pytest.approx(0.1)
    assert recall_of_longest([5.0], [3.0]) == 1.0


@given(
    values=st.lists(st.tuples(st.integers(-99, 99), st.integers(-99, 99)), min_size=2, max_size=20),
    scale=st.sampled_from([0.5, 3.0]),
)
def test_pearson_is_the_mean_product_of_standard_scores(
    values: list[tuple[int, int]], scale: float
) -> None:
    predicted, actual = ([float(value) for value in row] for row in zip(*values, strict=True))
    correlation = pearson(predicted, actual)
    if len(set(predicted)) == 1 or len(set(actual)) == 1:
        assert correlation == 0.0
        return
    scores = [(np.array(row) - np.mean(row)) / np.std(row) for row in (predicted, actual)]
    assert correlation == pytest.approx(float(np.mean(scores[0] * scores[1])))
    assert pearson([scale * value + 7 for value in predicted], actual) == pytest.approx(correlation)


@pytest.mark.parametrize("measure", [recall_of_longest, pearson])
@pytest.mark.parametrize(
    ("predicted", "actual", "error"),
    [
        ([], [], "at least 1"),
        ([1.0], [1.0, 2.0], "equally many"),
        ([1.0, math.nan], [1.0, 2.0], "predicted must be finite numbers, got nan"),
        ([1.0, 2.0], [math.inf, 2.0], "actual must be finite numbers, got inf"),
    ],
)
def test_measures_refuse_unequal_or_empty_sequences(
    measure: Callable[[list[float], list[float]], float],
    predicted: list[float],
    actual: list[float],
    error: str,
) -> None:
    with pytest.raises(ValueError, match=error):
        measure(predicted, actual)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1])
def test_a_share_is_above_0_and_at_most_1(share: float) -> None:
    with pytest.raises(ValueError, match=r"share must be in \(0, 1\]"):
        recall_of_longest([1.0], [1.0], share)
