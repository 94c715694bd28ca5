"""Figures of bench `coserve`, from a load and the statistics of the engine."""

import math
from collections.abc import Sequence

from packages.sim.benchmarks.coserve.load import LoadReport, Served

QUIET_S = 0.1
"""Seconds without a rollout step after which rollouts are out of the way."""


def yield_ms(report: LoadReport, *, since: float) -> float | None:
    """Return the milliseconds from `since` until the last rollout step before rollouts
    paused; None if they did not.
    """
    for one in report.watched:
        if one.at >= since and one.age_s >= QUIET_S:
            return 1e3 * max(0.0, one.at - one.age_s - since)
    return None


def largest(values: Sequence[float | None]) -> float | None:
    """Return the largest value; None if one of them is None."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def delay_ms(report: LoadReport, *, since: float, until: float) -> float:
    """Return the milliseconds between two moments for which a request waited for a
    rollout step, as far as the readings of the statistics tell.
    """
    before = [one.delay_s for one in report.watched if one.at <= since]
    later = [one.delay_s for one in report.watched if one.at <= until]
    first = min((one.delay_s for one in report.watched), default=0.0)
    return 1e3 * (max(later, default=first) - max(before, default=first))


def ttft_p99(served: Sequence[Served]) -> float:
    """Return the P99 of the seconds to the first token, infinite for one that never
    came.
    """
    return quantile([one.first_s if one.tokens else math.inf for one in served], 0.99)


def tpot_p99(served: Sequence[Served]) -> float:
    """Return the P99 of the seconds per further token."""
    return quantile([one.tpot_s for one in served if one.tpot_s is not None], 0.99)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that this share of the values does not exceed."""
    return sorted(values)[math.ceil(share * len(values)) - 1]
