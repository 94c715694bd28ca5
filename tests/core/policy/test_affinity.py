"""The pool that serves a task domain, against its rule in plain Python."""

from hypothesis import given
from hypothesis import strategies as st

from rollweave.core.policy.affinity import next_pool, serving_pool

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


@given(shares=st.dictionaries(pools, st.floats(0.01, 1.0), min_size=1), count=st.integers(1, 60))
def test_trajectories_follow_the_shares_at_any_time(shares: dict[str, float], count: int) -> None:
    given_to: dict[str, int] = {}
    for number in range(1, count + 1):
        pool = next_pool(shares, given_to)
        given_to[pool] = given_to.get(pool, 0) + 1
        for name, share in shares.items():
            wanted = share / sum(shares.values()) * number
            assert given_to.get(name, 0) < wanted + 1
            assert given_to.get(name, 0) > wanted - len(shares)
