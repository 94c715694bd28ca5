"""The simulated hosts of a run: those of its pools, its cluster or its relays.

A pool has as many hosts as its engines need, with eight GPUs
each. The simulated trainer runs on other machines, unless the run is colocated: it then
has a rank on each of `trainer.ranks` GPUs of these hosts.
"""

import re
from collections import Counter
from collections.abc import Iterable

from rollweave.core.mechanisms.membership.bindings import (
    bind_all,
    bind_workers,
    crowded,
    one_machine,
)
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.events import EngineSlot, WorkerSlot
from rollweave.schema.hosts import HostSlot, RankSlot
from rollweave_sim.cost import slowdown_between_sites
from rollweave_sim.hardware import GPUS, GPUS_PER_MACHINE

NO_POOL = ""
"""Pool of all engines in a run without pools."""


class SimHosts:
    """The hosts of a world: some may be lost, and others may join.

    `up` are the present hosts by number; empty stands for one host. `first` are those
    with which a world begins, and `ranks` the first places of the trainer in a
    colocated run, or in one whose ranks change.
    """

    def __init__(self, config: RunConfig) -> None:
        """Raises ConfigError."""
        self._config = config
        self.relays = relays_of(config)
        pools = [pool for pool in config.pools for _ in range(_count(config, pool))]
        self._first_pools = pools or [NO_POOL] * (self.relays if config.cluster is not None else 0)
        self.begin()

    def begin(self) -> None:
        """Begin a world."""
        self.up: dict[int, HostSlot] = {}
        self.ranks: tuple[RankSlot, ...] = ()
        self._pools: list[str] = []  # by the number of a host
        for pool in self._first_pools:
            self.add(pool)
        self.first = tuple(self.up.values())
        if not self.first and self.relays:  # the core places these itself
            self.up = {host.number: host for host in one_machine(self.relays)}
            self._pools = [NO_POOL] * len(self.up)

    def add(self, pool: str) -> HostSlot:
        """Add a host of this pool, with a number that no other has had in this
        world.
        """
        number = len(self._pools)
        slot = HostSlot(number=number, name=f"{pool or 'host'}-{number}")
        if pool or self._config.trainer.colocated:
            known = self._config.pools
            resource = known[pool].resource if pool else ""
            slot = HostSlot(
                number=number,
                name=slot.name,
                machine=slot.name,
                cpus=GPUS_PER_MACHINE,
                devices=tuple(range(GPUS_PER_MACHINE if self._has_engines(pool) else 0)),
                pools=tuple(name for name in known if known[name].resource == resource),
            )
        self.up[number] = slot
        self._pools.append(pool)
        return slot

    def _has_engines(self, pool: str) -> bool:
        """True unless only rollout workers use this pool."""
        config = self._config
        named = [config.trainer.pool, *(group.pool for group in config.engines)]
        return pool != config.workers.pool or any(pool in config.pools_of(one) for one in named)

    def lose(self, number: int) -> str | None:
        """Remove a host. Returns its pool, or None if it is not up."""
        return self._pools[number] if self.up.pop(number, None) is not None else None

    def pool_of(self, number: int) -> str:
        """Return the pool whose hardware the host has."""
        return self._pools[number] if number < len(self._pools) else NO_POOL

    def slowdown(self, one: int, other: int) -> float:
        """Return how many times as long weights travel between these hosts as between
        hosts of one site: `sim.link` joins the sites.
        """
        assert self._config.sim is not None, "only a simulation has simulated hosts"
        if self._site(one) == self._site(other):
            return 1.0
        return slowdown_between_sites(self._config.sim.link)

    def _site(self, number: int) -> str:
        pool = self._config.pools.get(self.pool_of(number))
        return pool.site if pool is not None else ""

    def place(self, slots: Iterable[EngineSlot], *, ranks: int = 0) -> tuple[EngineSlot, ...]:
        """Return the engines of a new world with their places, and note those of the
        trainer's ranks, of which there are so many if their number changes. Raises
        ConfigError if a pool lacks GPUs.
        """
        slots = tuple(slots)
        if not self.first:
            self.ranks = (RankSlot(),) * (ranks if self._config.trainer.elastic else 0)
            return slots  # they are placed as on one machine
        config = self._config
        placed, self.ranks, unbound = bind_all(
            config, slots, self.first, ranks=None if config.trainer.colocated else 0
        )
        if unbound:
            raise ConfigError(f"{unbound[0].process}: {unbound[0].reason}")
        if problem := crowded(config, [(one.host, one.devices) for one in self.ranks]):
            raise ConfigError(f"trainer.ranks {problem}")
        users = Counter((slot.host, device) for slot in placed for device in slot.devices)
        for slot in placed:
            if any(users[slot.host, device] > 1 for device in slot.devices):
                raise ConfigError(
                    f"cluster.hosts must have {GPUS_PER_MACHINE} GPUs for its engines each, got "
                    f"{len(self.first)}"
                )
        return placed

    def place_workers(self, engines: Iterable[EngineSlot]) -> tuple[WorkerSlot, ...]:
        """Return the rollout workers with which a world begins, with their places."""
        hosts = self.first or one_machine(self.relays)
        workers, _ = bind_workers(self._config, hosts, engines, self.ranks)
        return workers[: self._config.workers.first]


def relays_of(config: RunConfig) -> int:
    """Return the number of relays: one for each host of a cluster, else
    `weights.relays`.
    """
    if config.cluster is None:
        return config.weights.relays
    return sum(_count(config, pool) for pool in config.pools) or config.cluster.hosts or 1


def degrees_of(config: RunConfig) -> dict[str, list[int]]:
    """Return the degrees of the engines that may run in each pool, also as a fallback.

    Raises ConfigError if a group of engines names no pool, though the run has some.
    """
    if not config.pools:
        return {NO_POOL: [*(config.degrees or (group.degree for group in config.engines))]}
    if config.allocation is not None:
        raise ConfigError(
            "allocation must be left out in a simulation with [pools], whose hosts are those that "
            f"the engines need, got {config.allocation}"
        )
    degrees: dict[str, list[int]] = {}
    for number, group in enumerate(config.engines):
        if group.pool is None:
            raise ConfigError(
                f"engines.{number}.pool must be given in a simulation with [pools], got none"
            )
        for pool in config.pools_of(group.pool):
            degrees.setdefault(pool, []).append(group.degree)
    return degrees


def gpu_of(config: RunConfig, pool: str) -> tuple[str, str]:
    """Return the name of the GPU of a pool, and the key of the setting that gives it:
    that of [sim] if the pool's resource names none.
    """
    assert config.sim is not None, "only a simulation has simulated hosts"
    if pool == NO_POOL:
        return config.sim.gpu, "sim.gpu"
    words = re.split(r"[^a-z0-9]+", config.pools[pool].resource.lower())
    named = [word for word in words if word in GPUS]
    return (named[0], f"pools.{pool}.resource") if named else (config.sim.gpu, "sim.gpu")


def _count(config: RunConfig, pool: str) -> int:
    """Return the number of hosts of a pool: as many as its engines need if the largest
    ones choose first; one if only workers are there.
    """
    groups = [group for group in config.engines if group.pool == pool]
    degrees = [group.degree for group in groups for _ in range(group.count)]
    free: list[int] = []
    for degree in sorted(degrees, reverse=True):
        host = next((n for n, room in enumerate(free) if room >= degree), None)
        if host is None:
            free.append(max(0, GPUS_PER_MACHINE - degree))
        else:
            free[host] -= degree
    return max(len(free), config.workers.elastic and config.workers.pool == pool)
