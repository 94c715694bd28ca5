"""Decide which rollout worker gets an attempt."""

from collections.abc import Mapping


def least_loaded(attempts: Mapping[str, int]) -> str | None:
    """The worker with the fewest attempts, the first among equal ones; None if there is
    no worker.
    """
    return min(attempts, key=attempts.__getitem__, default=None)
