"""Predict the processes of a run, with their places on its hosts, and add up the memory
that they need on each GPU and each host.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from rollweave.core.mechanisms.membership.bindings import (
    TRAINER,
    bind_all,
    bind_workers,
    crowded,
    groups_on_gpus,
)
from rollweave.core.mechanisms.membership.members import first_engines
from rollweave.core.policy.binding import Binding, Unbound
from rollweave.core.policy.scheduling import scheduling
from rollweave.engine.needs import engine_needs
from rollweave.io.machine import computed_dtype, describe_computation
from rollweave.runtime.preflight.checks import Check, fail, ok, refused, warn
from rollweave.runtime.preflight.site import PlannedHost, with_device
from rollweave.runtime.supervisors.roles import bind_roles
from rollweave.schema.base import Struct
from rollweave.schema.config.engines import RoleConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import FieldErrors
from rollweave.schema.events import EngineSlot, WorkerSlot
from rollweave.schema.hosts import Device, Need, RankSlot, Resources, interpreter
from rollweave.schema.text import human_bytes
from rollweave.train.needs import rank_needs
from rollweave.weights.checkpoint import ModelShape
from rollweave.weights.needs import relay_needs

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
    needs: tuple[Need, ...]

    def of(self, *, on_device: bool) -> tuple[Need, ...]:
        """Return what it needs on its GPUs, or in main memory."""
        return tuple(need for need in self.needs if (self.on_gpu and need.on_device) == on_device)

    @property
    def device_bytes(self) -> int:
        """The memory that it needs on each of its GPUs in its own turn. What only a
        restart needs counts in the turn of the engines.
        """
        nbytes = sum(need.nbytes for need in self.of(on_device=True) if not need.at_restart)
        return nbytes // max(1, len(self.devices))

    @property
    def host_bytes(self) -> int:
        """The main memory that it needs."""
        return sum(need.nbytes for need in self.of(on_device=False))


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

    def _turns(self) -> Counter[str]:
        """Return what is needed here at all times (""), and beside it in the turn of
        the processes of each kind.
        """
        turns = Counter[str]()
        for user in self.users:
            sizes = Counter[str]()
            for need in user.of(on_device=self.device is not None):
                sizes[_turn_of(user, need)] += need.nbytes
            devices = 1 if self.device is None else max(1, len(user.devices))
            turns.update({turn: nbytes // devices for turn, nbytes in sizes.items()})
        return turns

    @property
    def share(self) -> float:
        """The share of the memory that is needed; 0 if the size is not known."""
        return self.needed / self.nbytes if self.nbytes else 0.0

    def largest(self) -> tuple[Process, Need]:
        """Return the use that needs the most memory, and a process that has it."""
        turns = self._turns()
        turns.pop("", None)
        most = max(turns, key=lambda kind: turns[kind], default="")
        sizes = Counter[tuple[str, str]]()
        examples: dict[tuple[str, str], tuple[Process, Need]] = {}
        for process in self.users:
            for need in process.of(on_device=self.device is not None):
                if _turn_of(process, need) in ("", most):
                    key = process.kind, need.what
                    sizes[key] += need.nbytes
                    examples.setdefault(key, (process, need))
        return examples[max(sizes, key=lambda key: sizes[key])]


def _turn_of(process: Process, need: Need) -> str:
    """Return the kind of processes in whose turn there is a need; "" for all times."""
    if need.at_restart:
        return ENGINE
    return process.kind if need.in_turn else ""


class Layout(Struct, frozen=True, kw_only=True):
    """The processes of a run, the memories that they use, which are known only if the
    hosts are, and those without a place.
    """

    processes: tuple[Process, ...]
    memories: tuple[Memory, ...]
    unbound: tuple[Unbound, ...] = ()


def lay_out(config: RunConfig, shape: ModelShape, hosts: Sequence[PlannedHost] | None) -> Layout:
    """Return the processes with which a run begins, their places and their memory.

    `hosts` is None if those of a cluster are not known.
    """
    engines, ranks = first_engines(config), (RankSlot(),) * config.trainer.first_ranks
    workers = tuple(WorkerSlot(id=f"w{number}") for number in range(config.workers.maximum))
    placed, unbound = list[Binding](), list[Unbound]()
    if hosts is not None:
        placed, unbound, slots = bind_roles(config, [host.slot for host in hosts])
        engines, ranks, more = bind_all(config, engines, slots)
        workers, others = bind_workers(config, slots, engines, ranks)
        unbound = [*unbound, *more, *others]
    config = with_device(config, hosts)
    plan = _Plan(config, hosts)
    processes = [plan.beside_the_controller(CONTROLLER)]
    if scheduling(config.rollout, config.ablation).predicts:
        processes.append(plan.beside_the_controller(PREDICTOR, config.ablation.predictor))
    for worker in workers:
        needs = [interpreter(setting="workers.count")]  # without environments and sandboxes
        pool = config.workers.pool
        processes.append(plan.process(WORKER, worker.id, worker.host, needs, pool=pool, threads=1))
    processes += [
        plan.process(
            f"role {name} rank",
            rank,
            place.host,
            [interpreter(setting=f"roles.{name}.count")],  # without what its class needs
            pool=place.pool,
            devices=place.devices or None,
            threads=1,
        )
        for place in placed
        for name, _, rank in [place.process.rpartition(" ")]
    ]
    for number, stores in plan.relays(ranks, engines):
        needs = relay_needs(config, shape, stores=stores)
        processes.append(plan.process(RELAY, str(number), number, needs))
    for number, rank in enumerate(ranks):
        processes.append(
            plan.process(
                RANK,
                str(number),
                rank.host,
                rank_needs(config, shape, rank=number),
                pool=config.trainer.pool,
                devices=rank.devices,
                threads=1,
            )
        )
    for engine in engines:
        group = config.engines[engine.group]
        processes.append(
            plan.process(
                ENGINE,
                engine.id,
                engine.host,
                engine_needs(config, shape, group),
                pool=group.pool,
                devices=engine.devices,
                threads=engine.degree,
                group=engine.group,
            )
        )
    order = {host.name: number for number, host in enumerate(hosts or ())}
    processes.sort(key=lambda process: order.get(process.host, -1))
    return Layout(
        processes=tuple(processes),
        memories=tuple(_memories(processes, hosts or ())),
        unbound=tuple(unbound),
    )


class _Plan:
    """The places of the processes of one run."""

    def __init__(self, config: RunConfig, hosts: Sequence[PlannedHost] | None) -> None:
        self._config, self._hosts = config, hosts
        self._names = {host.slot.number: host.name for host in hosts or ()}
        self._on_gpu = config.model.device == "cuda"
        self._gpus = [
            device.index for host in (hosts or ())[:1] for device in host.resources.devices
        ]

    def beside_the_controller(self, kind: str, name: str = "") -> Process:
        """Return a process on the controller's machine."""
        cluster = self._config.cluster
        here = self._names.get(0, "") if cluster is None else cluster.host
        return Process(kind=kind, name=name, host=here, needs=(interpreter(setting="model"),))

    def process(
        self,
        kind: str,
        name: str,
        host: int,
        needs: Sequence[Need],
        *,
        pool: str | None = None,
        devices: tuple[int, ...] | None = None,
        threads: int = 0,
        group: int = 0,
    ) -> Process:
        """Return a process on a host of this number. It is bound to these `devices`;
        None for a process that uses none.
        """
        is_cluster, usable = self._config.cluster is not None, devices or ()
        if is_cluster and self._hosts is not None:
            on_gpu = bool(devices)  # each process is bound
        else:
            on_gpu = devices is not None and self._on_gpu
        if on_gpu and not (usable or is_cluster):
            usable = tuple(self._gpus)  # it is not bound, and may use all
        return Process(
            kind=kind,
            name=name,
            host=self._names.get(host, ""),
            pool=pool or "",
            on_gpu=on_gpu,
            devices=usable,
            group=group,
            threads=1 if on_gpu else threads,
            needs=tuple(needs),
        )

    def relays(
        self, ranks: Sequence[RankSlot], engines: Sequence[EngineSlot]
    ) -> Iterator[tuple[int, bool]]:
        """Yield the host of each relay, and whether it stores versions of the weights.

        That beside the trainer's first rank shares its memory if all ranks are there;
        otherwise it puts the versions together.
        """
        config = self._config
        count = config.weights.relays
        if config.cluster is not None:
            count = len(self._hosts) if self._hosts is not None else config.cluster.hosts or 1
        count *= config.relayed
        first = ranks[0].host if ranks else 0
        apart = any(rank.host != first for rank in ranks)
        with_engines = {engine.host for engine in engines}
        for number in range(count):
            elsewhere = self._hosts is None or number in with_engines
            yield number, apart if number == first else elsewhere


