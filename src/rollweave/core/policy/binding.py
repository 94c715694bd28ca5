"""Decide which hosts belong to which pool, and bind processes to hosts and their
devices (RollArt §5.2).

A host belongs to a pool if the pool's resource is one of the host's resources, or
whole words of the name of one of its GPUs: `H20` is not `NVIDIA H200`.

A process is an engine, a trainer rank or a worker. It gets devices that no other
process has, in its pool or else in a fallback of the pool. If there are no such
devices, it shares the devices that the fewest processes use, in the first of these
pools whose hosts are large enough. A process on the CPU takes one of the slots that a
host offers to the pool in the same way.
"""

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rollweave.schema.base import Struct
from rollweave.schema.config.engines import PoolConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.hosts import HostSlot, Resources

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


class Demand(Struct, frozen=True, kw_only=True):
    """The need of a process: `devices` GPUs of one host, or none for a process on the
    CPU.

    `pools` are its pool and the fallbacks, in order of preference; without pools, every
    host will do. Roles of one `group`, such as the ranks of a trainer, are bound to as
    few hosts as possible.
    """

    process: str
    devices: int
    pools: tuple[str, ...] = ()
    group: str = ""


class Binding(Struct, frozen=True, kw_only=True):
    """The place of a process: the number of its host, and its GPUs there.

    `shared` is true if another process already had one of these GPUs. `pool` is the
    pool of the demand in which the place was found; empty if the demand names none.
    `group` is the demand's group.
    """

    process: str
    host: int
    devices: tuple[int, ...] = ()
    shared: bool = False
    pool: str = ""
    group: str = ""


class Unbound(Struct, frozen=True, kw_only=True):
    """A process without a place, and the reason."""

    process: str
    reason: str


def bind(
    demands: Iterable[Demand], hosts: Sequence[HostSlot], bound: Iterable[Binding] = ()
) -> tuple[list[Binding], list[Unbound]]:
    """Return the places of the demands, in order, and the demands without a place.
    Roles that are `bound` already keep their places.

    Larger demands choose first, equal demands in order. Of the hosts with enough free
    devices, a process takes the host with the most members of its group; among equals
    the host with the fewest free devices, so that whole hosts remain for large demands.
    A process on the CPU takes a host with a free slot: the host with the most members
    of its group; among equals the host with the fewest processes per core, not counting
    processes of groups. If no slot is free, it takes the host with the fewest processes
    per slot.
    """
    order = list(demands)
    table = _Table(hosts, bound)
    places: dict[str, Binding] = {}
    unbound: list[Unbound] = []
    for demand in sorted(order, key=lambda demand: -demand.devices):
        place = table.place(demand)
        if isinstance(place, Unbound):
            unbound.append(place)
        else:
            places[demand.process] = place
            table.take(place)
    return [places[demand.process] for demand in order if demand.process in places], unbound


