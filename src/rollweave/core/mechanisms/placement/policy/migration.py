"""Decide whether and when a trajectory moves to another engine (Heddle §5.3). It moves
only while its environment works.

The partition of the last plan is scaled to the trajectories that are left, so that a
rank keeps its engine as other trajectories end. Heddle moves a trajectory whenever the
engine of its rank is not its present engine; `gain` also requires that the slower of
the two engines would be done sooner, by more than the transfer delays the next turn.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import accumulate

from rollweave.schema.base import EngineId, Struct

GAIN = 0.05
"""Minimum share of an engine's time that a move must save: estimates err, and a moved
trajectory's KV takes room from others.
"""


class Request(Struct, frozen=True, kw_only=True):
    """A pending migration.

    `length` is the predicted length, by which requests are served.
    """

    number: int
    length: float
    source: EngineId
    target: EngineId


def retarget(sizes: Sequence[int], *, rank: int, active: int) -> int:
    """Return the share to which the trajectory of this rank belongs, among the `active`
    trajectories that are left; rank 0 is the longest. The plan's `sizes` are scaled to
    `active`. Raises ValueError for a rank of `active` or more, and for shares without
    trajectories.
    """
    planned = sum(sizes)
    if planned < 1 or min(sizes) < 0:
        raise ValueError(f"sizes must be 0 or more and not all 0, got {list(sizes)}")
    if not 0 <= rank < active:
        raise ValueError(f"rank must be from 0 to {active - 1}, got {rank}")
    ends = list(accumulate(sizes))
    # Whole numbers, so that a boundary is not moved by rounding: rank / active < end /
    # planned.
    return bisect_right(ends, rank * planned // active)


def worth_it(
    source_s: tuple[float, float], target_s: tuple[float, float], *, exposed_s: float
) -> bool:
    """Return whether the move lets the engine that ends last end earlier, by `GAIN` of
    its time and by more than the move delays the trajectory. The seconds to the end of
    an engine's work are given without and with the move (`mechanisms/lengths/work`);
    tools are not counted.
    """
    before = max(source_s[0], target_s[0])
    return before - max(source_s[1], target_s[1]) > exposed_s + GAIN * before


def transfer_epoch(requests: Sequence[Request], busy: Collection[EngineId]) -> list[Request]:
    """Return the requests to start now: longest first, no engine in two transfers at
    the same time. `busy` engines are in a transfer already.
    """
    taken = dict.fromkeys(busy)
    chosen = []
    for request in sorted(requests, key=lambda request: (-request.length, request.number)):
        if request.source not in taken and request.target not in taken:
            taken |= {request.source: None, request.target: None}
            chosen.append(request)
    return chosen
