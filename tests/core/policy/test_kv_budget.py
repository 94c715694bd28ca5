"""The rollouts' budget of KV pages: walks against its rules, and the leases."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.core.policy.kv_budget import CUT, LEASE_S, Holding, KvBudget, Leases, victims


@given(st.integers(1, 500), st.lists(st.tuples(st.booleans(), st.integers(0, 500)), max_size=30))
def test_a_walk_keeps_the_rules(total: int, walk: list[tuple[bool, int]]) -> None:
    policy = KvBudget(total)
    headroom = math.ceil(0.2 * total)
    expected, frozen = 0, False
    for new_step, use in walk:
        serving = min(use, total)
        if new_step:
            expected, frozen = max(0, total - headroom - serving), False
            assert policy.begin_step(serving) == expected
        else:
            before = expected
            while expected and total - expected - serving < math.ceil(headroom / 2):
                expected, frozen = expected // CUT, True
            assert policy.observe(serving) == expected <= before
        assert policy.frozen is frozen
        assert 0 <= policy.budget <= total - headroom
        for held, more in itertools.product((0, total // 3), (1, total // 4 + 1)):
            if policy.fits(serving=serving, held=held, more=more):
                assert held + more <= policy.budget
                assert serving + held + more + headroom <= total


def test_a_burst_cuts_once_by_two_until_the_next_step() -> None:
    policy = KvBudget(100)
    assert policy.begin_step(recent_use=20) == 60
    assert policy.observe(30) == 60, "half of the headroom of 20 pages is left"
    assert policy.observe(31) == 30
    assert policy.observe(60) == 30, "the cut has made room"
    assert policy.frozen
    assert policy.cuts == 1
    assert policy.begin_step(recent_use=31) == 49
    assert policy.excess(held=60) == 11


def test_a_burst_of_all_pages_leaves_nothing_to_rollouts() -> None:
    policy = KvBudget(100)
    policy.begin_step(0)
    assert policy.observe(100) == 0
    assert policy.fits(serving=100, held=0, more=0)


HOLDINGS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 1.0])), max_size=7).map(
    lambda rows: [
        Holding(id=str(number), pages=pages, rank=rank, arrival=number)
        for number, (pages, rank) in enumerate(rows)
    ]
)


@given(HOLDINGS, st.integers(-1, 30))
def test_victims_return_enough_and_none_is_aborted_in_vain(
    holdings: list[Holding], excess: int
) -> None:
    chosen = victims(holdings, excess)
    by_id = {holding.id: holding for holding in holdings}
    freed = sum(by_id[id].pages for id in chosen)
    if excess <= 0:
        assert not chosen
        return
    assert freed >= min(excess, sum(holding.pages for holding in holdings))
    assert all(by_id[id].pages for id in chosen)
    if chosen:
        assert freed - by_id[chosen[-1]].pages < excess
    ranks = [(by_id[id].rank, -by_id[id].arrival) for id in chosen]
    assert ranks == sorted(ranks)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("rf"), st.floats(0, 4)), max_size=40))
def test_leases_end_ten_seconds_after_the_last_use(steps: list[tuple[int, str, float]]) -> None:
    leases: Leases[int] = Leases()
    used: dict[int, float] = {}
    now = 0.0
    for page, step, seconds in steps:
        now += seconds
        if step == "r":
            leases.renew(page, now)
            used[page] = now
        else:
            leases.forget(page)
            used.pop(page, None)
        over = [page for page, at in used.items() if now - at >= LEASE_S]
        assert sorted(leases.expired(now)) == sorted(over)
        assert len(leases) == len(used)
    oldest = leases.oldest(2)
    assert sorted(used[page] for page in oldest) == sorted(used.values())[:2]


@pytest.mark.parametrize("options", [{"total": 0}, {"total": 9, "headroom": 1.5}])
def test_wrong_amounts_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        KvBudget(**options)  # type: ignore[arg-type]
