"""Placement against every partition there is, and against the paper's dynamic
program.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.papers.benchmarks.placement.whole_lists import by_length, place
from rollweave.core.mechanisms.costs.interference import CostTable
from rollweave.core.mechanisms.costs.placement import (
    EXACT_STATES,
    ORDERED_KINDS,
    ByTable,
    Placement,
    Problem,
    by_counts,
    by_degree,
    in_order,
)
from rollweave_papers.heddle_placement import place_dp
from tests.core.mechanisms.costs.tables import FLOATS, LENGTHS, best_of_all, check_placement, tables
from tests.support.properties import examples


@settings(max_examples=examples(150))
@given(LENGTHS, st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4), tables())
def test_no_partition_is_faster(lengths: list[float], workers: list[int], cost: CostTable) -> None:
    workers = workers[: len(lengths)]
    placement = place(lengths, workers, cost)
    assert placement.exact
    assert placement.makespan_s == best_of_all(lengths, workers, cost)
    check_placement(placement, lengths, workers, cost)


@settings(max_examples=examples(150))
@given(FLOATS, st.integers(1, 40), tables(degrees=(2,), largest=40))
def test_equal_workers_get_the_optimum_of_the_papers_program(
    lengths: list[float], count: int, cost: CostTable
) -> None:
    workers = [2] * min(count, len(lengths))
    placement, slow = place(lengths, workers, cost), place_dp(lengths, workers, cost)
    assert placement.makespan_s == slow.makespan_s
    assert placement.exact
    assert slow.exact
    check_placement(placement, lengths, workers, cost)
    check_placement(slow, lengths, workers, cost)


@settings(max_examples=examples(100))
@given(FLOATS, st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=8), tables(largest=40))
def test_equal_degrees_together_are_all_orders_of_degrees(
    lengths: list[float], workers: list[int], cost: CostTable
) -> None:
    problem = Problem(ByTable(lengths, cost))
    counts = {degree: workers.count(degree) for degree in sorted(set(workers))}
    orders = [
        [d for d in kinds for _ in range(counts[d])] for kinds in itertools.permutations(counts)
    ]
    least = problem.least(by_degree(counts))
    assert least.makespan_s == min(problem.least(in_order(order)).makespan_s for order in orders)
    assert list(least.degrees) in orders
    separately = problem.least(by_counts(counts), known=least)
    assert separately.makespan_s == problem.least(by_counts(counts)).makespan_s <= least.makespan_s
    assert sorted(separately.degrees) == sorted(workers)


def steps(start: float, counts: list[int]) -> list[float]:
    """Return numbers that rise from `start`, each by so many of the smallest steps
    there are.
    """
    return [start := start + count * math.ulp(start) for count in counts]


@settings(max_examples=examples(200))
@given(
    st.floats(1.0, 4.0),
    st.lists(st.integers(0, 3), min_size=2, max_size=10),
    st.floats(1.0, 4.0),
    st.lists(st.integers(0, 2), min_size=10, max_size=10),
    st.integers(1, 4),
)
def test_the_least_makespan_is_exact_to_the_bit(
    length: float, gaps: list[int], second: float, rises: list[int], count: int
) -> None:
    """All products are within a few roundings of each other, where quotients would
    mislead.
    """
    lengths, cost = steps(length, gaps), CostTable({2: steps(second, rises)})
    workers = [2] * min(count, len(lengths))
    placement = place(lengths, workers, cost)
    assert placement.makespan_s == place_dp(lengths, workers, cost).makespan_s
    check_placement(placement, lengths, workers, cost)
    problem = Problem(ByTable(lengths, cost))
    known = problem.least(in_order(workers))
    assert problem.least(in_order(workers), known=known) == known


@settings(max_examples=examples(100))
@given(
    st.floats(1.0, 4.0),
    st.lists(st.integers(0, 3), min_size=2, max_size=10),
    st.floats(1.0, 4.0),
    st.lists(st.integers(0, 2), min_size=10, max_size=10),
)
def test_a_worker_reaches_the_last_end_within_the_bound(
    length: float, gaps: list[int], second: float, rises: list[int]
) -> None:
    groups = ByTable(steps(length, gaps), CostTable({2: steps(second, rises)}))
    costs = [groups.seconds(2, 0, end) for end in range(1, groups.total + 1)]
    for bound in {near for cost in costs for near in (math.nextafter(cost, 0.0), cost)}:
        beyond = [cost for cost in costs if cost > bound]
        within = len(costs) - len(beyond)
        assert groups.reach(2, 0, bound) == (within, min(beyond, default=math.inf))


def test_a_fast_worker_of_many_need_not_come_first() -> None:
    """It takes four of the shorter ones within the time in which the slow one ends the
    longest.
    """
    cost = CostTable({1: [1.0, 5.0, 5.0, 5.0, 5.0], 2: [0.9, 1.1, 1.1, 1.1, 9.0]})
    placement = place([10.0, 9.0, 9.0, 9.0, 9.0], [2, 1], cost)
    assert placement.spans == ((1, 5), (0, 1))
    assert placement.makespan_s == 10.0
    assert place_dp([10.0, 9.0, 9.0, 9.0, 9.0], [2, 1], cost).makespan_s == 11.0


def test_slack_within_the_makespan_is_distributed() -> None:
    """One worker could take all within the makespan that the longest alone needs; then
    the others would have nothing.
    """
    flat = CostTable({1: [1.0] * 4, 2: [3.0] * 4})
    placement = place([1.0, 4.0, 2.0, 3.0], [2, 1, 1], flat)
    assert placement.makespan_s == 4.0
    assert sorted(placement.spans) == [(0, 1), (1, 3), (3, 4)]
    assert placement.spans[0] == (3, 4), "the slow worker has the shortest"
    assert by_length([1.0, 4.0, 1.0, 4.0]).tolist() == [1, 3, 0, 2]


def test_each_trajectory_alone_on_its_worker() -> None:
    steep = CostTable({1: [1.0, 10.0, 10.0]})
    assert place([3.0, 1.0, 2.0], [1, 1, 1], steep) == Placement(
        spans=((0, 1), (1, 2), (2, 3)), makespan_s=3.0, exact=True
    )
    assert place([3.0, 1.0, 2.0], [1], steep) == Placement(
        spans=((0, 3),), makespan_s=30.0, exact=True
    )


def test_beyond_the_limits_a_placement_is_not_marked_exact() -> None:
    row = [1.0 + 0.01 * size for size in range(600)]
    cost = CostTable(
        {degree: [second / (1 + 0.3 * degree) for second in row] for degree in range(1, 10)}
    )
    lengths = np.random.default_rng(0).lognormal(5.0, 1.0, size=600).tolist()
    many = [1] * 80 + [2] * 80
    assert EXACT_STATES < (80 + 1) ** 2
    placement = place(lengths, many, cost)
    assert not placement.exact
    check_placement(placement, lengths, many, cost)
    assert placement.makespan_s <= place_dp(lengths, many, cost).makespan_s
    just = [1] * 63 + [2] * 63
    assert EXACT_STATES == (63 + 1) ** 2
    assert place(lengths[:126], just, cost).exact
    assert not place(lengths[:127], [*just, 1], cost).exact
    kinds = list(range(1, ORDERED_KINDS + 2)) * 3
    placement = place(lengths, kinds, cost)
    assert not placement.exact
    assert placement.makespan_s == place_dp(lengths, kinds, cost).makespan_s
    check_placement(placement, lengths, kinds, cost)


FLAT = CostTable({1: [1.0, 1.0, 1.0]})


@pytest.mark.parametrize(
    ("lengths", "workers", "cost", "words"),
    [
        ([1.0, 0.0], [1], FLAT, "lengths must be finite and positive, got 0.0 at index 1"),
        ([1.0, -2.0], [1], FLAT, "lengths must be finite and positive, got -2.0 at index 1"),
        ([math.nan, 1.0], [1], FLAT, "lengths must be finite and positive, got nan"),
        ([math.inf, 1.0], [1], FLAT, "lengths must be finite and positive, got inf"),
        ([], [], FLAT, "workers must have at least one worker"),
        ([1.0], [1, 1], FLAT, "workers must be at most as many as the 1 trajectories, got 2"),
        ([1.0, 1.0], [1, 2], FLAT, r"degree must be one of the cost table's \[1\], got 2"),
        ([1.0] * 4, [1], FLAT, "cost must reach the group size 4 of all trajectories, got 3"),
    ],
)
@pytest.mark.parametrize("placing", [place, place_dp])
def test_what_cannot_be_placed_is_refused(
    placing: object, lengths: list[float], workers: list[int], cost: CostTable, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        placing(lengths, workers, cost)  # type: ignore[operator]


def test_products_must_be_finite() -> None:
    with pytest.raises(ValueError, match="finite products"):
        place([1e300, 1e-300], [1, 1], CostTable({1: [1e10, 1e10]}))
    with pytest.raises(ValueError, match="finite products"):
        place([1e300, 1e-300], [1, 2], CostTable({1: [1.0, 1.0], 2: [1e10, 1e10]}))


def test_the_widest_range_of_lengths_is_searched_to_its_end() -> None:
    placement = place([1e300, 1e-300, 5e-324], [1, 1], CostTable({1: [1.0, 2.0, 2.0]}))
    assert placement.makespan_s == 1e300
