"""A checkpoint is due often enough to lose little, and never so often that it costs
more than its share.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.core.policy.checkpoints import checkpoint_is_due

seconds = st.floats(0, 1e6)

COST_SHARE = 1 / 20
"""Restate the promise of the setting's description."""


@given(every_s=st.floats(0.001, 1e6), last_s=seconds, since_s=seconds)
def test_writing_keeps_its_share_and_waits_no_longer_than_necessary(
    every_s: float, last_s: float, since_s: float
) -> None:
    if checkpoint_is_due(since_s, every_s=every_s, last_s=last_s):
        assert since_s >= every_s
        assert last_s <= COST_SHARE * since_s * (1 + 1e-9)
    else:
        assert since_s < every_s or last_s > COST_SHARE * since_s * (1 - 1e-9)


@given(last_s=seconds, since_s=seconds)
def test_none_is_due_if_disabled(last_s: float, since_s: float) -> None:
    assert not checkpoint_is_due(since_s, every_s=0.0, last_s=last_s)


def test_a_checkpoint_may_be_due_several_times_a_second() -> None:
    assert checkpoint_is_due(0.5, every_s=0.5, last_s=0.025)
    assert not checkpoint_is_due(0.4, every_s=0.5, last_s=0.0)
    assert not checkpoint_is_due(0.5, every_s=0.5, last_s=0.026)


@pytest.mark.parametrize(
    "wrong", [{"every_s": -1.0, "last_s": 0.0}, {"every_s": 1.0, "last_s": -1.0}]
)
def test_negative_seconds(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be at least 0, got -1"):
        checkpoint_is_due(1.0, **wrong)
