"""The paper's dynamic program for placement and its annealing over degrees, beside the
exact searches of the core.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.papers.benchmarks.placement.whole_lists import allocate, place
from rollweave.core.mechanisms.costs.interference import CostTable
from rollweave.core.mechanisms.costs.placement import (
    Allocation,
    ByTable,
    Placement,
    Problem,
    in_order,
)
from rollweave_papers.heddle_placement import anneal, place_dp
from tests.core.mechanisms.costs.tables import (
    FLOATS,
    LENGTHS,
    check_allocation,
    check_placement,
    tables,
)
from tests.support.properties import examples


@settings(max_examples=examples(100))
@given(FLOATS, st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=10), tables(largest=40))
def test_the_papers_program_takes_workers_in_descending_degree(
    lengths: list[float], workers: list[int], cost: CostTable
) -> None:
    workers = workers[: len(lengths)]
    slow = place_dp(lengths, workers, cost)
    assert (
        slow.makespan_s
        == Problem(ByTable(lengths, cost)).least(in_order(sorted(workers, reverse=True))).makespan_s
    )
    assert place(lengths, workers, cost).makespan_s <= slow.makespan_s
    assert slow.exact is (len(set(workers)) == 1)
    check_placement(slow, lengths, workers, cost)


@settings(max_examples=examples(150))
@given(
    FLOATS,
    st.lists(st.sampled_from([1, 2]), min_size=1, max_size=6),
    tables(degrees=(1, 2), largest=40),
    st.floats(0.0, 1.0),
    st.integers(1, 9),
)
def test_aggregating_loses_at_most_the_stated_loss(
    lengths: list[float], workers: list[int], cost: CostTable, share: float, chunk: int
) -> None:
    workers = workers[: len(lengths)]
    exact = place_dp(lengths, workers, cost)
    below = sorted(lengths)[int(share * (len(lengths) - 1))]
    placement = place_dp(lengths, workers, cost, below=below, chunk=chunk)
    check_placement(placement, lengths, workers, cost)
    assert (
        exact.makespan_s
        <= placement.makespan_s
        <= exact.makespan_s * (1 + placement.loss) * (1 + 1e-9)
    )
    if chunk == 1:
        assert placement == exact


def test_aggregating_states_its_loss() -> None:
    cost = CostTable({1: [1.0, 2.0, 3.0, 4.0]})
    placement = place_dp([5.0, 5.0, 5.0, 5.0], [1, 1], cost, below=6.0, chunk=3)
    assert (placement.makespan_s, placement.exact) == (15.0, False)
    assert 0.5 <= placement.loss <= 2.0
    assert place_dp([5.0, 5.0, 5.0, 5.0], [1, 1], cost).makespan_s == 10.0


@settings(max_examples=examples(60))
@given(LENGTHS, tables(), st.integers(4, 16), st.integers(0, 9))
def test_annealing_is_never_faster(
    lengths: list[float], cost: CostTable, gpus: int, seed: int
) -> None:
    allocation = anneal(lengths, gpus, (1, 2, 4), cost, np.random.default_rng(seed))
    assert allocation.makespan_s >= allocate(lengths, gpus, (1, 2, 4), cost).makespan_s
    assert list(allocation.degrees) == sorted(allocation.degrees, reverse=True)
    assert not allocation.placement.exact
    check_allocation(allocation, lengths, gpus, cost)


@pytest.mark.extended
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


FLAT = CostTable({1: [1.0, 1.0], 3: [1.0, 1.0]})


@pytest.mark.parametrize(
    ("lengths", "gpus", "degrees", "words"),
    [
        ([1.0], 4, [], "degrees must be at least 1, and one or more"),
        ([1.0], 2, [1, 3], "degrees must be at most gpus, 2, got 3"),
        ([1.0], 4, [2], r"degree must be one of the cost table's \[1, 3\], got 2"),
        ([0.0], 4, [1], "lengths must be finite and positive, got 0.0"),
        ([1.0] * 3, 4, [1], "cost must reach the group size 3"),
    ],
)
def test_what_cannot_be_annealed_is_refused(
    lengths: list[float], gpus: int, degrees: list[int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        anneal(lengths, gpus, degrees, FLAT, np.random.default_rng(0))


def test_chunks_are_positive() -> None:
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        place_dp([1.0], [1], FLAT, chunk=0)
