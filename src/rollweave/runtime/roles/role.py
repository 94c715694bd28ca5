"""A role of the user's program: it places the workers on hosts, starts them as a group,
and calls them in the mode that each method declares (RollArt §5.1, §5.2).

Instances on a platform (`runtime/hosts/serverless.py`) execute its serverless methods.
Invariant: such a call returns, or raises `WorkerError`, within its limit; the workers
of the role do not end because of it.
"""

import asyncio
import contextlib
import os
import sys
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import msgspec

from rollweave.core.policy.binding import Binding, Demand, bind, empty_pools
from rollweave.engine.clients.responses import ResponseError
from rollweave.io.wire import encode
from rollweave.record.rundir import RunDir
from rollweave.rollout.http_service import HttpService, ServiceError
from rollweave.runtime.hosts.cluster import GatheredHosts, Hosted, slot_of
from rollweave.runtime.hosts.hosts import resources as resources_here
from rollweave.runtime.hosts.serverless import platform
from rollweave.runtime.hosts.user_files import of_worker
from rollweave.runtime.roles.group import WorkerGroup, WorkerPlace
from rollweave.runtime.roles.serving import method_codec
from rollweave.runtime.roles.worker import DEFAULT, TAG, Declaration, Worker, declarations
from rollweave.runtime.tasks import Tasks, name_long_waits
from rollweave.schema.base import Struct
from rollweave.schema.config.engines import ClusterConfig, PoolConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.hosts import MAX_THREADS, HostSlot, Program, Resources, Share
from rollweave.schema.roles import (
    Arguments,
    CallMethod,
    DeployedRole,
    Raised,
    Returned,
    WorkerError,
    WorkerFailure,
)
from rollweave.schema.rollouts import PAYLOAD_BYTES

UNAVAILABLE = "ServiceError"
"""Kind of the failure of a call that no instance has answered."""

_decode: "msgspec.msgpack.Decoder[Returned | Raised]" = msgspec.msgpack.Decoder(Returned | Raised)


def _read(answer: bytes) -> Returned | Raised:
    try:
        return _decode.decode(answer)
    except msgspec.DecodeError as error:
        raise ResponseError(f"its answer must be a result: {error}") from error


class ServerlessMethods:
    """The methods of role `name` at `url`."""

    def __init__(self, name: str, worker: type[Worker], url: str) -> None:
        self._name, self._worker, self._url = name, worker, url
        self._services: dict[float, HttpService] = {}

    async def call(self, method: str, arguments: Arguments, *, within_s: float) -> object:
        """Call a method, and return its result. Raises WorkerError and TypeError."""
        service = self._service(within_s)
        body = encode(CallMethod(call=1, method=method, arguments=arguments))
        try:
            report = await service.ask("", body, key=uuid.uuid4().hex, read=_read)
        except ServiceError as error:
            report = Raised(call=1, kinds=(UNAVAILABLE,), text=str(error))
        if isinstance(report, Returned):
            return method_codec(self._worker, method).decode_result(report.value)
        failure = WorkerFailure(rank=0, kinds=report.kinds, text=report.text, place=report.place)
        raise WorkerError(f"serverless {self._name}.{method}:", [failure])

    def _service(self, within_s: float) -> HttpService:
        """Return the service for calls with this limit."""
        if within_s not in self._services:
            self._services[within_s] = HttpService(
                f"role {self._name}",
                self._url,
                answer="result",
                token="",
                timeout_s=within_s,
                clock=asyncio.get_running_loop().time,
                payload_bytes=PAYLOAD_BYTES,
                callers=("call waits", "calls wait"),
                secret=True,
            )
        return self._services[within_s]

    async def close(self) -> None:
        """Close all connections."""
        for service in self._services.values():
            await service.close()


class WorkerResources(Struct, frozen=True, kw_only=True):
    """The need of some workers of a role: each of `workers` gets `devices` GPUs of one
    host.

    `hardware` is a resource that the agent of the host names (`--resource`), or whole
    words of the name of its GPUs. If hosts with it have no free GPUs, those with the
    hardware in `fallback` are used, in this order.
    """

    workers: int = 1
    devices: int = 0
    hardware: str = ""
    fallback: tuple[str, ...] = ()

    @property
    def pools(self) -> tuple[str, ...]:
        """The hardware in order of preference; empty if any will do."""
        return (self.hardware, *self.fallback) if self.hardware else ()


