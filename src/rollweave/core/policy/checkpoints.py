"""Decide when the next checkpoint is due: often enough to lose little, and seldom
enough to cost little.
"""

CHECKPOINT_S = 30.0
"""Minimum seconds between checkpoints by time."""

COST_SHARE = 0.05
"""Maximum share of the time spent writing checkpoints."""


def checkpoint_is_due(since_s: float, *, every_s: float, last_s: float) -> bool:
    """True if a checkpoint is due `since_s` seconds after the last checkpoint was
    requested, which took `last_s` to write. `every_s` is the wanted interval; 0 asks
    for no checkpoints. Raises ValueError for negative seconds.
    """
    for name, seconds in (("every_s", every_s), ("last_s", last_s)):
        if seconds < 0:
            raise ValueError(f"{name} must be at least 0, got {seconds}")
    return every_s > 0 and since_s >= max(every_s, last_s / COST_SHARE)
