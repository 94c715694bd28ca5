"""Decide which rollout worker gets an attempt."""

from collections.abc import Mapping


def worker_for(attempts: Mapping[str, int], *, awaited: int, at_once: int) -> str | None:
    """Return the worker with the fewest attempts, the first of equal ones; None if
    there is none, or if each has its share.

    While `awaited` other workers start for the first time, a worker takes only its
    share of the `at_once` attempts that may run; otherwise the first that is ready
    would take all of them.
    """
    chosen = min(attempts, key=attempts.__getitem__, default=None)
    if chosen is None or not awaited:
        return chosen
    share = -(-at_once // (len(attempts) + awaited))
    return chosen if attempts[chosen] < share else None
