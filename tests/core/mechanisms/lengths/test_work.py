"""Cost by work: a group takes as long as its simulated batch, and the search over it
finds the best contiguous partition.
"""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.core.mechanisms.costs.placement import (
    Problem,
    allocate_groups,
    in_order,
    place_groups,
)
from rollweave.core.mechanisms.lengths.work import ByWork, Rate, occupied, rate
from rollweave.schema.events import StepTime
from tests.support.properties import examples

RATES = st.builds(
    Rate,
    fixed_s=st.sampled_from([0.0, 0.5, 1.0]),
    sequence_s=st.sampled_from([0.0, 0.1, 0.3]),
    context_s=st.sampled_from([0.0, 0.01]),
    slots=st.integers(1, 4),
    kv_tokens=st.sampled_from([5, 50, 10_000]),
)
WORKS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 60)), min_size=1, max_size=7).map(
    lambda works: sorted(works, reverse=True)
)


def contiguous(total: int, workers: int) -> list[tuple[int, ...]]:
    """All ends of that many groups, empty ones among them."""
    return [
        (*cuts, total)
        for cuts in itertools.combinations_with_replacement(range(total + 1), workers - 1)
    ]


def slowest(groups: ByWork, degrees: tuple[int, ...], ends: tuple[int, ...]) -> float:
    spans = zip((0, *ends), ends, strict=False)
    return max(
        (
            groups.seconds(degree, a, b)
            for degree, (a, b) in zip(degrees, spans, strict=False)
            if b > a
        ),
        default=0.0,
    )


@settings(max_examples=examples(300))
@given(
    works=WORKS,
    fast=RATES,
    slow=RATES,
    workers=st.lists(st.sampled_from([1, 2]), min_size=1, max_size=3),
)
def test_no_contiguous_partition_is_better(
    works: list[tuple[int, int]], fast: Rate, slow: Rate, workers: list[int]
) -> None:
    groups = ByWork(works, {1: slow, 2: fast})
    workers = workers[: len(works)]
    placement = place_groups(groups, workers)
    orders = set(itertools.permutations(workers))
    least = min(
        slowest(groups, order, ends)
        for order in orders
        for ends in contiguous(len(works), len(workers))
    )
    assert placement.makespan_s == least
    spans = sorted(span for span in placement.spans if span[0] < span[1])
    assert [end for _, end in spans] == [*(start for start, _ in spans[1:]), len(works)]
    costs = [
        groups.seconds(degree, *span)
        for degree, span in zip(workers, placement.spans, strict=True)
        if span[0] < span[1]
    ]
    assert max(costs) <= least, "what is levelled is no slower"


@settings(max_examples=examples(100))
@given(
    works=WORKS.filter(lambda works: len(works) > 2), one=RATES, two=RATES, budget=st.integers(2, 4)
)
def test_no_fleet_is_better(
    works: list[tuple[int, int]], one: Rate, two: Rate, budget: int
) -> None:
    groups = ByWork(works, {1: one, 2: two})
    fleets = [
        fleet
        for size in range(1, budget + 1)
        for fleet in itertools.product((1, 2), repeat=size)
        if sum(fleet) == budget
    ]
    least = min(
        slowest(groups, fleet, ends)
        for fleet in fleets
        for ends in contiguous(len(works), len(fleet))
    )
    allocation = allocate_groups(groups, budget, (1, 2))
    assert allocation.makespan_s == least
    assert sum(allocation.degrees) == budget


@settings(max_examples=examples(200))
@given(works=WORKS, cost=RATES, start=st.integers(0, 6), bound=st.floats(0, 40))
def test_reach_is_the_last_end_within_the_bound(
    works: list[tuple[int, int]], cost: Rate, start: int, bound: float
) -> None:
    groups = ByWork(works, {1: cost})
    start = min(start, len(works) - 1)
    ends = [
        end for end in range(start + 1, len(works) + 1) if groups.seconds(1, start, end) <= bound
    ]
    end, beyond = groups.reach(1, start, bound)
    assert end == max(ends, default=start)
    assert beyond == (groups.seconds(1, start, end + 1) if end < len(works) else math.inf)


