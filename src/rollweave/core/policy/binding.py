"""Decide which role gets which devices of which host (RollArt §5.2).

A role is an engine or a trainer rank. Each gets devices that no other role has, from
its own pool or, where that is short, from a fallback. Where all of these are taken, it
shares the devices of its own pool that the fewest roles have.
"""

from collections.abc import Iterable, Mapping, Sequence

from rollweave.schema.base import Struct
from rollweave.schema.hosts import HostSlot


class Demand(Struct, frozen=True, kw_only=True):
    """What a role needs: `devices` GPUs of one host, or none for a role on the CPU.

    `pools` are its own pool and then the fallbacks; none stands for every host. Roles of
    one `group`, such as the ranks of a trainer, are bound to few hosts.
    """

    role: str
    devices: int
    pools: tuple[str, ...] = ()
    group: str = ""


class Binding(Struct, frozen=True, kw_only=True):
    """The place of a role: the number of its host, and its GPUs there.

    `shared` is true if another role had these GPUs already. `pool` is the one of its
    demand through which the place was found, empty if any host would do.
    """

    role: str
    host: int
    devices: tuple[int, ...] = ()
    shared: bool = False
    pool: str = ""


class Unbound(Struct, frozen=True, kw_only=True):
    """A role for which there is no place, and why."""

    role: str
    reason: str


def bind(
    demands: Iterable[Demand], hosts: Sequence[HostSlot], bound: Iterable[Binding] = ()
) -> tuple[list[Binding], list[Unbound]]:
    """Return a place for each demand beside those that are `bound` already, in order,
    and the demands for which no host has enough devices.

    The larger a demand, the earlier it chooses; among equal ones the first does.
    Among hosts that have enough free devices a role takes the one where its group is
    already, then the one with the fewest free devices, so that large demands find a
    whole host. Roles on the CPU go where the fewest roles per core are, those of groups
    aside.
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
            places[demand.role] = place
            table.take(place, demand.group)
    return [places[demand.role] for demand in order if demand.role in places], unbound


class _Table:
    """The hosts, and the roles that are bound to them."""

    def __init__(self, hosts: Sequence[HostSlot], bound: Iterable[Binding]) -> None:
        self._hosts = {host.number: host for host in hosts}
        self._ranks = {host.number: rank for rank, host in enumerate(hosts)}
        self._users = {(host.number, device): 0 for host in hosts for device in host.devices}
        self._roles = dict.fromkeys(self._hosts, 0)
        self._groups: dict[str, dict[int, int]] = {}
        for binding in bound:
            self.take(binding, "")

    def take(self, binding: Binding, group: str) -> None:
        """Record a binding. One to a host that is gone takes nothing."""
        if binding.host not in self._hosts:
            return
        if not group:
            self._roles[binding.host] += 1
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
            for pool, hosts in pools.items():
                if hosts:
                    host = min(hosts, key=self._by_load)
                    return Binding(role=demand.role, host=host.number, pool=pool)
            return self._unbound(demand)
        for pool, hosts in pools.items():
            with_room = [host for host in hosts if len(self._free(host)) >= demand.devices]
            if with_room:
                host = min(with_room, key=lambda host: self._by_room(host, demand.group))
                chosen = self._free(host)[: demand.devices]
                return Binding(role=demand.role, host=host.number, devices=chosen, pool=pool)
        return self._shared(demand, pools)

    def _shared(self, demand: Demand, pools: Mapping[str, Sequence[HostSlot]]) -> Binding | Unbound:
        """Share the least used devices of the first pool that has enough of them."""
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
        return Binding(role=demand.role, host=host.number, devices=chosen, shared=True, pool=pool)

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
        return Unbound(role=demand.role, reason=reason)

    def _members(self, pool: str) -> list[HostSlot]:
        return [host for host in self._hosts.values() if pool in host.pools]

    def _free(self, host: HostSlot) -> tuple[int, ...]:
        return tuple(device for device in host.devices if not self._users[host.number, device])

    def _by_load(self, host: HostSlot) -> tuple[float, int]:
        return self._roles[host.number] / max(1, host.cpus), self._ranks[host.number]

    def _by_room(self, host: HostSlot, group: str) -> tuple[int, int, int]:
        members = self._groups.get(group, {}).get(host.number, 0)
        return -members, len(self._free(host)), self._ranks[host.number]
