"""Decide how many rollout workers there should be (Heddle §3, the tool manager).

There are as many as the attempts that want a place need: more of them start as soon as
the attempts do, and none ends before this has been too many for a whole window. Between
the start of a worker and its end there is therefore at least the window, so that the
number never flaps; a short gap between two bursts ends none.
"""

from collections.abc import Sequence

import msgspec


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """The last time `until` at which so many workers were needed."""

    workers: int
    until: float


def needed(attempts: int, *, workers: int, at_once: int) -> int:
    """Return how many of at most `workers` workers have places for the attempts, if
    all together have places for `at_once`; at least one has.
    """
    share = -(-max(1, at_once) // max(1, workers))
    return min(workers, -(-attempts // share))


def observe(peaks: Sequence[Peak], need: int, *, now: float, window_s: float) -> list[Peak]:
    """Return the peaks of the last `window_s` seconds, of which the first is the
    greatest, with the present need as the last one.

    Each need lasts from its observation to the next one. Times must not decrease.
    """
    lasting = [*peaks[:-1], *(Peak(workers=peak.workers, until=now) for peak in peaks[-1:])]
    return [
        *(peak for peak in lasting if peak.workers > need and peak.until >= now - window_s),
        Peak(workers=need, until=now),
    ]
