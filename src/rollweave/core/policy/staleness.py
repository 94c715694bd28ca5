"""Decide whether a trajectory may still be trained on (RollArt §6.2, Laminar §6).

Staleness is counted in steps, from the weights that served when the trajectory was
launched to the weights that the training step starts from: queueing, rollout, reward
and buffer time all count. The bound is strict: no trained trajectory ever exceeds it.
"""


def staleness(initiated: int, trained_at: int) -> int:
    """Return the number of steps between the two versions.

    After a trainer was restored to an earlier step, `initiated` may be the larger one:
    the trajectory then comes from weights of a lost lineage, and its staleness is the
    absolute difference.
    """
    return abs(trained_at - initiated)


def acceptable(initiated: int, trained_at: int, window: int | None) -> bool:
    """True if a step that starts from version `trained_at` may use a trajectory
    launched under version `initiated`.
    """
    return window is None or staleness(initiated, trained_at) <= window
