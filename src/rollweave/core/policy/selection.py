"""Choose the best evaluation, and decide whether an evaluation reaches the target.

A task domain is measured by its success rate if its environment defines success,
otherwise by its mean reward. Success is never derived from a reward: only the
environment knows what a reward of 0.3 means.
"""

from collections.abc import Collection, Mapping, Sequence

Rates = Mapping[str, float]
"""A number for each task domain."""


def measure(success: Rates, reward: Rates, defining: Collection[str]) -> float:
    """Return the mean over the task domains in `reward`: the success rate of domains in
    `defining` (0 if absent), the reward of other domains. Raises ValueError without a
    domain.
    """
    if not reward:
        raise ValueError("reward must have at least one task domain, got none")
    return sum(
        success.get(name, 0.0) if name in defining else value for name, value in reward.items()
    ) / len(reward)


def is_better(new: float, best: float | None) -> bool:
    """True if an evaluation of measure `new` replaces the best one so far.

    Of equal evaluations the newest is the best.
    """
    return best is None or new >= best


def reaches(success: Rates, tasks: Sequence[str], target: float) -> bool:
    """True if every task domain has a success rate, and none is below `target`."""
    return all(success.get(name, -1.0) >= target for name in tasks)
