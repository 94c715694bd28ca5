"""The pool that serves a task domain, against its rule in plain Python."""

from hypothesis import given
from hypothesis import strategies as st

from rollweave.core.policy.affinity import serving_pool

pools = st.sampled_from(["compute", "bandwidth", "old"])


@given(preferred=st.lists(pools, unique=True), live=st.sets(pools))
def test_the_first_live_pool_serves_and_any_engine_if_there_is_none(
    preferred: list[str], live: set[str]
) -> None:
    expected = None
    for pool in reversed(preferred):
        if pool in live:
            expected = pool
    assert serving_pool(preferred, live) == expected
