"""The serving engines that are borrowed equal those of a slow reference: one by one,
the least used that is free. One that gave turns back rests for longer each time.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.core.policy.borrowing import must_return, rest_s, to_borrow
from rollweave.schema.events import Lender

LENDERS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.1, 0.25, 0.9]),
        st.sampled_from(["", "", "this", "other"]),
        st.booleans(),
        st.booleans(),
    ),
    max_size=8,
).map(
    lambda every: [
        Lender(name=f"s{number}", kv_use=use, lent_to=run, takes=takes, recalled=recalled)
        for number, (use, run, takes, recalled) in enumerate(every)
    ]
)
HELD = st.sets(st.sampled_from([f"s{number}" for number in range(10)]), max_size=4)


@given(lenders=LENDERS, held=HELD, most=st.integers(0, 6))
def test_the_least_used_free_lenders_are_borrowed(
    lenders: list[Lender], held: set[str], most: int
) -> None:
    chosen: list[str] = []
    while len(held) + len(chosen) < most:
        free = [
            lender
            for lender in lenders
            if lender.lent_to == ""
            and not lender.recalled
            and lender.name not in held
            and lender.name not in chosen
        ]
        if not free:
            break
        least = min(lender.kv_use for lender in free)
        chosen.append(min(lender.name for lender in free if lender.kv_use == least))
    assert to_borrow(lenders, held=held, most=most) == chosen


@given(lenders=LENDERS)
def test_an_engine_is_returned_if_it_is_recalled_or_lent_elsewhere(lenders: list[Lender]) -> None:
    for lender in lenders:
        reason = must_return(lender.name, lenders, run="this")
        assert bool(reason) == (lender.recalled or lender.lent_to == "other")
    assert must_return("unknown", lenders, run="this") == "", "its lease decides"


@given(times=st.integers(1, 10_000))
def test_each_rest_is_twice_as_long_as_the_one_before_up_to_a_minute(times: int) -> None:
    expected = 2.0
    for _ in range(min(times, 50) - 1):
        expected = min(60.0, 2 * expected)
    assert rest_s(times) == expected
    with pytest.raises(ValueError, match="times must be at least 1"):
        rest_s(0)
