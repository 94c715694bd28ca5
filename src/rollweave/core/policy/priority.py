"""Who runs next: the rank of a turn. Higher runs first, in the core's queue as in an
engine's batch; equals by arrival.

The core sends ranks; the engine preempts by them (`engine/planner/batching`), and a
victim keeps its KV while the blocks last. Two things keep ranks from doing harm.
Hysteresis: a predicted length becomes a coarse level that is left only well beyond its
bounds, and equals never preempt each other, so near-equal trajectories do not trade
places. And a bound on starvation: a turn that was overtaken by `OVERTAKES` turns for
each slot outranks everything that is not overdue too.
"""

import math
from collections.abc import Callable, Mapping

from rollweave.schema.base import Struct

RATIO = 1.5
"""Between two levels of a predicted length: predictions err by more than that (Heddle
Fig. 13 reports correlations below 1).
"""

MARGIN = 0.25
"""Of a level, by which a prediction must lie outside before the level changes."""

UNKNOWN = 64
"""Level of a trajectory of which nothing is known: above all lengths.

Its first turn tells; one found late is the tail.
"""

OVERTAKES = 64
"""Times that each slot may be given to turns that were asked for later.

A turn of an agent is short: a trajectory has tens.
"""

OVERDUE = 1e12
"""Rank of an overdue turn, less its arrival: above all others, the oldest first."""


class TurnView(Struct, frozen=True, kw_only=True):
    """A turn as priorities see it.

    `arrival` numbers turns as they came, `level` is of the trajectory's predicted
    length.
    """

    launched_at: float
    arrival: int
    output_tokens: int
    level: int


def fcfs(view: TurnView) -> float:
    """First come, first served, by the launch of the trajectory: what is old finishes
    before it grows stale.
    """
    return -view.launched_at


def round_robin(view: TurnView) -> float:
    """Every turn goes to the end of the queue: what a scheduler does that sees requests
    only (Heddle §2.3).
    """
    return -float(view.arrival)


def shortest_first(view: TurnView) -> float:
    """Least attained service first, over the whole trajectory (Autellix)."""
    return -float(view.output_tokens)


def longest_first(view: TurnView) -> float:
    """Progressive priority: the longest by prediction first, which shortens the batch's
    makespan (Heddle §4.2, Alg. 1).

    By the whole length, not by what is left of it: a trajectory that nears its end
    keeps its rank, ends, and frees its KV. By what is left, all would near their ends
    together, and hold all their contexts until then.
    """
    return float(view.level)


RANKS: Mapping[str, Callable[[TurnView], float]] = {
    "fcfs": fcfs,
    "round_robin": round_robin,
    "shortest_first": shortest_first,
    "longest_first": longest_first,
}


def level_of(tokens: float, former: int | None) -> int:
    """The level of a predicted length.

    `former` is kept unless the prediction lies beyond it by the margin.
    """
    exact = math.log(max(1.0, tokens), RATIO)
    if former is not None and former - MARGIN <= exact < former + 1 + MARGIN:
        return former
    return math.floor(exact)


def overdue_rank(arrival: int) -> float:
    """Of a turn that was overtaken too often."""
    return OVERDUE - arrival


def is_overdue(overtaken: int, *, slots: int) -> bool:
    """After `overtaken` turns that were given a slot in its place, of an engine (or of
    engines) with `slots` of them.
    """
    return overtaken > OVERTAKES * max(1, slots)
