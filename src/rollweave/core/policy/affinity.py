"""Choose the pool of engines that serves a task domain (RollArt §5.2).

A task domain names the hardware that suits it: one whose prompts cost most prefers GPUs
with much computing power, one that mostly samples prefers memory bandwidth.
"""

from collections.abc import Collection, Sequence


def serving_pool(preferred: Sequence[str], live: Collection[str]) -> str | None:
    """Return the first of the `preferred` pools that is `live`, or None, which stands
    for any engine.

    `preferred` are the domain's pool and its fallbacks, in order. A pool is live if one
    of its engines takes turns, or will once it has loaded other weights.
    """
    return next((pool for pool in preferred if pool in live), None)