class _Table:
    """The hosts, and the processes that are bound to them."""

    def __init__(self, hosts: Sequence[HostSlot], bound: Iterable[Binding]) -> None:
        self._hosts = {host.number: host for host in hosts}
        self._ranks = {host.number: rank for rank, host in enumerate(hosts)}
        self._users = {(host.number, device): 0 for host in hosts for device in host.devices}
        self._processes = dict.fromkeys(self._hosts, 0)
        self._in_slots: Counter[tuple[int, str]] = Counter()
        self._groups: dict[str, dict[int, int]] = {}
        for binding in bound:
            self.take(binding)

    def take(self, binding: Binding) -> None:
        """Record a binding; a binding to a host that is gone has no effect."""
        if binding.host not in self._hosts:
            return
        group = binding.group
        if not group:
            self._processes[binding.host] += 1
        if not binding.devices:
            self._in_slots[binding.host, binding.pool] += 1
        for device in binding.devices:
            if (binding.host, device) in self._users:
                self._users[binding.host, device] += 1
        if group:
            members = self._groups.setdefault(group, {})
            members[binding.host] = members.get(binding.host, 0) + 1

    def place(self, demand: Demand) -> Binding | Unbound:
        pools = {pool: self._members(pool) for pool in demand.pools} or {
            "": list(self._hosts.values())
        }
        if not demand.devices:
            return self._on_cpu(demand, pools)
        for pool, hosts in pools.items():
            with_room = [host for host in hosts if len(self._free(host)) >= demand.devices]
            if with_room:
                host = min(with_room, key=lambda host: self._by_room(host, demand.group))
                chosen = self._free(host)[: demand.devices]
                return _binding(demand, host, pool, devices=chosen)
        return self._shared(demand, pools)

    def _on_cpu(self, demand: Demand, pools: Mapping[str, Sequence[HostSlot]]) -> Binding | Unbound:
        for pool, hosts in pools.items():
            with_room = [host for host in hosts if self._fullness(host, pool) < 1]
            if with_room:
                host = min(with_room, key=lambda host: self._by_load(host, demand.group))
                return _binding(demand, host, pool)
        for pool, hosts in pools.items():
            if hosts:
                host = min(
                    hosts,
                    key=lambda host: (
                        self._fullness(host, pool),
                        self._by_load(host, demand.group),
                    ),
                )
                return _binding(demand, host, pool)
        return self._unbound(demand)

    def _shared(self, demand: Demand, pools: Mapping[str, Sequence[HostSlot]]) -> Binding | Unbound:
        """Share the least used devices in the first pool that has a host with enough
        devices.
        """
        for pool, hosts in pools.items():
            large = [host for host in hosts if len(host.devices) >= demand.devices]
            if large:
                return min(
                    (self._least_used(host, demand, pool) for host in large),
                    key=lambda place: (self._uses(place), self._ranks[place.host]),
                )
        return self._unbound(demand)

    def _least_used(self, host: HostSlot, demand: Demand, pool: str) -> Binding:
        devices = sorted(
            host.devices, key=lambda device: (self._users[host.number, device], device)
        )
        chosen = tuple(sorted(devices[: demand.devices]))
        return _binding(demand, host, pool, devices=chosen, shared=True)

    def _uses(self, place: Binding) -> int:
        return sum(self._users[place.host, device] for device in place.devices)

    def _unbound(self, demand: Demand) -> Unbound:
        where = f"of pool {' or '.join(demand.pools)}" if demand.pools else "of this run"
        largest = max((len(host.devices) for host in self._hosts.values()), default=0)
        reason = (
            f"no host {where} has {demand.devices} devices (the largest host has {largest})"
            if demand.devices
            else f"there is no host {where}"
        )
        return Unbound(process=demand.process, reason=reason)

    def _members(self, pool: str) -> list[HostSlot]:
        return [host for host in self._hosts.values() if pool in host.pools]

    def _free(self, host: HostSlot) -> tuple[int, ...]:
        return tuple(device for device in host.devices if not self._users[host.number, device])

    def _fullness(self, host: HostSlot, pool: str) -> float:
        """Return the processes per slot that the host offers to the pool; 0 if it
        offers any number.
        """
        if pool not in host.slots:
            return 0.0
        slots = host.slots[pool]
        return self._in_slots[host.number, pool] / slots if slots else math.inf

    def _by_load(self, host: HostSlot, group: str) -> tuple[int, float, int]:
        members = self._groups.get(group, {}).get(host.number, 0)
        load = self._processes[host.number] / max(1, host.cpus)
        return -members, load, self._ranks[host.number]

    def _by_room(self, host: HostSlot, group: str) -> tuple[int, int, int]:
        members = self._groups.get(group, {}).get(host.number, 0)
        return -members, len(self._free(host)), self._ranks[host.number]


def _binding(
    demand: Demand,
    host: HostSlot,
    pool: str,
    *,
    devices: tuple[int, ...] = (),
    shared: bool = False,
) -> Binding:
    return Binding(
        process=demand.process,
        host=host.number,
        devices=devices,
        shared=shared,
        pool=pool,
        group=demand.group,
    )
