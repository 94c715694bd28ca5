"""Which members are compared, what verdicts are worth, and how long a judge takes."""

import heapq
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.core.policy.comparison import OPPONENTS, longest_s, pairs, points, share_of_wins
from rollweave.schema.rollouts import SERVICE_CALLS


@pytest.mark.parametrize("count", range(2, 40))
def test_each_is_compared_with_all_or_with_a_fixed_number_of_others(count: int) -> None:
    compared = Counter(frozenset(pair) for pair in pairs(count))
    assert set(compared.values()) == {1}, "no pair is compared twice"
    assert all(len(pair) == 2 for pair in compared), "no member is compared with itself"
    opponents = Counter(member for pair in compared for member in pair)
    assert opponents == dict.fromkeys(range(count), min(count - 1, OPPONENTS))


def test_a_preference_for_a_place_cancels() -> None:
    assert points(1.0, 0.0) == points(0.0, 1.0) == 0.5
    assert (points(1.0, 1.0), points(0.0, 0.0), points(1.0, 0.5)) == (1.0, 0.0, 0.75)


@given(st.lists(st.none() | st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), max_size=12))
def test_a_failed_comparison_is_no_defeat(comparisons: list[float | None]) -> None:
    known = [one for one in comparisons if one is not None]
    share = share_of_wins(comparisons)
    if not known or len(comparisons) - len(known) > len(known):
        assert share is None
    else:
        assert share == pytest.approx(sum(known) / len(known))


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 10.0]), min_size=2, max_size=300))
def test_requests_in_their_order_take_no_longer(seconds: list[float]) -> None:
    del seconds[len(seconds) // 2 * 2 :]
    free = [0.0] * SERVICE_CALLS
    for taken in seconds:
        heapq.heappush(free, heapq.heappop(free) + taken)
    assert max(free) <= longest_s(len(seconds) // 2, 10.0)


def test_few_requests_have_the_time_of_one() -> None:
    assert [longest_s(count, 10.0) for count in (1, 32, 33, 64, 65)] == [10, 10, 20, 20, 30]
