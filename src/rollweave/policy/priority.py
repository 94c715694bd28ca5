"""Who runs next. Higher rank runs first, in the core's queue of turns as in the engine's batch."""


def fcfs(launched_at: float) -> float:
    """First come, first served, by the launch of the trajectory: what is old finishes before it grows stale."""
    return -launched_at
