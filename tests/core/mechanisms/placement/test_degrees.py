"""Allocation against every set of workers and every partition, and the paper's
annealing beside it.
"""

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.placement.whole_lists import allocate, by_length, place
from rollweave.core.mechanisms.costs.interference import CostTable
from rollweave.core.mechanisms.costs.placement import (
    Allocation,
    ByTable,
    Placement,
    Problem,
    in_order,
)
from rollweave_papers.heddle_placement import anneal, place_dp
from tests.core.mechanisms.costs.tables import LENGTHS, best_of_all, seconds, tables
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


def check(allocation: Allocation, lengths: Sequence[float], gpus: int, cost: CostTable) -> None:
    """All GPUs are used, the spans follow each other in the workers' order, and cost
    what is said.
    """
    assert sum(allocation.degrees) == gpus
    spans = allocation.placement.spans
    assert len(spans) == len(allocation.degrees)
    assert [start for start, _ in spans] + [len(lengths)] == [0] + [end for _, end in spans]
    ordered = [lengths[index] for index in by_length(lengths)]
    assert allocation.makespan_s == seconds(
        [ordered[start:end] for start, end in spans], allocation.degrees, cost
    )


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
    check(allocation, lengths, gpus, cost)


@settings(max_examples=examples(100))
@given(
    st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=30), st.integers(4, 24), tables(largest=30)
)
def test_it_is_no_slower_than_any_fleet_placed_exactly(
    lengths: list[float], gpus: int, cost: CostTable
) -> None:
    allocation = allocate(lengths, gpus, (1, 2, 4), cost)
    check(allocation, lengths, gpus, cost)
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


@settings(max_examples=examples(60))
@given(LENGTHS, tables(), st.integers(4, 16), st.integers(0, 9))
def test_annealing_is_never_faster(
    lengths: list[float], cost: CostTable, gpus: int, seed: int
) -> None:
    allocation = anneal(lengths, gpus, (1, 2, 4), cost, np.random.default_rng(seed))
    assert allocation.makespan_s >= allocate(lengths, gpus, (1, 2, 4), cost).makespan_s
    assert list(allocation.degrees) == sorted(allocation.degrees, reverse=True)
    assert not allocation.placement.exact
    check(allocation, lengths, gpus, cost)


def test_annealing_is_deterministic_and_near_the_optimum_of_its_order() -> None:
    """Long trajectories want high degrees: from any start annealing comes near, with
    the paper's program or ours inside.
    """
    row = [1.0 + 0.05 * size for size in range(60)]
    cost = CostTable({degree: [second / degree**0.8 for second in row] for degree in (1, 2, 4)})
    lengths = np.random.default_rng(0).lognormal(3.0, 1.0, size=60).tolist()
    least = allocate(lengths, 16, (1, 2, 4), cost).makespan_s
    for seed in range(5):
        allocation = anneal(lengths, 16, (1, 2, 4), cost, np.random.default_rng(seed))
        assert allocation == anneal(lengths, 16, (1, 2, 4), cost, np.random.default_rng(seed))
        assert least <= allocation.makespan_s <= 1.1 * least
        slow = anneal(
            lengths,
            16,
            (1, 2, 4),
            cost,
            np.random.default_rng(seed),
            placing=lambda fleet: place_dp(lengths, fleet, cost),
        )
        assert (slow.degrees, slow.makespan_s) == (allocation.degrees, allocation.makespan_s)


def watched(
    cost: CostTable, lengths: list[float], seed: int
) -> tuple[Allocation, list[tuple[tuple[int, ...], float]]]:
    """Annealing over 16 GPUs, and every fleet that it tried with its makespan."""
    problem = Problem(ByTable(lengths, cost))
    tried: list[tuple[tuple[int, ...], float]] = []

    def placing(fleet: Sequence[int]) -> Placement:
        path = problem.least(in_order(fleet))
        tried.append((path.degrees, path.makespan_s))
        return Placement(spans=path.spans, makespan_s=path.makespan_s, exact=False)

    return anneal(lengths, 16, (1, 2, 4), cost, np.random.default_rng(seed), placing=placing), tried


def test_annealing_returns_the_best_fleet_that_it_tried() -> None:
    """Where all fleets are nearly equal, it never settles, and the last is not the
    best.
    """
    lengths = [float(length) for length in range(100, 140)]
    cost = CostTable(
        {degree: [1 + 1e-5 * size / degree for size in range(1, 41)] for degree in (1, 2, 4)}
    )
    last = []
    for seed in range(5):
        allocation, tried = watched(cost, lengths, seed)
        assert allocation.makespan_s == min(makespan_s for _, makespan_s in tried)
        last.append(tried[-1][1] == allocation.makespan_s)
    assert not all(last)


def test_annealing_settles_as_it_cools() -> None:
    """Where fleets differ much, all that it tries in the end is one transition from
    what it gives, and in the beginning not.
    """
    lengths = np.random.default_rng(0).lognormal(3.0, 1.0, size=60).tolist()
    cost = CostTable(
        {degree: [(1.0 + size) / degree**1.5 for size in range(60)] for degree in (1, 2, 4)}
    )
    for seed in range(5):
        allocation, tried = watched(cost, lengths, seed)
        away = [(Counter(allocation.degrees) - Counter(fleet)).total() for fleet, _ in tried]
        assert max(away[-30:]) <= 3
        assert (
            max(away[:30]) > 3
            or max(len(fleet) for fleet, _ in tried[:30]) > len(allocation.degrees) + 3
        )


def test_a_start_is_never_left_where_there_is_one_fleet_only() -> None:
    cost = CostTable({2: [1.0, 2.0]})
    allocation = anneal([3.0, 1.0], 4, [2], cost, np.random.default_rng(0))
    assert (allocation.degrees, allocation.makespan_s) == ((2, 2), 3.0)


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
    with pytest.raises(ValueError, match=words):
        anneal(lengths, gpus, degrees, FLAT, np.random.default_rng(0))
