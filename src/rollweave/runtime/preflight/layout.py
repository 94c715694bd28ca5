"""Predict the processes of a run, with their places on its hosts, and add up the memory
that they need on each GPU and each host.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from rollweave.core.mechanisms.membership.bindings import (
    bind_all,
    bind_workers,
    crowded,
    groups_on_gpus,
    one_machine,
)
from rollweave.core.mechanisms.membership.members import first_engines
from rollweave.core.policy.binding import Unbound
from rollweave.core.policy.pools import empty_pools, unserved
from rollweave.core.policy.scheduling import scheduling
from rollweave.io.cpu import computed_dtype, describe_computation
from rollweave.runtime.hosts.cluster import slot_of
from rollweave.runtime.hosts.hosts import hosts_here
from rollweave.runtime.hosts.resources import devices as gpus
from rollweave.runtime.preflight.checks import Check, fail, human_bytes, ok, refused, warn
from rollweave.runtime.preflight.machine import gpu_memory, memory_bytes
from rollweave.runtime.preflight.memory import (
    Part,
    engine_parts,
    other_parts,
    rank_parts,
    relay_parts,
    worker_parts,
)
from rollweave.schema.base import Struct
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import FieldErrors
from rollweave.schema.events import EngineSlot, WorkerSlot
from rollweave.schema.hosts import Device, HostSlot, RankSlot, Resources
from rollweave.weights.checkpoint import ModelShape

HERE = "this host"
"""Name of the machine of a run without a cluster."""

COMPUTED = "model.dtype"
"""Name of the check of the format in which the model is computed."""

COMFORT = 0.8
"""Share of a memory from which an estimate is reported as a warning."""

CONTROLLER, PREDICTOR, WORKER, RELAY, RANK, ENGINE = (
    "controller",
    "predictor",
    "worker",
    "relay",
    "trainer rank",
    "engine",
)
"""The kinds of processes."""


class PlannedHost(Struct, frozen=True, kw_only=True):
    """A host and its memory in bytes, 0 if unknown.

    `devices` are its GPUs, with the indices of `slot` and the memory that a run may
    use. Hosts of one `machine` share its memory.
    """

    slot: HostSlot
    name: str
    machine: str
    memory_bytes: int
    devices: tuple[Device, ...] = ()


class Process(Struct, frozen=True, kw_only=True):
    """A process of the run. `host` is "" if it is not known yet.

    `kind` is what it does, `group` the index of an engine's section, and `threads` the
    number of threads with which it computes.
    """

    kind: str
    name: str
    host: str
    pool: str = ""
    on_gpu: bool = False
    devices: tuple[int, ...] = ()
    group: int = 0
    threads: int = 0
    parts: tuple[Part, ...]

    @property
    def device_bytes(self) -> int:
        """The memory that it needs on each of its GPUs in its own turn. What only a
        restart needs counts in the turn of the engines.
        """
        parts = [
            part.nbytes
            for part in self.parts
            if self.on_gpu and part.on_device and not part.at_restart
        ]
        return sum(parts) // max(1, len(self.devices))

    @property
    def host_bytes(self) -> int:
        """The main memory that it needs."""
        return sum(part.nbytes for part in self.parts if not (self.on_gpu and part.on_device))


class Memory(Struct, frozen=True, kw_only=True):
    """The memory of a GPU, or the main memory of a machine if `device` is None, and the
    processes that use it.
    """

    host: str
    device: Device | None
    nbytes: int
    users: tuple[Process, ...]

    @property
    def needed(self) -> int:
        """The memory that all users need. Of ranks and engines that take turns, the
        larger need counts.
        """
        turns = self._turns()
        return turns.pop("", 0) + max(turns.values(), default=0)

    def _turns(self) -> dict[str, int]:
        """Return what is needed here at all times (""), and beside it in the turn of
        the processes of each kind.
        """
        turns: dict[str, int] = {}
        for user in self.users:
            devices = 1 if self.device is None else max(1, len(user.devices))
            sizes = Counter[str]()
            for part in self._parts_of(user):
                sizes[_turn_of(user, part)] += part.nbytes
            for turn, nbytes in sizes.items():
                turns[turn] = turns.get(turn, 0) + nbytes // devices
        return turns

    def _parts_of(self, process: Process) -> Iterator[Part]:
        """Yield what the process needs here."""
        for part in process.parts:
            if (process.on_gpu and part.on_device) == (self.device is not None):
                yield part

    @property
    def share(self) -> float:
        """The share of the memory that is needed; 0 if the size is not known."""
        return self.needed / self.nbytes if self.nbytes else 0.0

    def need_of(self, process: Process) -> int:
        return process.host_bytes if self.device is None else process.device_bytes

    def largest(self) -> tuple[Process, Part]:
        """Return the part that needs the most memory, and a process that has it."""
        turns = self._turns()
        turns.pop("", None)
        most = max(turns, key=lambda kind: turns[kind], default="")
        sizes: dict[tuple[str, str], int] = {}
        examples: dict[tuple[str, str], tuple[Process, Part]] = {}
        for process in self.users:
            for part in self._parts_of(process):
                if _turn_of(process, part) in ("", most):
                    key = process.kind, part.what
                    sizes[key] = sizes.get(key, 0) + part.nbytes
                    examples.setdefault(key, (process, part))
        return examples[max(sizes, key=lambda key: sizes[key])]


def _turn_of(process: Process, part: Part) -> str:
    """Return the kind of processes in whose turn a part is needed; "" for all times."""
    if part.at_restart:
        return ENGINE
    return process.kind if part.in_turn else ""


class Layout(Struct, frozen=True, kw_only=True):
    """The processes of a run, the memories that they use, which are known only if the
    hosts are, and those without a place.
    """

    processes: tuple[Process, ...]
    memories: tuple[Memory, ...]
    unbound: tuple[Unbound, ...] = ()


def this_machine(config: RunConfig) -> list[PlannedHost]:
    """Return this machine as the hosts of a run.

    Raises RuntimeError if a GPU does not work, and `HostError` if GPUs cannot be
    listed.
    """
    _, available = memory_bytes()
    return _one_machine(config, HERE, available, _gpus_here(config.model.device))


def _one_machine(
    config: RunConfig, machine: str, available: int, devices: tuple[Device, ...]
) -> list[PlannedHost]:
    """Return the hosts for which a machine with this memory and these GPUs stands."""
    relays = config.weights.relays
    names = hosts_here(relays).by_number
    indices = [device.index for device in devices]
    return [
        PlannedHost(
            slot=slot,
            name=names[slot.number].name if relays else machine,
            machine=machine,
            memory_bytes=available,
            devices=devices,
        )
        for slot in one_machine(relays, config.pools, indices)
    ]


def _gpus_here(device: str) -> tuple[Device, ...]:
    """Return the GPUs of this machine that a run with this `model.device` uses, each
    with its free memory.
    """
    if device == "cpu":
        return ()
    # without the driver's program, all processes use the first GPU
    listed = gpus() or ((Device(index=0, kind="", memory_bytes=0),) if device == "cuda" else ())
    try:
        return tuple(
            msgspec.structs.replace(gpu, memory_bytes=gpu_memory(f"cuda:{place}")[1])
            for place, gpu in enumerate(listed)
        )
    except (RuntimeError, AssertionError):
        if device == "auto":
            return ()  # torch sees none of them
        raise


def with_device(config: RunConfig, hosts: Sequence[PlannedHost] | None) -> RunConfig:
    """Return the configuration with the device that `auto` stands for on these hosts:
    the CPU if they are not known.
    """
    if config.model.device != "auto":
        return config
    device = "cuda" if any(host.devices for host in hosts or ()) else "cpu"
    model = config.model.model_copy(update={"device": device})
    return config.model_copy(update={"model": model})


def described(config: RunConfig, hosts: Mapping[str, Resources]) -> list[PlannedHost]:
    """Return the hosts that would join with these resources. A run without a cluster
    has one, which stands for the machine of the run.
    """
    if config.cluster is None:
        ((name, host),) = hosts.items()
        devices = () if config.model.device == "cpu" else host.devices
        return _one_machine(config, name, host.memory_bytes, devices)
    return [
        PlannedHost(
            slot=slot_of(config.pools, number, name, host),
            name=name,
            machine=name,
            memory_bytes=host.memory_bytes,
            devices=host.devices,
        )
        for number, (name, host) in enumerate(hosts.items())
    ]


def lay_out(config: RunConfig, shape: ModelShape, hosts: Sequence[PlannedHost] | None) -> Layout:
    """Return the processes with which a run begins, their places and their memory.

    `hosts` is None if those of a cluster are not known.
    """
    engines, ranks = first_engines(config), tuple(RankSlot() for _ in range(config.trainer.ranks))
    workers = tuple(WorkerSlot(id=f"w{number}") for number in range(config.workers.count))
    unbound: list[Unbound] = []
    if hosts is not None:
        slots = [host.slot for host in hosts]
        engines, ranks, unbound = bind_all(config, engines, slots)
        workers, more = bind_workers(config, slots, engines, ranks)
        unbound = [*unbound, *more]
    plan = _Plan(with_device(config, hosts), shape, hosts)
    processes = [
        *plan.controller(),
        *(plan.worker(slot) for slot in workers),
        *plan.relays(ranks, engines),
        *(plan.rank(number, slot) for number, slot in enumerate(ranks)),
        *(plan.engine(slot) for slot in engines),
    ]
    order = {host.name: number for number, host in enumerate(hosts or ())}
    processes.sort(key=lambda process: order.get(process.host, -1))
    return Layout(
        processes=tuple(processes),
        memories=tuple(_memories(processes, hosts or ())),
        unbound=tuple(unbound),
    )


def check_pools(config: RunConfig, hosts: Mapping[str, Resources]) -> Iterator[Check]:
    """Refuse pools without hosts, unless their fallbacks have some."""
    empty = empty_pools(config.pools, hosts.values())
    needed = unserved(config, empty)
    for pool in empty:
        yield (fail if pool in needed else warn)(pool.field, pool.describe())


def check_layout(
    config: RunConfig, layout: Layout, hosts: Sequence[PlannedHost] | None
) -> Iterator[Check]:
    """Refuse processes that have no place, or that need too much memory."""
    if hosts is None:
        return
    count = sum(len(host.devices) for host in hosts)
    try:
        config.check_on_gpus(groups_on_gpus(config, [host.slot for host in hosts]))
    except FieldErrors as error:
        yield from map(refused, error.errors)
    config = with_device(config, hosts)
    if config.model.device == "cuda" and not count:
        yield fail("model.device", f"must be cpu on hosts without GPUs, got {config.model.device}")
        return
    if config.model.dtype != "float32" and any(group.server is None for group in config.engines):
        dtype, device = config.model.dtype, config.model.device
        native = computed_dtype(dtype, device) == dtype
        yield (ok if native else warn)(COMPUTED, describe_computation(dtype, device))
    for one in layout.unbound:
        yield fail(
            _field_of(config, one.process), f"must have a place, got {one.process}: {one.reason}"
        )
    if config.cluster is not None:
        yield from _check_cores(layout, hosts)
    yield from check_fit(config, layout)


def check_fit(config: RunConfig, layout: Layout) -> Iterator[Check]:
    """Refuse ranks that share a GPU, engines and ranks that are to take turns and share
    no host, and processes that need too much memory.
    """
    ranks = [process for process in layout.processes if process.kind == RANK]
    places = [(rank.host, rank.devices) for rank in ranks if rank.devices]
    if problem := crowded(config, places):
        yield fail("trainer.ranks", problem)
    elif problem := _apart(config, layout):
        yield fail("trainer.pool", problem)
    else:
        yield from _check_memory(config, layout.memories)


def _apart(config: RunConfig, layout: Layout) -> str:
    """Return the rule that is broken if engines and ranks are to take turns, and no
    host has both; "" otherwise.
    """
    if config.cluster is None or not config.trainer.colocated:
        return ""
    hosts = {
        kind: dict.fromkeys(one.host for one in layout.processes if one.kind == kind)
        for kind in (RANK, ENGINE)
    }
    if not all(hosts.values()) or hosts[RANK].keys() & hosts[ENGINE].keys():
        return ""
    return (
        "must be of hosts that have engines, since both take turns on the same devices "
        f"(trainer.colocated), got ranks on {', '.join(hosts[RANK])} and engines on "
        f"{', '.join(hosts[ENGINE])}"
    )


class _Plan:
    """Makes the processes of one run."""

    def __init__(
        self, config: RunConfig, shape: ModelShape, hosts: Sequence[PlannedHost] | None
    ) -> None:
        self._config, self._shape, self._hosts = config, shape, hosts
        self._names = {host.slot.number: host.name for host in hosts or ()}
        self._on_gpu = config.model.device == "cuda"

    def controller(self) -> Iterator[Process]:
        """Yield the processes on the controller's machine."""
        config = self._config
        cluster = config.cluster
        here = self._names.get(0, "") if cluster is None else cluster.host
        yield Process(kind=CONTROLLER, name="", host=here, parts=tuple(other_parts()))
        if scheduling(config.rollout, config.ablation).predicts:
            name = config.rollout.predictor
            yield Process(kind=PREDICTOR, name=name, host=here, parts=tuple(other_parts()))

    def worker(self, slot: WorkerSlot) -> Process:
        return Process(
            kind=WORKER,
            name=slot.id,
            host=self._names.get(slot.host, ""),
            pool=self._config.workers.pool or "",
            threads=1,
            parts=tuple(worker_parts()),
        )

    def relays(self, ranks: Sequence[RankSlot], engines: Sequence[EngineSlot]) -> Iterator[Process]:
        """The relays. That beside the trainer's first rank shares its memory if all
        ranks are there; otherwise it puts the versions together.
        """
        config = self._config
        count = config.weights.relays
        if config.cluster is not None:
            count = len(self._hosts) if self._hosts is not None else config.cluster.hosts or 1
        first = ranks[0].host if ranks else 0
        together = all(rank.host == first for rank in ranks)
        with_engines = {engine.host for engine in engines} if self._hosts is not None else None
        for number in range(count):
            if number == first:
                stores = not together
            else:
                stores = with_engines is None or number in with_engines
            parts = relay_parts(config, self._shape, stores=stores)
            name = self._names.get(number, "")
            yield Process(kind=RELAY, name=str(number), host=name, parts=tuple(parts))

    def rank(self, number: int, slot: RankSlot) -> Process:
        return Process(
            kind=RANK,
            name=str(number),
            host=self._names.get(slot.host, ""),
            pool=self._config.trainer.pool or "",
            on_gpu=self._is_on_gpu(slot.devices),
            devices=self._devices(slot.devices),
            threads=1,
            parts=tuple(rank_parts(self._config, self._shape, rank=number)),
        )

    def engine(self, slot: EngineSlot) -> Process:
        group = self._config.engines[slot.group]
        return Process(
            kind=ENGINE,
            name=slot.id,
            host=self._names.get(slot.host, ""),
            pool=group.pool or "",
            on_gpu=self._is_on_gpu(slot.devices),
            devices=self._devices(slot.devices),
            group=slot.group,
            threads=1 if self._is_on_gpu(slot.devices) else slot.degree,
            parts=tuple(engine_parts(self._config, self._shape, group)),
        )

    def _is_on_gpu(self, devices: tuple[int, ...]) -> bool:
        """Return whether a process that is bound to these devices runs on a GPU. Only
        on known hosts of a cluster is every process bound.
        """
        bound = self._hosts is not None and self._config.cluster is not None
        return bool(devices) if bound else self._on_gpu

    def _devices(self, devices: tuple[int, ...]) -> tuple[int, ...]:
        """Return the GPUs that a process may use: those to which it is bound, or, on
        one machine where it is not bound, all.
        """
        if devices or not self._on_gpu or self._config.cluster is not None:
            return devices
        return tuple(device.index for host in (self._hosts or ())[:1] for device in host.devices)