class RoleSpec(Struct, frozen=True, kw_only=True):
    """A role as a program declares it. Processes find the class by `reference`."""

    name: str
    reference: str
    resources: tuple[WorkerResources, ...]
    arguments: Arguments
    timeout_s: float
    start_s: float

    @property
    def workers(self) -> list[WorkerResources]:
        """The need of each rank."""
        return [one for one in self.resources for _ in range(one.workers)]


class Role:
    """The workers of a role between `open` and `close`."""

    def __init__(
        self, spec: RoleSpec, worker: type[Worker], cluster: ClusterConfig | None, run: RunDir
    ) -> None:
        self._spec, self._worker, self._cluster, self.run = spec, worker, cluster, run
        self._declarations = declarations(worker)
        self._pools = {
            name: PoolConfig(resource=name) for one in spec.resources for name in one.pools
        }
        self._stopped = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._group: WorkerGroup | None = None
        self._functions: ServerlessMethods | None = None
        self._hardware: list[str] = []
        """The hardware of each rank."""

    @property
    def _workers(self) -> WorkerGroup:
        assert self._group is not None, "it is open"
        return self._group

    async def open(self) -> None:
        """Gather the hosts, and start the workers.

        Raises ConfigError, `WorkerError`, `WorkerLostError` and OSError.
        """
        self.run.path.mkdir(parents=True, exist_ok=True)
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = self._task = asyncio.create_task(self._run(opened))
        await asyncio.wait({task, opened}, return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            await task

    async def close(self) -> None:
        """End the workers, in order if they can, and release the hosts."""
        self._stopped.set()
        if self._task is not None:
            if self._group is None:  # it still waits for hosts
                self._task.cancel()
            await asyncio.wait({self._task})
            if self._group is not None:
                self._task.result()

    async def call(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method in its mode. Raises like `WorkerGroup.call`, and TypeError."""
        declaration, workers = self._declarations[method], self._workers
        within_s = declaration.limit_s or self._spec.timeout_s
        if declaration.serverless:
            return await self._serverless.call(
                method, workers.encode(method, *args, **kwargs), within_s=within_s
            )
        ranks = list(range(workers.world_size))
        if declaration.affinity:
            tag = workers.argument(method, TAG, args, kwargs)
            ranks = self._suited(declaration, tag)
        match declaration.called:
            case "execute_each":
                parts = _parts(method, len(ranks), args, kwargs)
                arguments = {
                    rank: workers.encode(method, *positional, **named)
                    for rank, (positional, named) in zip(ranks, parts, strict=True)
                }
            case "execute_all":
                arguments = dict.fromkeys(ranks, workers.encode(method, *args, **kwargs))
            case "execute_one":
                rank = min(ranks, key=lambda rank: (workers.calls_of(rank), rank))
                arguments = {rank: workers.encode(method, *args, **kwargs)}
            case "execute_first":
                arguments = {ranks[0]: workers.encode(method, *args, **kwargs)}
        results = await workers.call(method, arguments, within_s=within_s)
        return results if declaration.called in ("execute_all", "execute_each") else results[0]

    async def _deploy(self, stack: contextlib.AsyncExitStack) -> None:
        """Deploy the class for its serverless methods, if it has any."""
        if not any(one.serverless for one in self._declarations.values()):
            return
        spec = self._spec
        role = DeployedRole(name=spec.name, reference=spec.reference, arguments=spec.arguments)
        context = platform(f"role {spec.name}")(
            (role,),
            deploy_s=spec.start_s,
            cluster=self._cluster,
            files=of_worker(spec.reference),
            owner=uuid.uuid4().hex,
            log=self.run.logs / "serverless.log",
            on_status=_print_status,
            on_lost=_print_status,
        )
        urls = await stack.enter_async_context(context)
        self._functions = ServerlessMethods(spec.name, self._worker, urls[spec.name])
        stack.push_async_callback(self._functions.close)

    @property
    def _serverless(self) -> ServerlessMethods:
        assert self._functions is not None, "it is open, and has serverless methods"
        return self._functions

    def _suited(self, declaration: Declaration, tag: object) -> list[int]:
        """Return the ranks with the hardware of a domain, or all if none has it."""
        affinity = declaration.affinity
        wanted = affinity.get(str(tag), affinity.get(DEFAULT))
        suited = [rank for rank, hardware in enumerate(self._hardware) if hardware == wanted]
        return suited or list(range(len(self._hardware)))

    async def _run(self, opened: "asyncio.Future[None]") -> None:
        """Keep the hosts and the workers until `close`."""
        async with Tasks() as tasks, contextlib.AsyncExitStack() as stack:
            hosts = GatheredHosts(
                self._cluster,
                self._pools,
                self.run,
                tasks,
                user=of_worker(self._spec.reference),
                hosted=[
                    Hosted(
                        program=Program.ROLE,
                        setting="resources.hardware",
                        pools=one.pools,
                        user_code=f"role {self._spec.name}",
                    )
                    for one in self._spec.resources
                ],
                on_status=_print_status,
            )
            try:
                await hosts.gather()
                await self._deploy(stack)
                workers = self._started(hosts)
                clock = asyncio.get_running_loop().time
                tasks.spawn(
                    name_long_waits(
                        workers.waits, clock=clock, report=lambda _, line: _print_status(line)
                    ),
                    "name long waits",
                )
                try:
                    await workers.ready(self._spec.start_s)
                    self._group = workers
                    opened.set_result(None)
                    await self._stopped.wait()
                    await workers.close()
                finally:
                    workers.kill()
                    await workers.close()
            finally:
                await hosts.close()
                tasks.cancel_all()

    def _started(self, hosts: GatheredHosts) -> WorkerGroup:
        """Start a worker at each place. Raises ConfigError if a rank has no place."""
        spec, present = self._spec, hosts.hosts
        slots = hosts.slots
        if slots:
            offered = list(hosts.present().values())
        else:  # this machine alone
            offered = [resources_here()]
            ((number, host),) = present.by_number.items()
            slots = (slot_of(self._pools, number, host.name, offered[0]),)
        self._must_serve(offered)
        places = _places(spec, slots)
        crowd = Counter(place.host for place in places)
        by_number = {slot.number: slot for slot in slots}
        self._hardware = [
            next((name for name in one.pools if name in by_number[place.host].pools), "")
            for one, place in zip(spec.workers, places, strict=True)
        ]
        return WorkerGroup(
            spec.name,
            self._worker,
            places=[
                WorkerPlace(
                    spawn=present.host(place.host).starting(
                        Program.ROLE,
                        share_of(place.devices, by_number[place.host].cpus // crowd[place.host]),
                    ),
                    address=present.host(place.host).address,
                    hardware=hardware,
                    devices=place.devices,
                )
                for place, hardware in zip(places, self._hardware, strict=True)
            ],
            logs=self.run.logs,
            reference=spec.reference,
            arguments=spec.arguments,
        )

    def _must_serve(self, present: Sequence[Resources]) -> None:
        """Raise ConfigError if no host has the hardware of a demand or of its
        fallbacks.
        """
        empty = {pool.pool: pool for pool in empty_pools(self._pools, present)}
        for one in self._spec.resources:
            if one.pools and all(name in empty for name in one.pools):
                raise ConfigError(f"resources: hardware {empty[one.hardware].describe()}")


def _places(spec: RoleSpec, hosts: Sequence[HostSlot]) -> list[Binding]:
    """Return the place of each rank. Raises ConfigError."""
    demands = [
        Demand(
            process=f"{spec.name} rank {rank}",
            devices=one.devices,
            pools=one.pools,
            group=spec.name if one.devices else "",  # ranks without GPUs are spread
        )
        for rank, one in enumerate(spec.workers)
    ]
    places, unbound = bind(demands, hosts)
    lines = [f"{one.process}: {one.reason}" for one in unbound]
    lines += [
        f"{place.process}: its GPUs must be those of no other worker, got {len(place.devices)} "
        "that another has, since there are too few"
        for place in places
        if place.shared
    ]
    if lines:
        raise ConfigError("\n".join(lines))
    return places


def share_of(devices: tuple[int, ...], cores: int) -> Share:
    """Return the share of a worker: it sees only these GPUs, if any, and computes with
    its share of the cores unless the user has set another number.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isascii() and given.isdecimal() else cores
    return Share(threads=min(max(1, threads), MAX_THREADS), devices=devices)


def _parts(
    method: str, count: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Yield the arguments of each of `count` ranks: one element of every argument.
    Raises TypeError.
    """
    for name, value in [*enumerate(args), *kwargs.items()]:
        length = len(value) if isinstance(value, Sized) else None
        if length != count:
            got = type(value).__name__ if length is None else f"{length}"
            raise TypeError(
                f"{method}: argument {name} must have one element for each of {count} workers, "
                f"got {got}"
            )
    for place in range(count):
        yield [value[place] for value in args], {name: kwargs[name][place] for name in kwargs}


def _print_status(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