def check_layout(
    config: RunConfig, layout: Layout, hosts: Sequence[PlannedHost] | None
) -> Iterator[Check]:
    """Refuse processes that have no place, or that need too much memory."""
    if hosts is None:
        return
    count = sum(len(host.resources.devices) for host in hosts)
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
        text = f"must have a place, got {one.process}: {one.reason}"
        yield fail(_field_of(config, one.process), text)
    yield from _check_cores(config, layout, hosts)
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


def _machines(
    processes: Sequence[Process], hosts: Sequence[PlannedHost]
) -> Iterator[tuple[str, Resources, list[Process]]]:
    """Yield the name and the resources of each machine, and the processes there."""
    for machine, resources in {host.machine: host.resources for host in hosts}.items():
        names = {host.name for host in hosts if host.machine == machine}
        yield machine, resources, [one for one in processes if one.host in names]


def _memories(processes: Sequence[Process], hosts: Sequence[PlannedHost]) -> Iterator[Memory]:
    for machine, resources, users in _machines(processes, hosts):
        for device in resources.devices:
            yield Memory(
                host=machine,
                device=device,
                nbytes=device.memory_bytes,
                users=tuple(user for user in users if device.index in user.devices),
            )
        yield Memory(host=machine, device=None, nbytes=resources.memory_bytes, users=tuple(users))


