"""The cost of sharing a worker (Heddle §5.2, interference factor): seconds per token by
parallel degree and group size.

A worker's step takes longer the more sequences it decodes, so the other members of a
group slow down its longest member. `CostTable` is F(size) · T of Heddle's eq. 2 for
every degree; `tabulate` computes one from measured step times, as the paper does, by
simulating groups of many sizes. Invariant: a larger group never costs less.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from rollweave.schema.events import StepTime

Array = npt.NDArray[np.float64]

Sample = Literal["runs", "spread"]

GRID_RATIO = 1.2
"""Ratio between simulated group sizes: a table to 6,400 takes about 50 sizes, and the
curve between them is nearly straight.
"""

RUNS = 5
"""Number of simulated groups per size, evenly from the longest trajectories to the
shortest. On the simulator's families of Heddle's tasks, 17 groups changed the resulting
makespan by less than 1 %, and 3 groups by 1.5 %.
"""

FILLINGS = 4
"""Members per slot beyond which slots are assumed to fill evenly: the last members are
short, and a heap of all members takes long.
"""


class CostTable:
    """Seconds per token of a group's longest member, by parallel degree and group size
    1..`largest`.

    Raises ValueError for a degree under 1, for seconds that are not finite and positive
    or that fall as the group grows, and for rows of unequal length.
    """

    def __init__(self, seconds: Mapping[int, Sequence[float]]) -> None:
        if not seconds:
            raise ValueError("seconds must have at least one degree, got none")
        self._rows: dict[int, list[float]] = {}
        for degree in sorted(seconds):
            if degree < 1:
                raise ValueError(f"degree must be at least 1, got {degree}")
            row = np.asarray(seconds[degree], dtype=np.float64)
            _check_row(degree, row)
            self._rows[degree] = row.tolist()
        sizes = {degree: len(row) for degree, row in self._rows.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(
                f"seconds must reach the same group size for every degree, got {sizes}"
            )
        self.degrees = tuple(self._rows)
        self.largest = min(sizes.values())

    def at(self, degree: int, size: int) -> float:
        """Return the seconds per token of the longest of `size` members on a worker of
        `degree`.

        Raises ValueError outside the table.
        """
        row = self.row(degree)
        if not 1 <= size <= self.largest:
            raise ValueError(
                f"size must be from 1 to {self.largest}, the table's largest group, got {size}"
            )
        return row[size - 1]

    def row(self, degree: int) -> Sequence[float]:
        """Return the row of `degree`, indexed by group size - 1.

        Raises ValueError for a degree that the table lacks.
        """
        if degree not in self._rows:
            raise ValueError(
                f"degree must be one of the cost table's {list(self._rows)}, got {degree}"
            )
        return self._rows[degree]


def _check_row(degree: int, row: Array) -> None:
    name = f"seconds[{degree}]"
    if row.ndim != 1 or not len(row):
        raise ValueError(f"{name} must have at least one group size, got shape {row.shape}")
    wrong = np.flatnonzero(~(np.isfinite(row) & (row > 0)))
    if len(wrong):
        raise ValueError(
            f"{name} must be finite and positive, got {row[wrong[0]]} for group size {wrong[0] + 1}"
        )
    falls = np.flatnonzero(np.diff(row) < 0)
    if len(falls):
        at = int(falls[0])
        raise ValueError(
            f"{name} must not fall as the group grows, got {row[at + 1]} after "
            f"{row[at]} for group size {at + 2}"
        )


def tabulate(
    profile: Mapping[int, Sequence[StepTime]],
    *,
    lengths: Sequence[float],
    slots: Mapping[int, int],
    largest: int,
    sample: Sample = "runs",
) -> CostTable:
    """Return the table for measured step times, by simulating groups (Heddle §5.2).

    All members of a group decode together, and the batch shrinks as they end; members
    beyond a worker's `slots` queue, the longest first. Seconds per token are the
    group's makespan divided by its longest member. Members come from `lengths` (tokens,
    in any order): a placement makes groups of neighbors in length, so the slowest of
    RUNS `runs` of the sorted list counts; `spread` instead takes an even sample of all
    lengths, whose many short members end soon and make sharing look cheap. Sizes on a
    geometric grid are simulated, other sizes are interpolated, and the result is made
    monotone (running maximum). Raises ValueError for an invalid profile or lengths, and
    for a degree without slots.
    """
    if largest < 1:
        raise ValueError(f"largest must be at least 1, got {largest}")
    ordered = descending(lengths)
    steps = {degree: limited_step_times(profile, slots, degree, largest) for degree in profile}
    sizes = _grid(largest, {len(step_s) for step_s in steps.values()})
    simulated: dict[int, list[float]] = {degree: [] for degree in profile}
    for size in sizes:
        groups = _groups(ordered, size, sample)
        for degree, step_s in steps.items():
            simulated[degree].append(
                max(group_s(members, step_s, levelled=True) / members[0] for members in groups)
            )
    every = np.arange(1, largest + 1)
    return CostTable(
        {
            d: np.maximum.accumulate(np.interp(every, sizes, at_sizes)).tolist()
            for d, at_sizes in simulated.items()
        }
    )


def _groups(ordered: Array, size: int, sample: Sample) -> list[Array]:
    """Return groups of `size` members.

    If there are fewer trajectories, each trajectory is used several times.
    """
    total = len(ordered)
    if sample == "spread" or size >= total:
        return [ordered[((np.arange(size) + 0.5) * (total / size)).astype(np.intp)]]
    return [
        ordered[start : start + size]
        for start in sorted({(total - size) * run // (RUNS - 1) for run in range(RUNS)})
    ]


def descending(lengths: Sequence[float]) -> Array:
    """Return the lengths, longest first.

    Raises ValueError if there are no lengths, or a length is not finite and positive.
    """
    array = np.asarray(lengths, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise ValueError(f"lengths must have at least one trajectory, got shape {array.shape}")
    wrong = np.flatnonzero(~(np.isfinite(array) & (array > 0)))
    if len(wrong):
        raise ValueError(
            f"lengths must be finite and positive, got {array[wrong[0]]} at index {wrong[0]}"
        )
    return -np.sort(-array)


def step_times(measured: Sequence[StepTime], *, largest: int) -> Array:
    """Return the seconds of a step, indexed by batch - 1, for batches of 1..`largest`.
    They never fall as the batch grows.

    Measurements are noisy, so this is the least-squares monotone fit (pool adjacent
    violators), linear between measured batches. It is constant below the smallest
    batch. Beyond the largest batch it continues with the slope over the upper half of
    the measurements, because a single segment would be noise.
    """
    for step in measured:
        if step.batch < 1 or not (math.isfinite(step.seconds) and step.seconds > 0):
            raise ValueError(
                f"profile must have batches of at least 1 and finite positive seconds, got {step}"
            )
    batches, inverse, counts = np.unique(
        [step.batch for step in measured], return_inverse=True, return_counts=True
    )
    if not len(batches) or (len(batches) < 2 and largest > batches[0]):
        raise ValueError(
            f"profile must have two different batches to reach a batch of {largest}, "
            f"got {batches.tolist()}"
        )
    means = np.bincount(inverse, weights=[step.seconds for step in measured]) / counts
    fitted = _isotonic(means, counts)
    wanted = np.arange(1, largest + 1)
    step_s = np.interp(wanted, batches, fitted)
    if largest > batches[-1]:
        middle = (batches[0] + batches[-1]) / 2
        slope = (fitted[-1] - np.interp(middle, batches, fitted)) / (batches[-1] - middle)
        step_s = step_s + slope * np.maximum(wanted - batches[-1], 0)
    return step_s


def _isotonic(values: Array, weights: npt.NDArray[np.intp]) -> Array:
    """Return the non-decreasing sequence of least weighted squared distance: neighbors
    that fall share their mean.
    """
    pools: list[tuple[float, int, int]] = []  # mean, weight, members
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, members = value, weight, 1
        while pools and pools[-1][0] > mean:
            before, heavy, many = pools.pop()
            mean = (before * heavy + mean * total) / (heavy + total)
            total, members = total + heavy, members + many
        pools.append((mean, total, members))
    return np.repeat([mean for mean, _, _ in pools], [members for _, _, members in pools])


def limited_step_times(
    profile: Mapping[int, Sequence[StepTime]], slots: Mapping[int, int], degree: int, largest: int
) -> Array:
    """Return the step times of `degree` up to its batch limit, and no further than a
    group of `largest` needs.
    """
    if degree not in profile:
        raise ValueError(f"degree must be one of the profile's {sorted(profile)}, got {degree}")
    limit = slots.get(degree, 0)
    if limit < 1:
        raise ValueError(
            f"slots must be at least 1 for every degree, got {limit} for degree {degree}"
        )
    return step_times(profile[degree], largest=min(limit, largest))


def group_s(lengths: Array, step_s: Array, *, levelled: bool = False) -> float:
    """Return the seconds until the last of a group has ended. `lengths` descend; the
    batch limit is the number of step times.

    Every member of a batch gains one token per step, so slots are filled in tokens;
    between the ends of two slots the batch is constant. With `levelled`, long queues
    are not followed member by member.
    """
    slots = len(step_s)
    if len(lengths) <= slots:
        ends = lengths
    elif levelled and len(lengths) > FILLINGS * slots:
        ends = _level_ends(lengths, slots)
    else:
        ends = _queue_ends(lengths, slots)
    return float(np.dot(ends - np.append(ends[1:], 0.0), step_s[: len(ends)]))


def _queue_ends(lengths: Array, slots: int) -> Array:
    """Return the tokens after which each slot becomes idle, the last first, if the
    longest waiting member takes the next free slot.
    """
    heap = lengths[:slots][::-1].tolist()  # ascending, hence a heap
    for length in lengths[slots:].tolist():
        heapq.heapreplace(heap, heap[0] + length)
    return np.array(sorted(heap, reverse=True))


def _level_ends(lengths: Array, slots: int) -> Array:
    """Return nearly the same as `_queue_ends`: each of the longest members has a slot
    of its own as long as it exceeds the level to which the rest fill the other slots.
    Half of the shortest length is added to that level, because slots end within one
    last member of each other.
    """
    rest = lengths.sum() - np.concatenate(([0.0], np.cumsum(lengths[: slots - 1])))
    levels = rest / np.arange(slots, 0, -1)
    # at the latest the last slot, whose rest includes its own longest member
    alone = int(np.argmax(levels >= lengths[:slots]))
    level = levels[alone] + lengths[-1] / 2
    return np.concatenate((np.maximum(lengths[:alone], level), np.full(slots - alone, level)))


def _grid(largest: int, limits: set[int]) -> list[int]:
    """Return the group sizes to simulate: geometric, plus the batch limits, where
    curves bend.
    """
    count = math.ceil(math.log(largest) / math.log(GRID_RATIO)) + 1
    return sorted({round(size) for size in np.geomspace(1, largest, count)} | limits)
