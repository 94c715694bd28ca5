"""The slowdown of processes that share the cores of one machine.

A process computes a share of its time, independently of the others, on one core. While
more compute than there are cores, each has an equal part of them.
"""

from collections.abc import Sequence


def slowdown(others: Sequence[float], cores: int) -> float:
    """Return how many times as long a process takes beside `others`, given the shares
    of time in which they compute.
    """
    chances = [1.0]  # by the number of others that compute
    for share in others:
        busy = min(1.0, max(0.0, share))
        chances = [
            stays * (1 - busy) + comes * busy
            for stays, comes in zip([*chances, 0.0], [0.0, *chances], strict=True)
        ]
    return sum(
        chance * max(1.0, (1 + computing) / cores) for computing, chance in enumerate(chances)
    )
