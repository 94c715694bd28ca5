"""Health checks of servers, and gaps."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.core.policy.health import (
    DOWN_AFTER,
    UP_AFTER,
    Hysteresis,
    max_gap,
    wide_gaps,
)


@pytest.mark.parametrize(
    ("gap", "is_wide"), [(0.0, False), (1e-3, False), (2e-3, True), (math.nan, True)]
)
def test_a_gap_is_wide_beyond_rounding(gap: float, is_wide: bool) -> None:
    values = {"logprob_gap/e0": gap, "logprob_gap/e1": 0.0, "logprob_gap_mean": 5.0, "loss": 9.0}
    assert list(wide_gaps(values, max_gap("float32"))) == (["e0"] if is_wide else [])


def test_the_least_precise_format_counts() -> None:
    assert max_gap("float32", "bfloat16") == max_gap("bfloat16") > max_gap("float32")


@given(st.lists(st.booleans(), max_size=60))
def test_health_changes_only_after_checks_in_a_row(checks: list[bool]) -> None:
    health = Hysteresis()
    for at, good in enumerate(checks):
        before = health.healthy
        needed = UP_AFTER if good else DOWN_AFTER
        run = checks[max(0, at + 1 - needed) : at + 1]
        agreed = len(run) == needed and all(check is good for check in run)
        assert health.observe(good) is (good if agreed else before)
