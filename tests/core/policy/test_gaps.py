"""Engines are warned of if their gap is more than rounding."""

import math

import pytest

from rollweave.core.policy.gaps import max_gap, wide_gaps


@pytest.mark.parametrize(
    ("gap", "is_wide"), [(0.0, False), (1e-3, False), (2e-3, True), (math.nan, True)]
)
def test_a_gap_is_wide_beyond_rounding(gap: float, is_wide: bool) -> None:
    values = {"logprob_gap/e0": gap, "logprob_gap/e1": 0.0, "logprob_gap_mean": 5.0, "loss": 9.0}
    assert list(wide_gaps(values, max_gap("float32"))) == (["e0"] if is_wide else [])


def test_the_least_precise_format_counts() -> None:
    assert max_gap("float32", "bfloat16") == max_gap("bfloat16") > max_gap("float32")
