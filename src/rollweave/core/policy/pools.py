"""Decide which hosts belong to which pool (RollArt §5.2).

A host belongs to a pool if the pool's resource is one of the host's resources, or
whole words of the name of one of its GPUs: `H20` is not `NVIDIA H200`.
"""

import difflib
import math
import re
from collections.abc import Iterable, Mapping

from rollweave.schema.base import Struct
from rollweave.schema.config.cluster import PoolConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import Resources

ALIKE = str.maketrans("oil", "011")
"""Letters that are often written for digits in the names of GPUs."""


class EmptyPool(Struct, frozen=True, kw_only=True):
    """A pool to which no host belongs.

    `offered` are the resources and GPUs of the hosts; `nearest` is the offered name, or
    the word of such a name, that is most like the pool's resource, or "".
    """

    pool: str
    resource: str
    offered: tuple[str, ...]
    nearest: str

    @property
    def field(self) -> str:
        return f"pools.{self.pool}.resource"

    def describe(self) -> str:
        """Return the rule that the pool's resource breaks, and its value."""
        offered = ", ".join(self.offered) or "they have none that a pool can ask for"
        hint = f" (did you mean {self.nearest}?)" if self.nearest else ""
        return f"must be a resource or GPU of a host ({offered}), got {self.resource!r}{hint}"


def pools_of(pools: Mapping[str, PoolConfig], host: Resources) -> tuple[str, ...]:
    """Return the pools to which this host belongs."""
    return tuple(
        name
        for name, pool in pools.items()
        if pool.resource in host.labels
        or any(_has_words(device.kind, pool.resource) for device in host.devices)
    )


def slots_of(pools: Mapping[str, PoolConfig], host: Resources) -> dict[str, int]:
    """Return the number of processes on CPUs that this host offers to its pools,
    without the pools for which it names no amount. A fraction of a process counts as a
    process.
    """
    amounts = {name: host.labels.get(pool.resource, math.inf) for name, pool in pools.items()}
    return {name: max(1, int(amount)) for name, amount in amounts.items() if amount < math.inf}


def empty_pools(pools: Mapping[str, PoolConfig], hosts: Iterable[Resources]) -> list[EmptyPool]:
    """Return the pools to which none of these hosts belongs."""
    present = list(hosts)
    offered = dict.fromkeys(
        name
        for host in present
        for name in (*host.labels, *(device.kind for device in host.devices))
    )
    served = {name for host in present for name in pools_of(pools, host)}
    return [
        EmptyPool(
            pool=name,
            resource=pool.resource,
            offered=tuple(offered),
            nearest=_nearest(pool.resource, offered),
        )
        for name, pool in pools.items()
        if name not in served
    ]


def unserved(config: RunConfig, empty: Iterable[EmptyPool]) -> list[EmptyPool]:
    """Return the `empty` pools that are needed because all of their fallbacks are
    empty, too.
    """
    without = {pool.pool: pool for pool in empty}
    named = (config.trainer.pool, config.workers.pool, *(group.pool for group in config.engines))
    needed = {
        pool
        for pool in named
        if pool is not None and all(name in without for name in config.pools_of(pool))
    }
    return [pool for name, pool in without.items() if name in needed]


def _has_words(kind: str, words: str) -> bool:
    """Return whether `words` are in the name of a GPU, not as parts of other words."""
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", kind) is not None


def _nearest(resource: str, offered: Iterable[str]) -> str:
    """Return the resource, GPU or word of a GPU's name that is most like `resource`."""
    words = {
        _alike(word): word
        for name in offered
        for word in (name, *re.findall(r"\w+", name))
        if len(word) > 1
    }
    near = difflib.get_close_matches(_alike(resource), words, n=1)
    return words[near[0]] if near else ""


def _alike(name: str) -> str:
    """Return a form of the name that is equal for names that are easily confused."""
    return name.casefold().translate(ALIKE)
