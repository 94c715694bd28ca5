"""Initial placement of trajectories (Heddle §5.2): the list sorted by length is divided
among the workers with the least makespan.

A group costs its longest member's length times the seconds per token of its size on its
worker (eq. 2, `CostTable`). Because the cost depends on nothing else, some best
partition cuts the sorted list into contiguous groups (Lemma 5.1; it also holds for
workers of mixed degrees, whose order along the list is then part of the problem).

The search needs no table of sub-problems. It needs only that a group's cost never falls
as the group gets more or longer members (`Groups`; `mechanisms/lengths/work` has
another such cost). For a bound M on the makespan, one bisection finds how far a worker
reaches from position k of the list, and the reach never decreases in k. So covering as
much of the list as possible with each set of workers is best whatever follows, and
"does M suffice?" costs one pass over the sets. The least M is then searched exactly: a
bound that suffices is lowered to the makespan of its partition, a bound that does not
suffice is raised to the next value at which any worker would reach further, until both
meet. Invariant: costs are compared exactly as the makespan is computed, so the result
is the minimum to the bit. Where the makespan leaves freedom, spans are levelled, so
that no worker is full while another one is empty.

The same search chooses how many GPUs each worker gets (Heddle §6). The paper anneals
over degrees with a placement inside. Under its own cost model the joint problem has an
exact answer that costs no more than one placement: let reach[g] be the furthest
position of the sorted list that `g` GPUs reach within a makespan; then reach[g] = max
over d of extend_d(reach[g - d]), because a later start never makes a worker reach less
far. `rollweave_papers.heddle_placement` has the paper's algorithm.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Protocol

from rollweave.core.mechanisms.costs.interference import CostTable, descending
from rollweave.schema.base import Struct

Moves = Sequence[Sequence[tuple[int, int]]]
"""Sets of workers as nodes of a graph: for each node, the (degree, node) pairs to which
one more worker leads. Every move leads to a later node. Node 0 is the empty set, the
last node is all workers. A node that can be reached from node 0 can reach the last
node; other nodes have no moves.
"""

EXACT_STATES = 4096
"""Maximum number of distinct sets of workers of mixed degrees, which takes about 0.1 s.
Beyond it, equal degrees stay together along the list.
"""

ORDERED_KINDS = 6
"""Maximum number of different degrees whose orders (720) are all searched. Beyond it,
degrees descend along the list.
"""


class Placement(Struct, frozen=True, kw_only=True):
    """`spans[w]`: worker w runs positions [start, end) of the list sorted by length,
    longest first. `exact`: no partition has a smaller makespan.

    `loss`: because of aggregation, `makespan_s` is at most 1 + loss times the makespan
    without it.
    """

    spans: tuple[tuple[int, int], ...]
    makespan_s: float
    exact: bool
    loss: float = 0.0


class Groups(Protocol):
    """A sorted list of trajectories, and the cost of its contiguous groups."""

    @property
    def total(self) -> int:
        """The number of trajectories in the list."""

    def seconds(self, degree: int, start: int, end: int) -> float:
        """Return the cost of positions [start, end), start < end, on a worker of this
        degree; it never falls for a later end or an earlier start.
        """

    def reach(self, degree: int, start: int, bound: float) -> tuple[int, float]:
        """Return the last end for which the group costs at most `bound`, and the cost
        of the next larger group (infinite at the end of the list). Of groups of equal
        cost, the largest counts. The end is `start` itself if not even one trajectory
        is within the bound.
        """


class Path(Struct, frozen=True, kw_only=True):
    """Workers in order along the sorted list, and the end of each worker's span."""

    degrees: tuple[int, ...]
    ends: tuple[int, ...]
    makespan_s: float

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip((0, *self.ends[:-1]), self.ends, strict=True))


