"""Allocation against every set of workers and every partition."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.papers.benchmarks.placement.whole_lists import allocate, place
from rollweave.core.mechanisms.costs.interference import CostTable
from tests.core.mechanisms.costs.tables import LENGTHS, best_of_all, check_allocation, tables
from tests.support.properties import examples

SHORT = st.lists(st.integers(1, 12), min_size=1, max_size=5)


def fleets(gpus: int, degrees: Sequence[int]) -> list[tuple[int, ...]]:
    """Every multiset of degrees whose sum is `gpus`."""
    return [
        some
        for count in range(1, gpus + 1)
        for some in itertools.combinations_with_replacement(sorted(degrees), count)
        if sum(some) == gpus
    ]


@settings(max_examples=examples(60))
@given(
    SHORT,
    st.integers(4, 5),
    st.sets(st.sampled_from([1, 2, 3, 4]), min_size=1),
    tables(degrees=(1, 2, 3, 4)),
)
def test_no_fleet_and_no_partition_is_faster(
    lengths: list[float], gpus: int, degrees: set[int], cost: CostTable
) -> None:
    possible = fleets(gpus, sorted(degrees))
    if not possible:
        with pytest.raises(ValueError, match="gpus must be a sum of degrees"):
            allocate(lengths, gpus, sorted(degrees), cost)
        return
    allocation = allocate(lengths, gpus, sorted(degrees), cost)
    assert allocation.placement.exact
    assert allocation.makespan_s == min(best_of_all(lengths, fleet, cost) for fleet in possible)
    check_allocation(allocation, lengths, gpus, cost)


@settings(max_examples=examples(100))
@given(
    st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=30), st.integers(4, 24), tables(largest=30)
)
def test_it_is_no_slower_than_any_fleet_placed_exactly(
    lengths: list[float], gpus: int, cost: CostTable
) -> None:
    allocation = allocate(lengths, gpus, (1, 2, 4), cost)
    check_allocation(allocation, lengths, gpus, cost)
    for degree in (1, 2, 4):
        if gpus % degree == 0 and gpus // degree <= len(lengths):
            assert (
                allocation.makespan_s
                <= place(lengths, [degree] * (gpus // degree), cost).makespan_s
            )
            one_degree = allocate(lengths, gpus, [degree], cost)
            assert (
                one_degree.makespan_s
                == place(lengths, [degree] * (gpus // degree), cost).makespan_s
            )
    if len(allocation.degrees) <= len(lengths):
        assert place(lengths, allocation.degrees, cost).makespan_s == allocation.makespan_s


@given(LENGTHS, tables(), st.integers(4, 12))
def test_more_gpus_or_fewer_trajectories_are_never_slower(
    lengths: list[float], cost: CostTable, gpus: int
) -> None:
    allocation = allocate(lengths, gpus, (1, 2, 4), cost)
    assert allocate(lengths, gpus + 1, (1, 2, 4), cost).makespan_s <= allocation.makespan_s
    if len(lengths) > 1:
        assert allocate(lengths[1:], gpus, (1, 2, 4), cost).makespan_s <= allocation.makespan_s


def test_degrees_whose_sums_have_gaps() -> None:
    """One GPU is no sum of 2 and 3, so that no worker starts after one, however much
    cheaper it would be.
    """
    cost = CostTable({2: [1.0, 1.0, 1.0, 1.0], 3: [50.0] * 4})
    allocation = allocate([4.0, 3.0, 2.0, 1.0], 7, (2, 3), cost)
    assert sorted(allocation.degrees) == [2, 2, 3]
    assert allocation.makespan_s == 4.0
    steep = CostTable({2: [1.0, 9.0, 9.0, 9.0], 3: [2.0, 9.0, 9.0, 9.0]})
    assert allocate([4.0, 3.0, 2.0, 1.0], 7, (2, 3), steep).makespan_s == min(
        best_of_all([4.0, 3.0, 2.0, 1.0], fleet, steep) for fleet in fleets(7, (2, 3))
    )


FLAT = CostTable({1: [1.0, 1.0], 3: [1.0, 1.0]})


@pytest.mark.parametrize(
    ("lengths", "gpus", "degrees", "words"),
    [
        ([1.0], 4, [], "degrees must be at least 1, and one or more"),
        ([1.0], 4, [0, 1], "degrees must be at least 1"),
        ([1.0], 2, [1, 3], "degrees must be at most gpus, 2, got 3"),
        ([1.0], 4, [3], r"gpus must be a sum of degrees \[3\], got 4"),
        ([1.0], 4, [2], r"degree must be one of the cost table's \[1, 3\], got 2"),
        ([0.0], 4, [1], "lengths must be finite and positive, got 0.0"),
        ([1.0] * 3, 4, [1], "cost must reach the group size 3"),
    ],
)
def test_what_cannot_be_allocated_is_refused(
    lengths: list[float], gpus: int, degrees: list[int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        allocate(lengths, gpus, degrees, FLAT)