def _memories(processes: Sequence[Process], hosts: Sequence[PlannedHost]) -> Iterator[Memory]:
    for machine in dict.fromkeys(host.machine for host in hosts):
        members = {host.name: host for host in hosts if host.machine == machine}
        users = [process for process in processes if process.host in members]
        first = next(iter(members.values()))
        for device in first.devices:
            yield Memory(
                host=machine,
                device=device,
                nbytes=device.memory_bytes,
                users=tuple(user for user in users if device.index in user.devices),
            )
        yield Memory(host=machine, device=None, nbytes=first.memory_bytes, users=tuple(users))


def _check_cores(layout: Layout, hosts: Sequence[PlannedHost]) -> Iterator[Check]:
    """Warn of hosts whose processes share cores."""
    for machine in dict.fromkeys(host.machine for host in hosts):
        members = [host for host in hosts if host.machine == machine]
        names = [host.name for host in members]
        users = [process for process in layout.processes if process.host in names]
        count = members[0].slot.cpus
        counts = {
            f"{kind}s": sum(user.kind == kind for user in users) for kind in (ENGINE, RANK, WORKER)
        }
        threads = sum(user.threads for user in users)
        text = " + ".join(f"{number} {kind}" for kind, number in counts.items() if number)
        if threads > count:
            yield warn("cores", f"{machine}: {text}, {threads} threads, share {count} cores")


