"""RollArt's weight transfer between clusters, in a simulated run."""

import pytest

from rollweave_papers.rollart_parts import Stored, transfer, updates


@pytest.mark.slow
def test_engines_pull_while_they_generate_and_stop_for_the_swap_alone() -> None:
    """All 96 pull from one machine; at most eight of a machine swap at once."""
    measured = updates("8B", steps=3)
    push, pull = transfer("8B")
    assert measured.push_s == pytest.approx(push)
    assert measured.pull_s == pytest.approx(pull)
    swap = Stored("8B").swap_s(engines=8, tp=1)
    # a suspended engine first ends its running step
    assert swap <= measured.stopped_s < swap + 0.1
    assert measured.stopped_s < pull / 10
