"""Bench `rewards`: whole runs with a slow reward, and one whose URL is killed."""

import pytest

from benchmarks.contract import PROMISES
from benchmarks.rewards.bench import KINDS, bench_rewards


@pytest.mark.slow
def test_no_reward_is_lost_with_its_server() -> None:
    result = bench_rewards(quick=True, progress=lambda _: None)
    assert (result.figures["lost_rewards"], result.broken) == (0, [])
    assert "lost_rewards" in PROMISES
    repeated = result.figures["repeated_calls"]
    assert isinstance(repeated, int)
    assert repeated > 0  # the server was killed with requests under way
    for kind in KINDS[1:]:
        assert isinstance(result.figures[f"overhead_ms_{kind}"], float)
