"""Heddle's own algorithms for placement and allocation, as baselines: the dynamic
program of eq. 3 and the simulated annealing of Alg. 2 (§6.2).
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from rollweave.core.mechanisms.costs.interference import CostTable
from rollweave.core.mechanisms.costs.placement import (
    Allocation,
    ByTable,
    Moves,
    Placement,
    Problem,
    by_budget,
    check_workers,
    in_order,
    to_allocation,
)

COOLING, COLDEST = 0.95, 1e-3
"""Factor of the temperature after each iteration, and the share of the first
temperature at which annealing ends. The paper's values are not in our copy; these make
135 iterations, as many as its placements of 0.037 s fit into its 5.0 s (Heddle Table
2).
"""

ROUNDING = 1e-9
"""Bound of the relative error of a quotient, where an inequality must hold for the
product.
"""

Transition = tuple[Counter[int], Counter[int]]
"""Degrees of the workers that are replaced, and of those that replace them, with the
same sum.
"""


def place_dp(
    lengths: Sequence[float],
    workers: Sequence[int],
    cost: CostTable,
    *,
    below: float = 0.0,
    chunk: int = 1,
) -> Placement:
    """Place by the paper's dynamic program (eq. 3), in O(n² workers): the baseline and
    the oracle of `place`.

    Workers take the list in descending degree (§6.2), so it is exact for equal degrees.
    Trajectories shorter than `below` tokens are aggregated into runs of `chunk`, which
    are not divided; `loss` bounds the resulting error. Raises ValueError as `place`
    does.
    """
    check_workers(len(lengths), workers)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    ordered = np.array(ByTable(lengths, cost).lengths)
    long = int(np.count_nonzero(ordered >= below))
    cuts = np.concatenate((np.arange(long), np.arange(long, len(ordered), chunk), [len(ordered)]))
    turn = sorted(range(len(workers)), key=lambda worker: -workers[worker])
    makespan_s, chosen = _dynamic_program(
        ordered[cuts[:-1]], cuts, [workers[worker] for worker in turn], cost
    )
    spans = [(0, 0)] * len(workers)
    end = len(cuts) - 1
    for column in range(len(workers) - 1, -1, -1):
        start = int(chosen[column, end])
        spans[turn[column]] = (int(cuts[start]), int(cuts[end]))
        end = start
    aggregated = chunk > 1 and long < len(ordered)
    loss = (
        max(_loss(ordered, long, chunk, makespan_s, cost.row(kind)) for kind in set(workers))
        if aggregated
        else 0.0
    )
    return Placement(
        spans=tuple(spans),
        makespan_s=makespan_s,
        exact=not aggregated and len(set(workers)) == 1,
        loss=loss,
    )


def _dynamic_program(
    heads: npt.NDArray[np.float64],
    cuts: npt.NDArray[np.intp],
    degrees: Sequence[int],
    cost: CostTable,
) -> tuple[float, npt.NDArray[np.intp]]:
    """Solve dp[j][i] = min over k of max(dp[j-1][k], heads[k] * seconds(cuts[i] -
    cuts[k])).

    Returns the last value and every chosen k. `heads` [m] are the lengths at the first
    m of `cuts` [m+1]. chosen[j][i] is where worker j starts if it ends at cut i, and i
    if it is empty. All workers of a column are computed together.
    """
    items = len(heads)
    rows = {degree: np.asarray(cost.row(degree)) for degree in degrees}
    blocks = {
        degree: slice(degrees.index(degree), degrees.index(degree) + degrees.count(degree))
        for degree in degrees
    }
    best = np.full((len(degrees) + 1, items + 1), np.inf)
    best[:, 0] = 0.0
    chosen = np.zeros((len(degrees), items + 1), dtype=np.intp)
    # one for all: allocating afresh would cost as much as computing
    room = np.empty(len(degrees) * items)
    for item in range(1, items + 1):
        sizes = cuts[item] - cuts[:item]
        column = best[:, item]
        for degree, block in blocks.items():
            workers = block.stop - block.start
            worst = room[: workers * item].reshape(workers, item)
            np.maximum(best[block, :item], heads[:item] * rows[degree][sizes - 1], out=worst)
            chosen[block, item] = worst.argmin(axis=1)
            column[block.start + 1 : block.stop + 1] = worst.min(axis=1)
        least = np.minimum.accumulate(column)
        chosen[least[:-1] <= column[1:], item] = item
        column[:] = least
    return float(best[-1, -1]), chosen


def _loss(
    ordered: npt.NDArray[np.float64], long: int, chunk: int, makespan_s: float, row: Sequence[float]
) -> float:
    """Bound by how much aggregating from position `long` on raises `makespan_s`, for
    workers of this row of the table.

    Move every cut of the best partition to the end of its run: a group that ends among
    the aggregated trajectories then gets at most `chunk` - 1 more members. Such a
    member costs `makespan_s` or more (or nothing is lost), for which a group that
    starts late must be large, and a large group's cost grows little.
    """
    seconds = np.asarray(row[: len(ordered)])
    more = np.minimum(np.arange(len(ordered)) + chunk - 1, len(ordered) - 1)
    # of groups of this size and larger
    dearer = np.maximum.accumulate((seconds[more] / seconds)[::-1])[::-1]
    starts = np.arange(long + 1)
    least = np.searchsorted(seconds[more], makespan_s * (1 - ROUNDING) / ordered[starts])
    sizes = np.maximum(least, long - starts)  # minus 1: to end among the aggregated
    return float(max(dearer[sizes[sizes < len(ordered)]], default=1.0)) - 1


def anneal(
    lengths: Sequence[float],
    gpus: int,
    degrees: Sequence[int],
    cost: CostTable,
    rng: np.random.Generator,
    *,
    placing: Callable[[Sequence[int]], Placement] | None = None,
) -> Allocation:
    """Allocate by the paper's sort-initialized simulated annealing (Alg. 2, of which
    our copy has the prose of §6.2 only).

    Workers start with random degrees and take the sorted list in descending degree.
    Each iteration redistributes, splits or merges. A faster allocation is always
    accepted, a slower one with probability exp(-difference / temperature). The
    temperature starts at the first makespan. `placing` places on workers in the order
    given; None means our fast search over that order. Raises as `allocate` does.
    """
    moves = by_budget(gpus, degrees)
    transitions = _transitions(sorted(set(degrees)))
    problem = Problem(ByTable(lengths, cost))
    placing = placing or (
        lambda workers: to_allocation(problem.least(in_order(workers)), exact=False).placement
    )
    now = _random_start(moves, rng)
    best = at = placing(now)
    fleet = now
    temperature = at.makespan_s
    coldest = COLDEST * temperature
    while temperature > coldest:
        proposed = _perturbed(now, transitions, rng)
        candidate = placing(proposed) if proposed != now else at
        more = candidate.makespan_s - at.makespan_s
        if more < 0 or rng.random() < math.exp(-more / temperature):
            now, at = proposed, candidate
        if at.makespan_s < best.makespan_s:
            best, fleet = at, now
        temperature *= COOLING
    return Allocation(degrees=tuple(fleet), placement=best)


def _random_start(moves: Moves, rng: np.random.Generator) -> list[int]:
    """Draw degrees one after another until all GPUs are used, and return them in
    descending order.
    """
    drawn: list[int] = []
    used = 0
    while moves[used]:
        degree, used = moves[used][int(rng.integers(len(moves[used])))]
        drawn.append(degree)
    return sorted(drawn, reverse=True)


def _transitions(kinds: Sequence[int]) -> list[list[Transition]]:
    """Return all transitions of each kind: redistribution, split, merge.

    Redistribution takes three workers, because the sum of two powers of two determines
    them.
    """
    transitions: list[list[Transition]] = []
    for takes, gives in ((3, 3), (1, 2), (2, 1)):
        sides = itertools.product(
            itertools.combinations_with_replacement(kinds, takes),
            itertools.combinations_with_replacement(kinds, gives),
        )
        transitions.append(
            [
                (Counter(removed), Counter(added))
                for removed, added in sides
                if removed != added and sum(removed) == sum(added)
            ]
        )
    return transitions


def _perturbed(
    now: list[int], transitions: list[list[Transition]], rng: np.random.Generator
) -> list[int]:
    """Apply a random transition of a random kind, among those possible for the workers
    of `now`. Returns `now` itself where there is none.
    """
    workers = Counter(now)
    possible = [
        some for kind in transitions if (some := [one for one in kind if one[0] <= workers])
    ]
    if not possible:
        return now
    kind = possible[int(rng.integers(len(possible)))]
    removed, added = kind[int(rng.integers(len(kind)))]
    return sorted((workers - removed + added).elements(), reverse=True)
