"""Choose the pool of engines that serves a task domain (RollArt §5.2).

A domain declares the hardware that suits it: domains whose prompts cost most prefer
GPUs with much computing power, domains that sample most prefer memory bandwidth.
"""

from collections.abc import Collection, Sequence


def serving_pool(preferred: Sequence[str], live: Collection[str]) -> str | None:
    """Return the first of the `preferred` pools that is `live`, that is, has an engine
    which takes turns or will once it has loaded other weights.

    `preferred` are the domain's pool and its fallbacks, in order. None stands for any
    engine: the domain has no pool, or none of these pools is live.
    """
    return next((pool for pool in preferred if pool in live), None)
