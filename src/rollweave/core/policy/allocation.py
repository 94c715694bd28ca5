"""How many GPUs each worker gets (Heddle §6): the degrees of all workers together with
the placement, of least makespan.

The paper anneals over degrees with a placement inside. Under its own cost model the
joint problem has an exact answer that costs no more than one placement: let reach[g] be
how far `g` GPUs get along the sorted list within a makespan, then reach[g] = max over d
of extend_d(reach[g - d]), because a worker never reaches less far from a later start
(`core/policy/placement`, whose search this is). `anneal` is the paper's way, to compare
with.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from rollweave.core.policy.interference import CostTable
from rollweave.core.policy.placement import (
    ByTable,
    Groups,
    Moves,
    Path,
    Placement,
    Problem,
    in_order,
)
from rollweave.schema.base import Struct

COOLING, COLDEST = 0.95, 1e-3
"""Of the temperature: kept after each iteration, and the share of the first one at
which annealing ends. The paper's values are not in our copy; these make 135 iterations,
as many as its placements of 0.037 s fit into its 5.0 s (Heddle Table 2).
"""

Transition = tuple[Counter[int], Counter[int]]
"""Workers of these degrees become workers of those, of the same sum."""


class Allocation(Struct, frozen=True, kw_only=True):
    """`degrees` of the workers, in their order along the list sorted by length, and
    what each of them runs.
    """

    degrees: tuple[int, ...]
    placement: Placement

    @property
    def makespan_s(self) -> float:
        return self.placement.makespan_s


def allocate(
    lengths: Sequence[float], gpus: int, degrees: Sequence[int], cost: CostTable
) -> Allocation:
    """The workers of `degrees` that use all `gpus`, and their placement, of least
    makespan under eq. 2; exact in both.

    `lengths` are tokens in any order. A worker may stay empty. Raises ValueError for
    lengths that are not finite and positive, a degree that `cost` lacks or that exceeds
    `gpus`, degrees of which no sum is `gpus`, and a table shorter than the list.
    """
    return allocate_groups(ByTable(lengths, cost), gpus, degrees)


def allocate_groups(groups: Groups, gpus: int, degrees: Sequence[int]) -> Allocation:
    """As `allocate`, for any cost; exact among partitions into contiguous groups."""
    problem = Problem(groups)
    return _allocation(problem.level(problem.least(by_budget(gpus, degrees))), exact=True)


def by_budget(gpus: int, degrees: Sequence[int]) -> Moves:
    """Workers of any degrees in any order along the list: how many GPUs are used.

    Raises ValueError as `allocate` does.
    """
    kinds = sorted(set(degrees), reverse=True)
    if not kinds or kinds[-1] < 1:
        raise ValueError(f"degrees must be at least 1, and one or more, got {list(degrees)}")
    if kinds[0] > gpus:
        raise ValueError(f"degrees must be at most gpus, {gpus}, got {kinds[0]}")
    sums = _sums(gpus, kinds)
    if gpus not in sums:
        raise ValueError(f"gpus must be a sum of degrees {kinds}, got {gpus}")
    return [
        [
            (degree, used + degree)
            for degree in kinds
            if used in sums and gpus - used - degree in sums
        ]
        for used in range(gpus + 1)
    ]


def is_sum(gpus: int, degrees: Sequence[int]) -> bool:
    """Whether workers of these degrees can use up all `gpus`."""
    return gpus in _sums(gpus, degrees)


def _sums(gpus: int, degrees: Sequence[int]) -> set[int]:
    """Numbers of GPUs, at most `gpus`, that some workers use up."""
    sums = {0}
    for number in range(1, gpus + 1):
        if any(number - degree in sums for degree in degrees):
            sums.add(number)
    return sums


def _allocation(path: Path, *, exact: bool) -> Allocation:
    return Allocation(
        degrees=path.degrees,
        placement=Placement(spans=path.spans, makespan_s=path.makespan_s, exact=exact),
    )


def anneal(
    lengths: Sequence[float],
    gpus: int,
    degrees: Sequence[int],
    cost: CostTable,
    rng: np.random.Generator,
    *,
    placing: Callable[[Sequence[int]], Placement] | None = None,
) -> Allocation:
    """The paper's sort-initialised simulated annealing (Alg. 2, of which our copy has
    the prose of §6.2 only).

    Workers start with random degrees and take the sorted list in descending degree.
    Each iteration redistributes, splits or merges; a faster allocation is always taken,
    a slower one with probability exp(-more / temperature); the temperature starts at
    the first makespan. `placing` places on workers in the order given: our fast search
    over that order where None. Errors as `allocate`.
    """
    moves = by_budget(gpus, degrees)
    transitions = _transitions(sorted(set(degrees)))
    problem = Problem(ByTable(lengths, cost))
    placing = placing or (
        lambda workers: _allocation(problem.least(in_order(workers)), exact=False).placement
    )
    now = _random_start(moves, rng)
    best = at = placing(now)
    fleet = now
    temperature = at.makespan_s
    coldest = COLDEST * temperature
    while temperature > coldest:
        proposed = _perturbed(now, transitions, rng)
        found = placing(proposed) if proposed != now else at
        more = found.makespan_s - at.makespan_s
        if more < 0 or rng.random() < math.exp(-more / temperature):
            now, at = proposed, found
        if at.makespan_s < best.makespan_s:
            best, fleet = at, now
        temperature *= COOLING
    return Allocation(degrees=tuple(fleet), placement=best)


def _random_start(moves: Moves, rng: np.random.Generator) -> list[int]:
    """Degrees drawn one after another until all GPUs are used, in descending order."""
    drawn: list[int] = []
    used = 0
    while moves[used]:
        degree, used = moves[used][int(rng.integers(len(moves[used])))]
        drawn.append(degree)
    return sorted(drawn, reverse=True)


def _transitions(kinds: Sequence[int]) -> list[list[Transition]]:
    """All there are of each sort: redistribution, split, merge.

    Three workers redistribute their GPUs, because two powers of two have a sum of their
    own.
    """
    found: list[list[Transition]] = []
    for takes, gives in ((3, 3), (1, 2), (2, 1)):
        sides = itertools.product(
            itertools.combinations_with_replacement(kinds, takes),
            itertools.combinations_with_replacement(kinds, gives),
        )
        found.append(
            [
                (Counter(taken), Counter(given))
                for taken, given in sides
                if taken != given and sum(taken) == sum(given)
            ]
        )
    return found


def _perturbed(
    now: list[int], transitions: list[list[Transition]], rng: np.random.Generator
) -> list[int]:
    """After a random transition of a random sort, of those that `now` has workers for;
    `now` itself where there are none.
    """
    workers = Counter(now)
    possible = [
        some for sort in transitions if (some := [one for one in sort if one[0] <= workers])
    ]
    if not possible:
        return now
    sort = possible[int(rng.integers(len(possible)))]
    taken, given = sort[int(rng.integers(len(sort)))]
    return sorted((workers - taken + given).elements(), reverse=True)
