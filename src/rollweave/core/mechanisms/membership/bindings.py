"""Bind engines, trainer ranks and rollout workers to hosts and their devices, as
`core/policy/binding` decides.

Without [cluster] this machine is the only host or, with `weights.relays`, stands for
that number of hosts, each with a relay. In a colocated run, engines and ranks are bound
independently of each other, and so to the same devices, at the beginning and after the
loss of a host. Each GPU then has at most one rank, and never more engines than the
memory estimate counted on it (`engine_limits`).

Only one process is bound to a host that lends an engine: this engine, while the run
borrows it.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from rollweave.core.policy.binding import Binding, Demand, Unbound, bind
from rollweave.core.state import Engine, Seat, State, WorkerStatus
from rollweave.schema.config.root import RunConfig
from rollweave.schema.events import EngineSlot, WorkerSlot
from rollweave.schema.hosts import HostSlot, RankSlot

TRAINER = "trainer"
"""Group of the trainer's ranks."""


def one_machine(
    relays: int, pools: Iterable[str] = (), devices: Sequence[int] = ()
) -> tuple[HostSlot, ...]:
    """Return the hosts of a run on one machine: a host for each relay, and at least one
    host. All hosts belong to `pools`; the GPUs `devices` are divided among the hosts.
    """
    count = max(1, relays)
    return tuple(
        HostSlot(number=number, pools=tuple(pools), devices=tuple(devices[number::count]))
        for number in range(count)
    )


def bind_all(
    config: RunConfig,
    engines: Iterable[EngineSlot],
    hosts: Sequence[HostSlot],
    *,
    ranks: int | None = None,
) -> tuple[tuple[EngineSlot, ...], tuple[RankSlot, ...], list[Unbound]]:
    """Return the engines with their places, the places of the trainer's ranks, and the
    processes without a place.

    The trainer has so many `ranks` on these hosts; None stands for those with which a
    run begins.
    """
    slots, hosts = list(engines), own(hosts)
    wanted = config.trainer.first_ranks if ranks is None else ranks
    ranks_ = [_rank(config, rank, hosts) for rank in range(wanted)]
    engines_ = [_engine(config, slot, hosts) for slot in slots]
    together = [ranks_, engines_] if config.trainer.colocated else [[*ranks_, *engines_]]
    places: dict[str, Binding] = {}
    unbound: list[Unbound] = []
    for demands in together:
        bindings, without = bind(demands, hosts)
        places |= {binding.process: binding for binding in bindings}
        unbound += without
    of_ranks = [places[demand.process] for demand in ranks_ if demand.process in places]
    return (
        tuple(_placed(slot, places[slot.id]) for slot in slots if slot.id in places),
        tuple(RankSlot(host=place.host, devices=place.devices) for place in of_ranks),
        unbound,
    )


def own(hosts: Iterable[HostSlot]) -> list[HostSlot]:
    """Return the hosts that do not lend an engine."""
    return [host for host in hosts if not host.lends]


def groups_on_gpus(config: RunConfig, hosts: Sequence[HostSlot]) -> list[int]:
    """Return the numbers of the groups of engines that run on GPUs of these hosts."""
    return [
        number
        for number, group in enumerate(config.engines)
        if _on_gpus(config, own(hosts), config.pools_of(group.pool))
    ]


def crowded(config: RunConfig, places: Collection[tuple[object, tuple[int, ...]]]) -> str:
    """Return the rule that is broken if two ranks of the trainer share a GPU, which
    NCCL does not support; "" if no ranks share a GPU.

    A place is the host of a rank and its devices there.
    """
    gpus = len(set(places))
    if gpus == len(places):
        return ""
    pools = config.pools_of(config.trainer.pool)
    where = f" of pool {' or '.join(pools)}" if pools else ""
    return (
        f"must be at most the number of GPUs{where} ({gpus}), since NCCL requires one for each "
        f"rank, got {len(places)}"
    )


def share_gpus(engines: Iterable[EngineSlot | Seat], ranks: Iterable[RankSlot]) -> bool:
    """Return whether some GPU has several of these processes."""
    used = [(slot.host, device) for slot in engines for device in slot.devices]
    used += [(rank.host, device) for rank in ranks for device in rank.devices]
    return len(set(used)) < len(used)


