"""The rank of a turn: turns of higher rank run first, in the core's queue and in an
engine's batch; turns of equal rank run in the order of arrival.

The core sends ranks; the engine preempts by them (`engine/batching`), and a
preempted request keeps its KV while the blocks last. Two mechanisms keep ranks from
doing harm. Hysteresis: a predicted length becomes a coarse level that is left only well
beyond its bounds, and equals never preempt each other, so near-equal trajectories do
not alternate. A bound on starvation: a turn that was overtaken by `OVERTAKES` turns per
slot outranks all turns that are not overdue themselves.
"""

import math
from collections.abc import Callable, Mapping

from rollweave.schema.base import Struct

RATIO = 1.5
"""Ratio between two levels of a predicted length: predictions err by more than that
(Heddle Fig. 13 reports correlations below 1).
"""

MARGIN = 0.25
"""Hysteresis: a prediction must leave its level by this fraction before the level
changes.
"""

UNKNOWN = 64
"""Level of a trajectory without a prediction: above all lengths. Its first turn is
informative, and long trajectories that are recognized late form the tail.
"""

OVERTAKES = 64
"""Maximum number of later turns that may overtake a turn, for each slot. An agent's
turn is short, and a trajectory has tens of them.
"""

OVERDUE = 1e12
"""Rank of an overdue turn, minus its arrival: above all others, the oldest first."""


class TurnView(Struct, frozen=True, kw_only=True):
    """The properties of a turn that priorities read.

    `arrival` numbers turns as they arrive; `level` is the level of the trajectory's
    predicted length.
    """

    launched_at: float
    arrival: int
    output_tokens: int
    level: int


def fcfs(view: TurnView) -> float:
    """First come, first served, by the launch of the trajectory: old trajectories
    finish before they become stale.
    """
    return -view.launched_at


def round_robin(view: TurnView) -> float:
    """Every turn goes to the end of the queue, as in a scheduler that sees only
    requests (Heddle §2.3).
    """
    return -float(view.arrival)


def shortest_first(view: TurnView) -> float:
    """Least attained service first, over the whole trajectory (Autellix)."""
    return -float(view.output_tokens)


def longest_first(view: TurnView) -> float:
    """Progressive priority: the longest by prediction first, which shortens the batch's
    makespan (Heddle §4.2, Alg. 1).

    The rank follows the whole length, not the remaining length: a trajectory that nears
    its end keeps its rank, ends, and frees its KV. By the remaining length, all
    trajectories would near their ends together and hold their contexts until then.
    """
    return float(view.level)


RANKS: Mapping[str, Callable[[TurnView], float]] = {
    "fcfs": fcfs,
    "round_robin": round_robin,
    "shortest_first": shortest_first,
    "longest_first": longest_first,
}


def level_of(tokens: float, former: int | None) -> int:
    """Return the level of a predicted length.

    `former` is kept unless the prediction exceeds it by the margin.
    """
    exact = math.log(max(1.0, tokens), RATIO)
    if former is not None and former - MARGIN <= exact < former + 1 + MARGIN:
        return former
    return math.floor(exact)


def overdue_rank(arrival: int) -> float:
    """Return the rank of a turn that was overtaken too often."""
    return OVERDUE - arrival


def is_overdue(overtaken: int, *, slots: int) -> bool:
    """Return whether a turn is overdue after `overtaken` later turns got a slot, on
    engines with `slots` slots.
    """
    return overtaken > OVERTAKES * max(1, slots)
