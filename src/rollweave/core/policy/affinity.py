"""Choose the pool of engines that serves a task domain (RollArt §5.2).

A task domain names the hardware that suits it: a domain whose prompts cost most prefers
GPUs with much computing power, a domain that mostly samples prefers memory bandwidth.
"""

from collections.abc import Collection, Mapping, Sequence


def serving_pool(preferred: Sequence[str], live: Collection[str]) -> str | None:
    """Return the first of the `preferred` pools that is `live`, or None, which stands
    for any engine.

    `preferred` are the domain's pool and its fallbacks, in order. A pool is live if one
    of its engines takes turns, or will once it has loaded other weights.
    """
    return next((pool for pool in preferred if pool in live), None)


def next_pool(shares: Mapping[str, float], given: Mapping[str, int]) -> str:
    """Return the pool for the next trajectory of a domain: among the pools with a
    share, the pool that would lack most of its share. `given` are the trajectories that
    the pools have had. At any time, each pool has had its share of the trajectories to
    within one trajectory per pool. Raises ValueError without shares.
    """
    total = 1 + sum(given.get(pool, 0) for pool in shares)
    whole = sum(shares.values())
    return max(shares, key=lambda pool: shares[pool] / whole * total - given.get(pool, 0))
