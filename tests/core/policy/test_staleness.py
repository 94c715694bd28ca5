"""Staleness, the distance between two versions."""

from hypothesis import given
from hypothesis import strategies as st

from rollweave.core.policy.staleness import acceptable, staleness


@given(initiated=st.integers(0, 50), trained_at=st.integers(0, 50), window=st.integers(0, 5))
def test_staleness_is_the_distance_between_the_versions(
    initiated: int, trained_at: int, window: int
) -> None:
    assert acceptable(initiated, trained_at, window) == (staleness(initiated, trained_at) <= window)
    assert staleness(initiated, trained_at) == staleness(trained_at, initiated)
    assert acceptable(initiated, initiated, window)
