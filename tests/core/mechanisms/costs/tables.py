"""Cost tables and lengths for the tests of placement and allocation, and the obvious
search through all partitions.
"""

import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

from packages.papers.benchmarks.placement.whole_lists import by_length
from rollweave.core.mechanisms.costs.interference import CostTable
from rollweave.core.mechanisms.costs.placement import Allocation, Placement

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=6)
"""Few values, so that many are equal."""

FLOATS = st.lists(st.floats(1e-3, 1e5), min_size=1, max_size=40)


@st.composite
def tables(draw: st.DrawFn, degrees: Sequence[int] = (1, 2, 4), largest: int = 6) -> CostTable:
    """Rows that rise by 0 (plateaus), a little or a lot.

    A higher degree need not be faster.
    """
    rises = st.lists(
        st.sampled_from([0.0, 0.0, 0.1, 0.3, 1.0, 2.5]), min_size=largest, max_size=largest
    )
    return CostTable(
        {
            d: list(itertools.accumulate(draw(rises), initial=draw(st.floats(0.1, 3.0))))[1:]
            for d in degrees
        }
    )


def seconds(groups: Sequence[Sequence[float]], workers: Sequence[int], cost: CostTable) -> float:
    """Eq. 2 of these groups."""
    return max(
        max(group) * cost.at(degree, len(group))
        for group, degree in zip(groups, workers, strict=True)
        if group
    )


def best_of_all(lengths: Sequence[float], workers: Sequence[int], cost: CostTable) -> float:
    """The least makespan over every assignment of trajectories to workers, contiguous
    or not.
    """
    least = float("inf")
    for chosen in itertools.product(range(len(workers)), repeat=len(lengths)):
        groups: list[list[float]] = [[] for _ in workers]
        for length, worker in zip(lengths, chosen, strict=True):
            groups[worker].append(length)
        least = min(least, seconds(groups, workers, cost))
    return least


def check_placement(
    placement: Placement, lengths: Sequence[float], workers: Sequence[int], cost: CostTable
) -> None:
    """The spans are a partition of the sorted list, and have the stated cost."""
    assert len(placement.spans) == len(workers)
    positions = sorted(position for start, end in placement.spans for position in range(start, end))
    assert positions == list(range(len(lengths)))
    ordered = [lengths[index] for index in by_length(lengths)]
    assert placement.makespan_s == seconds(
        [ordered[start:end] for start, end in placement.spans], workers, cost
    )


def check_allocation(
    allocation: Allocation, lengths: Sequence[float], gpus: int, cost: CostTable
) -> None:
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
