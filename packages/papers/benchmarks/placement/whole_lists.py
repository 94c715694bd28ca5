"""Placement and allocation of trajectories that are given by their lengths, and the
simulation of the result.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from rollweave.core.mechanisms.costs.interference import (
    CostTable,
    descending,
    group_s,
    limited_step_times,
)
from rollweave.core.mechanisms.costs.placement import (
    Allocation,
    ByTable,
    Placement,
    allocate_groups,
    check_workers,
    place_groups,
)
from rollweave.schema.events import StepTime


def by_length(lengths: Sequence[float]) -> npt.NDArray[np.intp]:
    """Return the indices of `lengths`, longest first, equal ones by index: the order
    that spans refer to.
    """
    return np.argsort(-np.asarray(lengths, dtype=np.float64), kind="stable")


def place(lengths: Sequence[float], workers: Sequence[int], cost: CostTable) -> Placement:
    """Place trajectories under eq. 2. `lengths` are tokens in any order."""
    check_workers(len(lengths), workers)
    return place_groups(ByTable(lengths, cost), workers)


def allocate(
    lengths: Sequence[float], gpus: int, degrees: Sequence[int], cost: CostTable
) -> Allocation:
    """Allocate GPUs under eq. 2. `lengths` are tokens in any order."""
    return allocate_groups(ByTable(lengths, cost), gpus, degrees)


def simulated_s(
    groups: Iterable[tuple[int, Sequence[float]]],
    *,
    profile: Mapping[int, Sequence[StepTime]],
    slots: Mapping[int, int],
) -> float:
    """Return the simulated seconds until every group has ended. Each worker is given as
    its degree and its members' lengths in tokens.

    Every batch shrinks as its own members end, which eq. 2 ignores; its optimum need
    not be one here.
    """
    ends = [0.0]
    for degree, lengths in groups:
        if len(lengths):
            ordered = descending(lengths)
            step_s = limited_step_times(profile, slots, degree, len(ordered))
            ends.append(group_s(ordered, step_s))
    return max(ends)