def _check_memory(config: RunConfig, memories: Iterable[Memory]) -> Iterator[Check]:
    failed: dict[tuple[str, str], list[Memory]] = {}
    fullest: dict[bool, Memory] = {}
    for memory in memories:
        on_device = memory.device is not None
        if memory.nbytes and memory.needed > memory.nbytes:
            process, part = memory.largest()
            failed.setdefault((_field(config, process, part), part.what), []).append(memory)
        elif on_device not in fullest or memory.share > fullest[on_device].share:
            fullest[on_device] = memory
    for (field, what), full in failed.items():
        process, _ = full[0].largest()
        need = sum(
            part.nbytes
            for user in full[0].users
            for part in user.parts
            if user.kind == process.kind and part.what == what
        )
        others = f" (and of {len(full) - 1} more)" if len(full) > 1 else ""
        text = (
            f"must fit, beside all else, into the {human_bytes(full[0].nbytes)} of "
            f"{_where(full[0])}{others}, got {_value(config, field)}: about "
            f"{human_bytes(full[0].needed)} are needed, {human_bytes(need)} of them for "
            f"{what} of {process.kind}s"
        )
        yield msgspec.structs.replace(fail(field, text), estimated=True)
    if failed:
        return
    for on_device, memory in fullest.items():
        name = "GPU memory" if on_device else "memory"
        text = f"about {human_bytes(memory.needed)}"
        if not memory.nbytes:
            yield warn(name, f"{text}; the size of memory is unknown")
            continue
        text += f" of {human_bytes(memory.nbytes)} on {_where(memory)}"
        yield warn(name, f"{text}: tight") if memory.share > COMFORT else ok(name, text)


def _where(memory: Memory) -> str:
    return memory.host if memory.device is None else f"GPU {memory.device.index} of {memory.host}"


def _field(config: RunConfig, process: Process, part: Part) -> str:
    section, _, setting = part.setting.partition(".")
    if section == "engines" and len(config.engines) > 1:
        return f"engines.{process.group}.{setting}"
    return part.setting


def _value(config: RunConfig, field: str) -> object:
    """Return the value of a setting, as an error quotes it."""
    if field == "model":
        return config.model.path or "[model.scratch]"
    section, _, setting = field.rpartition(".")
    if section.startswith("engines"):
        return getattr(config.engines[int(section.partition(".")[2] or 0)], setting)
    value = getattr(getattr(config, section), setting)
    return "none" if value is None else value


def _field_of(config: RunConfig, process: str) -> str:
    """Return the section of the configuration for a process that has no place."""
    for slot in first_engines(config):
        if slot.id == process:
            return f"engines.{slot.group}" if len(config.engines) > 1 else "engines"
    return "workers" if process.startswith("w") else "trainer"
