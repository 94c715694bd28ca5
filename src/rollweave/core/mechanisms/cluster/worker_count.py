"""Decide how many rollout workers there should be (Heddle §3, the tool manager).

There are as many workers as are needed to give every attempt a place. More workers
start as soon as more attempts do, and a worker ends only after there have been too many
workers for a whole window. Therefore a worker lives for at least the window, so that
the number never flaps; a short gap between two bursts ends no worker.
"""

from collections.abc import Sequence

import msgspec


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """A number of workers, and the last time `until` at which it was needed."""

    workers: int
    until: float


def needed(attempts: int, *, workers: int, at_once: int) -> int:
    """Return how many workers, at least one and at most `workers`, are needed for the
    attempts, if all workers together have places for `at_once` attempts.
    """
    share = -(-max(1, at_once) // max(1, workers))
    return min(workers, -(-attempts // share))


def observe(peaks: Sequence[Peak], need: int, *, now: float, window_s: float) -> list[Peak]:
    """Return the peaks of the last `window_s` seconds in descending order: the greatest
    need first, the present need last. A need lasts from its observation to the next
    observation. Times must not decrease.
    """
    lasting = [*peaks[:-1], *(Peak(workers=peak.workers, until=now) for peak in peaks[-1:])]
    return [
        *(peak for peak in lasting if peak.workers > need and peak.until >= now - window_s),
        Peak(workers=need, until=now),
    ]
