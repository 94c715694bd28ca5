"""Shares of pools: as good as a linear program's, which another library solves."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from rollweave.core.mechanisms.pools.shares import Seconds, assign, makespan
from tests.support.properties import examples

NEEDED = st.one_of(st.floats(0.01, 100.0), st.sampled_from([1.0, 2.0, 4.0]))
"""Equal values make the best shares ambiguous, and bases of the tableau degenerate."""

SECONDS = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d", "e"]),
    st.dictionaries(st.sampled_from(["p", "q", "r"]), NEEDED, min_size=1),
)


def least(seconds: Seconds) -> float:
    """The least makespan, by HiGHS."""
    cells = [(domain, pool) for domain in seconds for pool in seconds[domain]]
    pools = {pool for _, pool in cells}
    loads = [
        [seconds[domain][pool] if pool == of else 0.0 for domain, pool in cells] + [-1.0]
        for of in pools
    ]
    wholes = [[float(domain == of) for domain, _ in cells] + [0.0] for of in seconds]
    solution = linprog(
        [0.0] * len(cells) + [1.0],
        A_ub=loads,
        b_ub=[0.0] * len(pools),
        A_eq=wholes,
        b_eq=[1.0] * len(seconds),
    )
    return float(solution.fun)


@settings(max_examples=examples(150))
@given(seconds=SECONDS)
def test_no_shares_are_done_earlier(seconds: Seconds) -> None:
    assignment = assign(seconds)
    assert assignment.shares.keys() == seconds.keys()
    for domain, shares in assignment.shares.items():
        assert sum(shares.values()) == pytest.approx(1)
        assert min(shares.values()) > 0
        assert shares.keys() <= seconds[domain].keys()
    assert assignment.makespan_s == pytest.approx(makespan(seconds, assignment.shares))
    if seconds:
        assert assignment.makespan_s == pytest.approx(least(seconds), rel=1e-6)
        pools = {pool for by_pool in seconds.values() for pool in by_pool}
        divided = sum(len(shares) - 1 for shares in assignment.shares.values())
        assert divided <= len(pools) - 1


@settings(max_examples=examples(60))
@given(seconds=SECONDS)
def test_any_engine_is_as_late_as_the_mixture_that_all_pools_take(seconds: Seconds) -> None:
    """The level to which a mixture fills the pools, by bisection."""
    shares = {domain: {next(iter(seconds[domain])): 1.0} for domain in list(seconds)[::2]}
    loads = dict.fromkeys({pool for by_pool in seconds.values() for pool in by_pool}, 0.0)
    mixture: dict[str, float] = {}
    for domain, by_pool in seconds.items():
        for pool, needed in by_pool.items():
            if domain in shares:
                loads[pool] += needed * shares[domain].get(pool, 0.0)
            else:
                mixture[pool] = mixture.get(pool, 0.0) + needed
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        done = sum(max(0.0, middle - loads[pool]) / mixture[pool] for pool in mixture)
        low, high = (low, middle) if done >= 1 else (middle, high)
    expected = max(max(loads.values(), default=0.0), high if mixture else 0.0)
    assert makespan(seconds, shares) == pytest.approx(expected, rel=1e-6)


def test_what_a_busy_pool_does_not_take_is_divided_well_too() -> None:
    """A domain that only one pool may run determines the makespan; the others are not
    left where they happen to be in time.
    """
    seconds = {"only": {"p": 100.0}, "x": {"q": 30.0, "r": 1.0}, "y": {"q": 1.0, "r": 30.0}}
    assignment = assign(seconds)
    assert assignment.makespan_s == 100
    assert assignment.shares == {"only": {"p": 1.0}, "x": {"r": 1.0}, "y": {"q": 1.0}}


@pytest.mark.extended
def test_twelve_domains_on_four_pools() -> None:
    pools = ["p", "q", "r", "s"]
    seconds = {
        f"d{number}": {
            pool: 1.0 + (number * 7 + place * 5) % 11 for place, pool in enumerate(pools)
        }
        for number in range(12)
    }
    assert assign(seconds).makespan_s == pytest.approx(least(seconds), rel=1e-6)
    for number, pool in itertools.product(range(12), pools):
        moved = assign(seconds).shares | {f"d{number}": {pool: 1.0}}
        assert makespan(seconds, moved) >= assign(seconds).makespan_s - 1e-9


@pytest.mark.parametrize("by_pool", [{}, {"p": 0.0}, {"p": 1.0, "q": float("inf")}])
def test_refuses_a_domain_without_a_pool_or_with_impossible_work(
    by_pool: dict[str, float],
) -> None:
    with pytest.raises(ValueError, match="seconds must be positive, for one pool or more"):
        assign({"a": {"p": 1.0}, "b": by_pool})
