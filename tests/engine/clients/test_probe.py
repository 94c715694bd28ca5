"""The conclusions of a probe from two lists of log-probs of the same tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.engine.clients.probe import EXACT, inexactness

OURS = [-0.5, -1.25, -3.0, -0.01]


@given(noise=st.lists(st.floats(-0.9 * EXACT, 0.9 * EXACT), min_size=4, max_size=4))
def test_differences_between_implementations_are_accepted(noise: list[float]) -> None:
    assert inexactness([ours + off for ours, off in zip(OURS, noise, strict=True)], OURS) == ""


def test_rounding_is_reported_with_the_flag_to_pass() -> None:
    said = inexactness([OURS[0], OURS[1] - 0.03, *OURS[2:]], OURS)
    assert said.startswith(
        "1 of 4 probed log-probs are off by more than 0.0001 (the largest by 0.03)"
    )
    assert "--dtype float32" in said


def test_other_weights_are_distinguished_from_rounding() -> None:
    assert inexactness([ours - 2.0 for ours in OURS], OURS).endswith(
        "it has other weights than the checkpoint"
    )
    with pytest.raises(ValueError, match="argument 2 is"):
        inexactness([0.0], OURS)