def place_groups(groups: Groups, workers: Sequence[int]) -> Placement:
    """Return the placement of least makespan among partitions into contiguous groups.
    `workers` is the parallel degree of each worker.

    A worker may stay empty. Mixed degrees are exact while at most EXACT_STATES sets of
    workers are distinct; beyond that, equal degrees are contiguous along the list, in
    the best order (descending for more than ORDERED_KINDS). Raises ValueError as
    `check_workers` does, and for a degree that the cost of `groups` lacks.
    """
    check_workers(groups.total, workers)
    problem = Problem(groups)
    counts = {degree: list(workers).count(degree) for degree in sorted(set(workers), reverse=True)}
    best = problem.least(
        by_degree(counts)
        if len(counts) <= ORDERED_KINDS
        else in_order(sorted(workers, reverse=True))
    )
    exact = len(counts) == 1
    if not exact and math.prod(count + 1 for count in counts.values()) <= EXACT_STATES:
        best, exact = problem.least(by_counts(counts), known=best), True
    best = problem.level(best)
    return Placement(spans=_to_workers(best, workers), makespan_s=best.makespan_s, exact=exact)


def check_workers(trajectories: int, workers: Sequence[int]) -> None:
    """Raise ValueError if there are no workers, or more workers than trajectories."""
    if not workers:
        raise ValueError("workers must have at least one worker, got none")
    if len(workers) > trajectories:
        raise ValueError(
            f"workers must be at most as many as the {trajectories} trajectories, "
            f"got {len(workers)}"
        )


