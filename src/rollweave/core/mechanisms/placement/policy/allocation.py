"""Choose how many GPUs each worker gets (Heddle §6): the degrees of all workers are
chosen together with the placement of least makespan.

The paper anneals over degrees with a placement inside. Under its own cost model the
joint problem has an exact answer that costs no more than one placement: let reach[g] be
the furthest position of the sorted list that `g` GPUs reach within a makespan; then
reach[g] = max over d of extend_d(reach[g - d]), because a later start never makes a
worker reach less far (`mechanisms/costs/placement` has this search).
`rollweave_papers.heddle_placement` has the paper's algorithm.
"""

from collections.abc import Sequence

from rollweave.core.mechanisms.costs.placement import Groups, Moves, Path, Placement, Problem
from rollweave.schema.base import Struct


class Allocation(Struct, frozen=True, kw_only=True):
    """The `degrees` of the workers, in their order along the list sorted by length, and
    the placement on them.
    """

    degrees: tuple[int, ...]
    placement: Placement

    @property
    def makespan_s(self) -> float:
        return self.placement.makespan_s


def allocate_groups(groups: Groups, gpus: int, degrees: Sequence[int]) -> Allocation:
    """Return the workers of `degrees` that use all `gpus` with the least makespan, and
    their placement. Both are exact among partitions into contiguous groups.

    A worker may stay empty. Raises ValueError as `by_budget` does, and for a degree
    that the cost of `groups` lacks.
    """
    problem = Problem(groups)
    return to_allocation(problem.level(problem.least(by_budget(gpus, degrees))), exact=True)


def by_budget(gpus: int, degrees: Sequence[int]) -> Moves:
    """Return the moves of workers of any degrees in any order along the list; a node is
    the number of GPUs used.

    Raises ValueError for a degree under 1 or over `gpus`, and for degrees that cannot
    sum to `gpus`.
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
    """Return whether workers of these degrees can use exactly `gpus` GPUs."""
    return gpus in _sums(gpus, degrees)


def _sums(gpus: int, degrees: Sequence[int]) -> set[int]:
    """Return the numbers of GPUs, at most `gpus`, that some set of workers uses."""
    sums = {0}
    for number in range(1, gpus + 1):
        if any(number - degree in sums for degree in degrees):
            sums.add(number)
    return sums


def to_allocation(path: Path, *, exact: bool) -> Allocation:
    return Allocation(
        degrees=path.degrees,
        placement=Placement(spans=path.spans, makespan_s=path.makespan_s, exact=exact),
    )
