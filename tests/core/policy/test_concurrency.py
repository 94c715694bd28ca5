"""The cap on concurrent turns: the fewest with nearly all of the throughput."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.core.policy.concurrency import SATURATED, fewest_slots

SECONDS = st.lists(st.floats(0.001, 10.0), min_size=1, max_size=40)


@given(seconds=SECONDS)
def test_no_fewer_sequences_have_nearly_the_highest_throughput(seconds: list[float]) -> None:
    chosen = fewest_slots(lambda count: seconds[count - 1], most=len(seconds))
    rates = {count: count / seconds[count - 1] for count in range(1, len(seconds) + 1)}
    best = max(rates.values())
    assert rates[chosen] >= SATURATED * best
    assert all(rates[count] < SATURATED * best for count in range(1, chosen))


@pytest.mark.parametrize(
    ("fixed", "each", "expected"),
    [
        (19.0, 1.0, 160),  # 19/20 of the throughput of 400 sequences, 400 / 419
        (0.0, 1.0, 1),  # a step of compute alone gains nothing
        (1.0, 0.0, 380),  # one that only reads weights gains with each
    ],
)
def test_of_a_constant_and_a_price_for_each_sequence(
    fixed: float, each: float, expected: int
) -> None:
    assert fewest_slots(lambda count: fixed + each * count, most=400) == pytest.approx(
        expected, abs=40
    )
    if not each or not fixed:
        assert fewest_slots(lambda count: fixed + each * count, most=400) == expected


def test_there_is_one_turn_at_least() -> None:
    with pytest.raises(ValueError, match="most must be at least 1, got 0"):
        fewest_slots(lambda count: 1.0, most=0)
