"""Capacity, spare groups and decisions about groups, each against its rule in plain
Python.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.policy.modes import acceptable
from rollweave.core.policy.redundancy import (
    GroupDecision,
    capacity,
    decide_group,
    learned_spare_groups,
    next_domain,
    pool_room,
    trained_at,
)
from tests.support.properties import examples


@settings(max_examples=examples(300))
@given(
    window=st.integers(0, 4),
    serving=st.integers(0, 8),
    following=st.integers(0, 8),
    batch=st.integers(1, 5),
    last=st.integers(1, 9),
)
def test_capacity_admits_exactly_the_groups_that_can_still_be_trained_in_time(
    window: int, serving: int, following: int, batch: int, last: int
) -> None:
    """The slow reference: walk through the batches ahead, group by group, until one
    would be too stale or too late.
    """
    slow = 0
    while acceptable(serving, following, window):
        trained_at = following + slow // batch
        if trained_at - serving > window or trained_at >= last:
            break
        slow += 1
    fast, spare = (
        capacity(
            window=window,
            serving_version=serving,
            next_version=following,
            open_version=following,
            groups_per_step=batch,
            spare_groups=groups,
            last_step=last,
        )
        for groups in (0, 2)
    )
    assert fast == slow
    assert spare == (fast + 2 if fast else 0)


@given(kept=st.integers(0, 40), filtered=st.integers(0, 400), batch=st.integers(1, 12))
def test_learned_spare_groups_are_the_fewest_that_fill_the_batch(
    kept: int, filtered: int, batch: int
) -> None:
    """The slow reference launches one group more until the share that is kept is
    enough.
    """
    slow = 0
    while kept and slow < 5 * batch and (batch + slow) * kept < batch * (kept + filtered):
        slow += 1
    learned = learned_spare_groups(kept=kept, filtered=filtered, groups_per_step=batch)
    assert learned == (slow if kept else min(5 * batch, filtered))


@settings(max_examples=examples(100))
@given(
    buffered=st.integers(0, 20),
    batch=st.integers(1, 5),
    taken=st.integers(0, 4),
    following=st.integers(0, 8),
)
def test_a_group_is_trained_on_with_the_batch_that_it_completes_or_begins(
    buffered: int, batch: int, taken: int, following: int
) -> None:
    """The slow reference: batches that are filled group by group, in their order."""
    taken = min(taken, batch - 1)
    batches = [[*range(taken)]]
    for group in range(buffered + 1):
        if len(batches[-1]) == batch:
            batches.append([])
        batches[-1].append(group)
    assert following + len(batches) - 1 == trained_at(
        buffered=buffered, taken=taken, next_version=following, groups_per_step=batch
    )


@settings(max_examples=examples(300))
@given(
    free_capacity=st.integers(0, 20),
    waiting=st.integers(0, 12),
    running=st.integers(0, 12),
    group_size=st.integers(1, 4),
    active=st.integers(0, 5),
    buffered=st.integers(0, 5),
    buffer_capacity=st.none() | st.integers(0, 20),
    next_version=st.integers(0, 5),
    groups_per_step=st.integers(1, 4),
    last_step=st.integers(1, 6),
)
def test_the_pool_is_filled_while_buffer_and_steps_have_room(
    buffer_capacity: int | None, **given: int
) -> None:
    """The slow reference: draw group by group."""
    size, places = given["group_size"], 1000 if buffer_capacity is None else buffer_capacity
    in_flight = -(-(given["waiting"] + given["running"]) // size)
    trained = (given["last_step"] - given["next_version"]) * given["groups_per_step"]
    slow = 0
    while (
        given["waiting"] + slow * size < given["free_capacity"]
        and given["buffered"] + in_flight + slow < places
        and given["active"] + given["buffered"] + slow < trained
    ):
        slow += 1
    assert pool_room(buffer_capacity=buffer_capacity, **given) == slow


@pytest.mark.parametrize(
    ("rewards", "pending", "dynamic", "expected"),
    [
        ([], 4, False, GroupDecision.WAIT),
        ([1.0, 0.0, 1.0], 1, False, GroupDecision.WAIT),
        ([1.0, 0.0, 1.0, 0.0], 3, False, GroupDecision.COMPLETE),
        ([1.0, 0.0], 0, False, GroupDecision.COMPLETE),
        ([1.0], 0, False, GroupDecision.INCOMPLETE),
        ([], 0, True, GroupDecision.INCOMPLETE),
        ([1.0] * 4, 0, True, GroupDecision.FILTERED),
        ([1.0] * 4, 0, False, GroupDecision.COMPLETE),
        ([1.0, 1.0, 1.0, 0.9], 0, True, GroupDecision.COMPLETE),
    ],
)
def test_decide_group(
    rewards: list[float], pending: int, dynamic: bool, expected: GroupDecision
) -> None:
    decision = decide_group(
        rewards, pending=pending, group_size=4, min_members=2, dynamic_sampling=dynamic
    )
    assert decision is expected


@given(weights=st.lists(st.floats(0.1, 5.0), min_size=1, max_size=4), count=st.integers(1, 200))
def test_each_domain_gets_its_share(weights: list[float], count: int) -> None:
    domains = [(f"d{index}", weight) for index, weight in enumerate(weights)]
    drawn: dict[str, int] = {}
    for _ in range(count):
        name = next_domain(domains, drawn)
        drawn[name] = drawn.get(name, 0) + 1
    for name, weight in domains:
        assert abs(drawn.get(name, 0) - count * weight / sum(weights)) < len(weights)


def test_a_domain_without_groups_lags_like_one_with_none() -> None:
    assert next_domain([("a", 1.0), ("b", 1.0)], {"b": 0}) == "a"
    assert next_domain([("a", 1.0), ("b", 1.0)], {"a": 1}) == "b"
    assert next_domain([("a", 1.0), ("b", 3.0)], {}) == "b"
