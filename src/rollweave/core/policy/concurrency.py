"""Decide how many turns an engine should run at the same time, by profiled step times
(ROSE §4.3, App. A).

Throughput grows with the number of sequences in a step, but ever more slowly, while
each sequence takes longer, and the KV may not fit. ROSE profiles an engine offline, and
caps its concurrency where the throughput no longer grows.
"""

from collections.abc import Callable

SATURATED = 0.95
"""Share of the highest throughput that counts as the highest throughput."""


def fewest_slots(step_s: Callable[[int], float], *, most: int) -> int:
    """Return the fewest sequences, up to `most`, whose throughput is at least
    `SATURATED` times the highest throughput. `step_s(sequences)` is the seconds of a
    step that decodes this number of sequences. Raises ValueError if `most` is below 1.
    """
    if most < 1:
        raise ValueError(f"most must be at least 1, got {most}")
    rates = [count / step_s(count) for count in range(1, most + 1)]
    enough = SATURATED * max(rates)
    return next(count for count, rate in enumerate(rates, 1) if rate >= enough)
