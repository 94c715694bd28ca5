"""A context's row: finite whatever the context says, the same for the same context, and
with the plan's words in it.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.core.policy.features import (
    DOMAINS,
    LOG_PROMPT,
    NUMBERS,
    OUTPUT,
    PLAN_BUCKETS,
    PLAN_TOKENS,
    SIBLING_MEAN,
    TURN,
    WIDTH,
    row,
)
from rollweave.schema.prediction import LengthContext

anything = st.floats(allow_nan=True, allow_infinity=True)
count = st.integers(0, 2**40)
contexts = st.builds(
    LengthContext,
    domain=st.text(max_size=3),
    prompt_tokens=count,
    turn=st.integers(0, 1000),
    output_tokens=count,
    last_output_tokens=count,
    observation_tokens=count,
    tool_s=anything,
    siblings=st.integers(0, 64),
    sibling_mean=anything,
    sibling_longest=count,
    reward=anything,
    plan=st.lists(st.integers(0, 2**32), max_size=300).map(tuple),
)


def context(**changes: object) -> LengthContext:
    values: dict[str, object] = {
        "domain": "a",
        "prompt_tokens": 100,
        "turn": 2,
        "output_tokens": 60,
        "last_output_tokens": 20,
        "observation_tokens": 7,
        "tool_s": 0.5,
        "siblings": 3,
        "sibling_mean": 90.0,
        "sibling_longest": 120,
    }
    return LengthContext(**{**values, **changes})  # type: ignore[arg-type]


@given(context=contexts, slot=st.none() | st.integers(0, DOMAINS - 1))
def test_a_row_is_finite_and_the_same_for_the_same_context(
    context: LengthContext, slot: int | None
) -> None:
    values = row(context, slot)
    assert values.shape == (WIDTH,)
    assert np.isfinite(values).all()
    assert (values == row(context, slot)).all()
    domains = values[NUMBERS : NUMBERS + DOMAINS]
    assert domains.tolist() == [float(index == slot) for index in range(DOMAINS)]


@given(plan=st.lists(st.integers(0, 200_000), max_size=2 * PLAN_TOKENS))
def test_a_plan_is_the_share_of_its_first_tokens_in_each_bucket(plan: list[int]) -> None:
    buckets = row(context(plan=tuple(plan)), 0)[NUMBERS + DOMAINS :]
    slow = [0.0] * PLAN_BUCKETS
    for token in plan[:PLAN_TOKENS]:
        slow[int((token * 2654435761) % 2**32 / 2**32 * PLAN_BUCKETS)] += 1 / min(
            len(plan), PLAN_TOKENS
        )
    assert buckets.tolist() == pytest.approx(slow, abs=1e-6)


def test_named_columns_have_their_values() -> None:
    values = row(context(), None)
    assert values[LOG_PROMPT] == pytest.approx(math.log(101))
    assert (values[TURN], values[OUTPUT], values[SIBLING_MEAN]) == (2, 60, 90)
    assert (values[NUMBERS:] == 0).all()


def test_numbers_are_lengths_differences_to_siblings_and_logarithms() -> None:
    """A trajectory of 2 turns and 60 tokens, whose siblings took 90 on average."""
    numbers = row(context(reward=0.25), None)[:NUMBERS].tolist()
    assert numbers[1:13] == pytest.approx(
        [2, 60, 90, 120, 30, 60, 20, 30, 30 / 3, 60 / 3, 0.25, 1.0], rel=1e-6
    )
    logarithms = [numbers[0], *numbers[13:]]
    values = [100, 2, 60, 20, 30, 7, 0.5, 3, 90, 120, 30, 60]
    assert [math.expm1(value) for value in logarithms] == pytest.approx(values, rel=1e-5)


def test_one_sibling_is_enough_to_tell() -> None:
    numbers = row(context(siblings=1), None)[:NUMBERS].tolist()
    assert (numbers[3], numbers[4], numbers[12]) == (90, 120, 1.0)


def test_a_trajectory_that_is_longer_than_its_siblings_leaves_nothing_of_theirs() -> None:
    numbers = row(context(output_tokens=200), None)[:NUMBERS].tolist()
    assert numbers[5:7] == numbers[22:24] == [0.0, 0.0]


def test_before_its_first_turn_a_trajectory_has_no_mean() -> None:
    numbers = row(context(turn=0, output_tokens=0, last_output_tokens=0), None)[:NUMBERS].tolist()
    assert [numbers[index] for index in (1, 2, 7, 8, 9, 10, 13, 14, 15, 16)] == [0.0] * 10


def test_siblings_count_once_one_has_ended() -> None:
    without_siblings = row(context(siblings=0, sibling_mean=0.0, sibling_longest=0), 1)
    assert (
        row(context(siblings=0, sibling_mean=33.0, sibling_longest=44), 1) == without_siblings
    ).all()


@pytest.mark.parametrize(
    "field",
    [name for name in LengthContext.__struct_fields__ if name not in ("domain", "siblings")],
)
def test_every_field_is_in_the_row(field: str) -> None:
    plan = {"plan": (1, 2, 3)} if field == "plan" else {field: 1}
    assert (row(context(), 0) != row(context(**plan), 0)).any()
