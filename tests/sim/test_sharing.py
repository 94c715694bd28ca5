"""Processes that share cores: what one of them loses beside the others."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.sim.trial import slowdown
from tests.support.properties import examples

SHARES = st.lists(st.floats(0, 1), max_size=6)


@settings(max_examples=examples(100))
@given(others=SHARES, cores=st.integers(1, 8))
def test_a_slowdown_is_the_mean_over_everything_that_may_compute(
    others: list[float], cores: int
) -> None:
    slow = 0.0
    for computes in itertools.product((False, True), repeat=len(others)):
        chance = math.prod(
            share if busy else 1 - share for share, busy in zip(others, computes, strict=True)
        )
        slow += chance * max(1.0, (1 + sum(computes)) / cores)
    assert slowdown(others, cores) == pytest.approx(slow)


@settings(max_examples=examples(100))
@given(others=SHARES, more=st.floats(0, 1), cores=st.integers(1, 8))
def test_another_process_never_helps_and_another_core_never_hurts(
    others: list[float], more: float, cores: int
) -> None:
    assert slowdown([*others, more], cores) >= slowdown(others, cores) - 1e-9
    assert slowdown(others, cores + 1) <= slowdown(others, cores) + 1e-9
    assert slowdown(others, len(others) + 1) == pytest.approx(1.0)