def _to_workers(path: Path, workers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the path's spans by worker: of equal workers, the earlier one gets longer
    trajectories.
    """
    waiting: dict[int, list[tuple[int, int]]] = {}
    for degree, span in zip(path.degrees, path.spans, strict=True):
        waiting.setdefault(degree, []).append(span)
    taken = {degree: iter(spans) for degree, spans in waiting.items()}
    return tuple(next(taken[degree]) for degree in workers)


def in_order(degrees: Sequence[int]) -> Moves:
    """Return the moves of workers in this order along the list."""
    return [[(degree, number + 1)] for number, degree in enumerate(degrees)] + [[]]


def by_degree(counts: dict[int, int]) -> Moves:
    """Return the moves of degrees in any order along the list, with equal degrees
    together. Nodes are sets of whole degrees, and the runs between such sets.
    """
    kinds = list(counts)
    moves: list[list[tuple[int, int]]] = []
    # set of kinds → the (node, degree) pairs that lead to it
    entries: dict[int, list[tuple[int, int]]] = {0: []}
    for chosen in range(1 << len(kinds)):
        here = len(moves)
        for node, degree in entries[chosen]:
            moves[node].append((degree, here))
        moves.append([])
        for bit, degree in enumerate(kinds):
            if not chosen >> bit & 1:
                node = here
                for _ in range(counts[degree] - 1):
                    moves[node].append((degree, len(moves)))
                    node = len(moves)
                    moves.append([])
                entries.setdefault(chosen | 1 << bit, []).append((node, degree))
    return moves


def by_counts(counts: dict[int, int]) -> Moves:
    """Return the moves of workers in any order along the list; a node is the number of
    workers used of each degree.
    """
    # degree, number of its workers, nodes between using n and n + 1 of these workers
    strides: list[tuple[int, int, int]] = []
    nodes = 1
    for degree, count in counts.items():
        strides.append((degree, count, nodes))
        nodes *= count + 1
    return [
        [
            (degree, node + stride)
            for degree, count, stride in strides
            if node // stride % (count + 1) < count
        ]
        for node in range(nodes)
    ]


class ByTable:
    """Groups of trajectories with these `lengths` (tokens, in any order), which cost as
    in eq. 2.

    Raises ValueError for lengths that are not finite and positive, and for a table
    shorter than the list.
    """

    def __init__(self, lengths: Sequence[float], cost: CostTable) -> None:
        self.lengths: list[float] = descending(lengths).tolist()
        self.total = len(self.lengths)
        if cost.largest < self.total:
            raise ValueError(
                f"cost must reach the group size {self.total} of all trajectories, "
                f"got {cost.largest}"
            )
        worst = self.lengths[0] * max(cost.row(degree)[-1] for degree in cost.degrees)
        if not math.isfinite(worst):
            raise ValueError(
                f"lengths must have finite products with the seconds of cost, got {self.lengths[0]}"
            )
        # A group beyond all trajectories costs infinitely much, so that no worker
        # reaches it.
        self._rows = {
            degree: [*cost.row(degree)[: self.total], math.inf] for degree in cost.degrees
        }
        self._cost = cost

    def seconds(self, degree: int, start: int, end: int) -> float:
        """See `Groups`."""
        return self.lengths[start] * self._cost.at(degree, end - start)

    def reach(self, degree: int, start: int, bound: float) -> tuple[int, float]:
        """See `Groups`."""
        row, length = self._rows[degree], self.lengths[start]
        size = bisect_right(row, bound / length, 0, self.total)
        beyond = length * row[size]
        # The quotient is rounded; the product decides. Equal costs are passed together.
        while beyond <= bound:
            size = bisect_right(row, row[size])
            beyond = length * row[size]
        while size and length * row[size - 1] > bound:
            beyond = length * row[size - 1]
            size = bisect_left(row, row[size - 1])
        return min(start + size, self.total), beyond


class Problem:
    """Groups, prepared for many searches."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups

    def least(self, moves: Moves, *, known: Path | None = None) -> Path:
        """Return the path of least makespan over all `moves`. The search starts from
        the path `known`, if given.
        """
        degrees = sorted({degree for some in moves for degree, _ in some})
        # some worker runs the longest trajectory
        low = min(self.groups.seconds(degree, 0, 1) for degree in degrees)
        best, bound = known, low
        if best is not None:
            bound = max(low, math.nextafter(best.makespan_s, 0.0))
        # No makespan below `low` is possible, and the makespan of `best` is.
        while best is None or low < best.makespan_s:
            path, following = self._within(bound, moves)
            if path is not None:
                best = path
            else:
                low = following
            if best is None:
                bound = max(low, 2 * bound)
            else:
                bound = low + (best.makespan_s - low) / 2
                bound = bound if bound < best.makespan_s else low
        return best

    def _within(self, bound: float, moves: Moves) -> tuple[Path | None, float]:
        """Return a path of makespan `bound` or less, or None and the next greater bound
        at which some worker reaches further.
        """
        total, following, extend = self.groups.total, math.inf, self.groups.reach
        reach, came = [-1] * len(moves), [(0, 0)] * len(moves)
        reach[0] = 0
        for node, some in enumerate(moves):
            start = reach[node]
            if start == total:
                return self._path(node, moves, reach, came), bound
            for degree, to in some:
                end, beyond = extend(degree, start, bound)
                if beyond < following:
                    following = beyond
                if end > reach[to]:
                    reach[to] = end
                    came[to] = (node, degree)
        return None, following

    def level(self, path: Path) -> Path:
        """Return a path with the same workers and makespan, whose ends lie between the
        earliest and the latest possible ends: the later the worker, the later its end.
        """
        bound, earliest = path.makespan_s, [0] * len(path.degrees)
        end = self.groups.total
        for number in range(len(path.degrees) - 1, -1, -1):
            earliest[number] = end
            end = self._back(path.degrees[number], end, bound)
        ends, start = [], 0
        for number, degree in enumerate(path.degrees):
            latest = (
                self.groups.reach(degree, start, bound)[0] if start < self.groups.total else start
            )
            room = path.ends[number] - earliest[number]
            wanted = earliest[number] + room * (number + 1) // len(path.degrees)
            start = max(start, min(latest, max(wanted, earliest[number])))
            ends.append(start)
        return Path(degrees=path.degrees, ends=tuple(ends), makespan_s=bound)

    def _back(self, degree: int, end: int, bound: float) -> int:
        """Return the earliest start from which a worker reaches `end` within the
        bound.
        """
        low, high = 0, end
        while low < high:
            middle = (low + high) // 2
            if self.groups.seconds(degree, middle, end) <= bound:
                high = middle
            else:
                low = middle + 1
        return high

    def _path(self, node: int, moves: Moves, reach: list[int], came: list[tuple[int, int]]) -> Path:
        """Return the path through `node`, where the list ends. The remaining workers
        stay empty.
        """
        degrees: list[int] = []
        ends: list[int] = []
        worst, at = 0.0, node
        while at:
            before, degree = came[at]
            degrees.append(degree)
            ends.append(reach[at])
            if reach[at] > reach[before]:
                worst = max(worst, self.groups.seconds(degree, reach[before], reach[at]))
            at = before
        degrees.reverse()
        ends.reverse()
        while moves[node]:
            degree, node = moves[node][0]
            degrees.append(degree)
            ends.append(self.groups.total)
        return Path(degrees=tuple(degrees), ends=tuple(ends), makespan_s=worst)


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
