"""Which members are compared, and what their verdicts are worth."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.core.policy.comparison import OPPONENTS, pairs, points, share_of_wins


@pytest.mark.parametrize("count", range(2, 40))
def test_everyone_meets_everyone_or_a_fixed_number_of_others(count: int) -> None:
    met = Counter(frozenset(pair) for pair in pairs(count))
    assert set(met.values()) == {1}, "no pair meets twice"
    assert all(len(pair) == 2 for pair in met), "nobody meets itself"
    opponents = Counter(member for pair in met for member in pair)
    assert opponents == dict.fromkeys(range(count), min(count - 1, OPPONENTS))


def test_a_preference_for_a_place_cancels() -> None:
    assert points(1.0, 0.0) == points(0.0, 1.0) == 0.5
    assert (points(1.0, 1.0), points(0.0, 0.0), points(1.0, 0.5)) == (1.0, 0.0, 0.75)


@given(st.lists(st.none() | st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), max_size=12))
def test_a_failed_comparison_is_no_defeat(meetings: list[float | None]) -> None:
    known = [one for one in meetings if one is not None]
    share = share_of_wins(meetings)
    if not known or len(meetings) - len(known) > len(known):
        assert share is None
    else:
        assert share == pytest.approx(sum(known) / len(known))
