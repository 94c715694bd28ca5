"""Measures of predicted lengths (Heddle Fig. 13)."""

import math
from collections.abc import Sequence

import numpy as np

from rollweave.core.policy.predict import Lengths


def recall_of_longest(
    predicted: Sequence[float], actual: Sequence[float], share: float = 0.1
) -> float:
    """Return how much of the longest `share` of trajectories is also in the longest
    `share` by prediction, between 0 and 1 (Heddle Fig. 13).

    Ties are ordered at random, and the result is the expectation, so it does not depend
    on the order of the inputs. Raises ValueError.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], got {share}")
    guess, truth = _pair(predicted, actual)
    count = math.ceil(share * len(truth))
    return float(_among_longest(guess, count) @ _among_longest(truth, count)) / count


def pearson(predicted: Sequence[float], actual: Sequence[float]) -> float:
    """Return the correlation between prediction and truth, between -1 and 1; 0 if
    either is constant. Raises ValueError.
    """
    guess, truth = _pair(predicted, actual)
    if guess.min() == guess.max() or truth.min() == truth.max():
        return 0.0
    return float(np.corrcoef(guess, truth)[0, 1])


def _pair(predicted: Sequence[float], actual: Sequence[float]) -> tuple[Lengths, Lengths]:
    guess, truth = np.asarray(predicted, dtype=np.float64), np.asarray(actual, dtype=np.float64)
    if guess.ndim != 1 or guess.shape != truth.shape or not len(guess):
        raise ValueError(
            "predicted and actual must be equally many, at least 1, got shapes "
            f"{guess.shape} and {truth.shape}"
        )
    for name, values in (("predicted", guess), ("actual", truth)):
        if not np.isfinite(values).all():
            raise ValueError(
                f"{name} must be finite numbers, got {values[~np.isfinite(values)][0]}"
            )
    return guess, truth


def _among_longest(values: Lengths, count: int) -> Lengths:
    """Return the probability of each value to be among the `count` greatest, with ties
    ordered at random.
    """
    bound = np.sort(values)[len(values) - count]
    above, equal = values > bound, values == bound
    chances: Lengths = above + equal * ((count - above.sum()) / equal.sum())
    return chances