def simulated(tokens: list[int], cost: Rate) -> float:
    """Steps one by one, without contexts: as many of the longest as there are slots
    decode a token each.
    """
    left, seconds = sorted(tokens, reverse=True), 0.0
    while left:
        batch = left[: cost.slots]
        seconds += cost.fixed_s + cost.sequence_s * len(batch)
        left = sorted([*(n - 1 for n in batch if n > 1), *left[cost.slots :]], reverse=True)
    return seconds


@settings(max_examples=examples(100))
@given(tokens=st.lists(st.integers(1, 12), min_size=1, max_size=9), slots=st.integers(1, 5))
def test_a_group_takes_as_long_as_its_batch(tokens: list[int], slots: int) -> None:
    """With the longest left first, batches lack no members while somebody waits: the
    closed form is exact but for rounding.
    """
    cost = Rate(fixed_s=1.0, sequence_s=0.25, context_s=0.0, slots=slots, kv_tokens=10**9)
    closed = cost.seconds(longest=max(tokens), tokens=sum(tokens), occupied=0)
    assert closed <= simulated(tokens, cost) <= closed + 1.0


@given(works=WORKS, cost=RATES, data=st.data())
def test_a_groups_seconds_are_those_of_its_own_members(
    works: list[tuple[int, int]], cost: Rate, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(works) - 1))
    end = data.draw(st.integers(start + 1, len(works)))
    members = works[start:end]
    assert ByWork(works, {1: cost}).seconds(1, start, end) == cost.seconds(
        longest=members[0][0],
        tokens=sum(tokens for tokens, _ in members),
        occupied=sum(held for _, held in members),
    )


def test_leveling_keeps_the_makespan_and_leaves_no_worker_empty() -> None:
    one = Rate(fixed_s=1.0, sequence_s=0.0, context_s=0.0, slots=100, kv_tokens=10**9)
    problem = Problem(ByWork([(10, 0)] + [(1, 0)] * 9, {1: one}))
    path = problem.least(in_order([1, 1, 1]))
    assert path.ends == (10, 10, 10), "one worker could take all"
    level = problem.level(path)
    assert level.makespan_s == path.makespan_s
    assert all(start < end for start, end in level.spans)


@settings(max_examples=examples(100))
@given(
    fixed=st.floats(0.001, 10),
    sequence=st.floats(0, 1),
    context=st.floats(0, 0.01),
    contexts=st.sampled_from([(100, 4000), (64,)]),
)
def test_a_rate_reproduces_the_measurements(
    fixed: float, sequence: float, context: float, contexts: tuple[int, ...]
) -> None:
    points = [
        StepTime(
            batch=batch, context=tokens, seconds=fixed + sequence * batch + context * batch * tokens
        )
        for batch in (1, 4, 16, 64)
        for tokens in contexts
    ]
    fitted = rate(points, slots=8, kv_tokens=100)
    for point in points:
        again = (
            fitted.fixed_s
            + fitted.sequence_s * point.batch
            + fitted.context_s * point.batch * point.context
        )
        assert again == pytest.approx(point.seconds, rel=1e-4)
    assert min(fitted.fixed_s, fitted.sequence_s, fitted.context_s) >= 0


def test_noise_makes_no_negative_parts() -> None:
    fitted = rate(
        [StepTime(batch=1, seconds=2.0), StepTime(batch=8, seconds=1.0)], slots=1, kv_tokens=1
    )
    assert fitted.fixed_s > 0
    assert fitted.sequence_s == fitted.context_s == 0


def test_occupied_sums_a_growing_context() -> None:
    assert occupied(4, context=10, growth=2.0) == 4 * 10 + 2.0 * 4 * 4 / 2


@pytest.mark.parametrize(
    ("works", "text"),
    [
        ([], "at least one trajectory"),
        ([(0, 1)], r"works\[0\] must be at least one token"),
        ([(1, 0), (2, 0)], "works must descend"),
    ],
)
def test_works_that_cannot_be(works: list[tuple[int, int]], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ByWork(works, {})


@pytest.mark.parametrize(
    ("points", "slots", "text"),
    [
        ([], 1, "profile must have"),
        ([StepTime(batch=1, seconds=1.0)], 0, "slots and kv_tokens must be"),
    ],
)
def test_rates_that_cannot_be(points: list[StepTime], slots: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        rate(points, slots=slots, kv_tokens=1)