def _check_cores(
    config: RunConfig, layout: Layout, hosts: Sequence[PlannedHost]
) -> Iterator[Check]:
    """Warn of hosts whose processes share cores. A run on one machine is described in
    any case.
    """
    for machine, resources, users in _machines(layout.processes, hosts):
        counts = Counter(user.kind for user in users if user.threads)
        threads = sum(user.threads for user in users)
        count = resources.cpus
        kinds = " + ".join(_counted(number, kind) for kind, number in counts.items())
        on = f"{_counted(threads, 'thread')} on {_counted(count, 'core')}"
        text = f"{machine}: {kinds} with {on}"
        if threads > count:
            yield warn("cores", f"{text}, which they share")
        elif config.cluster is None:
            yield ok("cores", text)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _check_memory(config: RunConfig, memories: Iterable[Memory]) -> Iterator[Check]:
    failed: dict[tuple[str, str], list[Memory]] = {}
    fullest: dict[bool, Memory] = {}
    for memory in memories:
        on_device = memory.device is not None
        if memory.nbytes and memory.needed > memory.nbytes:
            process, need = memory.largest()
            failed.setdefault((_field(config, process, need), need.what), []).append(memory)
        elif on_device not in fullest or memory.share > fullest[on_device].share:
            fullest[on_device] = memory
    for (field, what), full in failed.items():
        process, _ = full[0].largest()
        of_these = sum(
            use.nbytes
            for user in full[0].users
            for use in user.needs
            if user.kind == process.kind and use.what == what
        )
        others = f" (and of {len(full) - 1} more)" if len(full) > 1 else ""
        text = (
            f"must fit, beside all else, into the {human_bytes(full[0].nbytes)} of "
            f"{_where(full[0])}{others}, got {_value(config, field)}: about "
            f"{human_bytes(full[0].needed)} are needed, {human_bytes(of_these)} of them for "
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


def _field(config: RunConfig, process: Process, need: Need) -> str:
    section, _, setting = need.setting.partition(".")
    if section == "engines" and len(config.engines) > 1:
        return f"engines.{process.group}.{setting}"
    return need.setting


def _value(config: RunConfig, field: str) -> object:
    """Return the value of a setting, as an error quotes it."""
    if field == "model":
        return config.model.path or "[model.scratch]"
    section, _, setting = field.rpartition(".")
    if section.startswith("roles."):
        return getattr(config.roles.get(section[6:], RoleConfig()), setting)
    if section.startswith("engines"):
        return getattr(config.engines[int(section.partition(".")[2] or 0)], setting)
    value: Any = getattr(getattr(config, section), setting)
    return "none" if value is None else value


def _field_of(config: RunConfig, process: str) -> str:
    """Return the section of the configuration for a process that has no place."""
    for slot in first_engines(config):
        if slot.id == process:
            return f"engines.{slot.group}" if len(config.engines) > 1 else "engines"
    if " " in process and not process.startswith(TRAINER):
        return f"roles.{process.rpartition(' ')[0]}"
    return "workers" if process.startswith("w") else "trainer"