def engine_limits(
    hosts: Iterable[HostSlot], engines: Iterable[EngineSlot | Seat]
) -> dict[int, dict[int, int]]:
    """Return how many engines each GPU of these hosts may have in a colocated run: as
    many as it has now, and at least one.
    """
    engines_on = Counter((slot.host, device) for slot in engines for device in slot.devices)
    return {
        host.number: {device: max(1, engines_on[host.number, device]) for device in host.devices}
        for host in hosts
    }


def bind_engine(config: RunConfig, state: State, slot: EngineSlot) -> EngineSlot | None:
    """Return the engine with a place next to all bound processes; None if there is no
    place. In a run that began without sharing, the engine shares no GPU, whose memory
    may not suffice. In a colocated run, no GPU gets more engines than it had at the
    beginning; the ranks of the trainer, which take turns on the GPU, do not count. A
    borrowed engine is on the host that lends it.
    """
    lender = state.hosts.up.get(slot.host) if slot.lender else None
    if lender is not None and lender.lends:
        return slot
    hosts = own(state.hosts.up.values())
    bound = _bound(config, state, ranks=not config.trainer.colocated)
    if config.trainer.colocated or not state.hosts.shares_gpus:
        may_use = _within_limits(hosts, bound, state.hosts.engine_limits)
    else:
        may_use = hosts
    bindings, _ = bind([_engine(config, slot, hosts)], may_use, bound)
    return _placed(slot, bindings[0]) if bindings else None


def bind_workers(
    config: RunConfig,
    hosts: Sequence[HostSlot],
    engines: Iterable[EngineSlot],
    ranks: Sequence[RankSlot] = (),
) -> tuple[tuple[WorkerSlot, ...], list[Unbound]]:
    """Return the rollout workers with their places next to these engines and ranks of
    the trainer, and the processes without a place. All workers that may exist at the
    same time are included.
    """
    hosts = own(hosts)
    bound = _bound_ranks(config, {host.number: host for host in hosts}, ranks)
    bound += [
        Binding(process=slot.id, host=slot.host, devices=slot.devices, pool=slot.pool)
        for slot in engines
    ]
    demands = [_worker(config, f"w{number}") for number in range(config.workers.maximum)]
    bindings, unbound = bind(demands, hosts, bound)
    return tuple(WorkerSlot(id=place.process, host=place.host) for place in bindings), unbound


def bind_worker(config: RunConfig, state: State, worker_id: str) -> int | None:
    """Return the host for a worker next to all bound processes; None if no host has
    room.
    """
    hosts = own(state.hosts.up.values())
    bindings, _ = bind([_worker(config, worker_id)], hosts, _bound(config, state, ranks=True))
    return bindings[0].host if bindings else None


def bind_ranks(config: RunConfig, state: State) -> list[RankSlot]:
    """Return the places of the trainer's ranks next to the engines: the present places,
    unless one of their hosts is lost. Empty if some rank has no place. In a colocated
    run the engines do not count, because they take turns on the GPUs.
    """
    present, hosts = state.hosts.ranks, own(state.hosts.up.values())
    if all(rank.host in state.hosts.up for rank in present):
        return present
    demands = [_rank(config, rank, hosts) for rank in range(len(present))]
    bound = _bound(config, state, engines=not config.trainer.colocated, ranks=False)
    bindings, unbound = bind(demands, hosts, bound)
    ranks = [RankSlot(host=place.host, devices=place.devices) for place in bindings]
    return [] if unbound or crowded(config, _on_devices(ranks)) else ranks


def engines_in_the_way(config: RunConfig, state: State) -> list[Engine]:
    """Return the engines on GPUs of the trainer's ranks, in a run that began without
    sharing.
    """
    if config.trainer.colocated or state.hosts.shares_gpus:
        return []
    taken = {(rank.host, device) for rank in state.hosts.ranks for device in rank.devices}
    return [
        engine
        for engine in state.engines.values()
        if any((engine.seat.host, device) in taken for device in engine.seat.devices)
    ]


