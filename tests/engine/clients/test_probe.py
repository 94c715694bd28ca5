"""The conclusions of a probe from two lists of log-probs of the same tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.engine.clients.probe import EXACT, inexactness

REFERENCE = [-0.5, -1.25, -3.0, -0.01]


@given(noise=st.lists(st.floats(-0.9 * EXACT, 0.9 * EXACT), min_size=4, max_size=4))
def test_differences_between_implementations_are_accepted(noise: list[float]) -> None:
    assert (
        inexactness(
            [logprob + off for logprob, off in zip(REFERENCE, noise, strict=True)], REFERENCE
        )
        == ""
    )


def test_rounding_is_reported_with_the_flag_to_pass() -> None:
    objection_text = inexactness([REFERENCE[0], REFERENCE[1] - 0.03, *REFERENCE[2:]], REFERENCE)
    assert objection_text.startswith(
        "1 of 4 probed log-probs are off by more than 0.0001 (the largest by 0.03)"
    )
    assert "--dtype float32" in objection_text


def test_other_weights_are_distinguished_from_rounding() -> None:
    assert inexactness([logprob - 2.0 for logprob in REFERENCE], REFERENCE).endswith(
        "it has other weights than the checkpoint"
    )
    with pytest.raises(ValueError, match="argument 2 is"):
        inexactness([0.0], REFERENCE)
