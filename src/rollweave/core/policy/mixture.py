"""Choose the task domain of the next group: each domain gets its share, spread as
evenly as possible.
"""

from collections.abc import Mapping, Sequence


def next_domain(weights: Sequence[tuple[str, float]], drawn: Mapping[str, int]) -> str:
    """Return the domain that lags most behind its share of all groups drawn so far;
    ties go to the domain that is named first.
    """
    return min(weights, key=lambda item: (drawn.get(item[0], 0) + 1) / item[1])[0]