def _within_limits(
    hosts: Iterable[HostSlot], bound: Iterable[Binding], limits: Mapping[int, Mapping[int, int]]
) -> list[HostSlot]:
    """Return the hosts without the devices that have as many processes as their limit.
    The limit of a host that joined later is the highest of all limits. Without limits,
    as in a run that is not colocated, it is 1.
    """
    used = Counter((binding.host, device) for binding in bound for device in binding.devices)
    highest = max((limit for of_host in limits.values() for limit in of_host.values()), default=1)

    def has_room(host: HostSlot, device: int) -> bool:
        of_host = limits.get(host.number, {})
        return used[host.number, device] < of_host.get(device, highest)

    return [
        msgspec.structs.replace(
            host, devices=tuple(device for device in host.devices if has_room(host, device))
        )
        for host in hosts
    ]


def _on_devices(ranks: Iterable[RankSlot]) -> list[tuple[object, tuple[int, ...]]]:
    return [(rank.host, rank.devices) for rank in ranks if rank.devices]


def _placed(slot: EngineSlot, place: Binding) -> EngineSlot:
    return msgspec.structs.replace(slot, host=place.host, devices=place.devices, pool=place.pool)


def _rank(config: RunConfig, rank: int, hosts: Sequence[HostSlot]) -> Demand:
    pools = config.pools_of(config.trainer.pool)
    return Demand(
        process=f"{TRAINER} rank {rank}",
        devices=1 if _on_gpus(config, hosts, pools) else 0,
        pools=pools,
        group=TRAINER,
    )


def _engine(config: RunConfig, slot: EngineSlot, hosts: Sequence[HostSlot]) -> Demand:
    group = config.engines[slot.group] if slot.group < len(config.engines) else None
    pools = config.pools_of(group.pool if group is not None else None)
    attached = group is not None and group.address
    return Demand(
        process=slot.id,
        devices=slot.degree if not attached and _on_gpus(config, hosts, pools) else 0,
        pools=pools,
    )


def _worker(config: RunConfig, worker_id: str) -> Demand:
    return Demand(process=worker_id, devices=0, pools=config.pools_of(config.workers.pool))


def _on_gpus(config: RunConfig, hosts: Sequence[HostSlot], pools: tuple[str, ...]) -> bool:
    """True if a process of these pools runs on GPUs. With device `auto` it runs on the
    CPU if no host of its pools has a GPU.
    """
    if config.model.device == "auto" and pools:
        hosts = [host for host in hosts if set(pools) & set(host.pools)]
    return config.model.device != "cpu" and any(host.devices for host in hosts)


def _bound(config: RunConfig, state: State, *, engines: bool = True, ranks: bool) -> list[Binding]:
    """Return the places of all processes, with `engines` and `ranks` or without."""
    of_engines = [
        Binding(
            process=engine.id,
            host=engine.seat.host,
            devices=engine.seat.devices,
            pool=engine.seat.pool,
        )
        for engine in (state.engines.values() if engines else ())
        if engine.seat.devices or not engine.draining
    ]
    up = state.hosts.up
    workers = [
        Binding(
            process=worker.id,
            host=worker.host,
            pool=_pool_of(config, config.workers.pool, up.get(worker.host)),
        )
        for worker in state.workers.values()
        if worker.status is not WorkerStatus.STOPPED
    ]
    of_trainer = _bound_ranks(config, up, state.hosts.ranks if ranks else ())
    return [*of_engines, *workers, *of_trainer]


def _bound_ranks(
    config: RunConfig, hosts: Mapping[int, HostSlot], ranks: Sequence[RankSlot]
) -> list[Binding]:
    return [
        Binding(
            process=f"{TRAINER} rank {rank}",
            host=slot.host,
            devices=slot.devices,
            pool=_pool_of(config, config.trainer.pool, hosts.get(slot.host)),
            group=TRAINER,
        )
        for rank, slot in enumerate(ranks)
    ]


def _pool_of(config: RunConfig, pool: str | None, host: HostSlot | None) -> str:
    """Return the pool through which a process that names `pool` is on this host. It is
    the first pool among `pool` and its fallbacks to which the host belongs.
    """
    pools = config.pools_of(pool) if host is not None else ()
    return next((name for name in pools if host is not None and name in host.pools), "")
