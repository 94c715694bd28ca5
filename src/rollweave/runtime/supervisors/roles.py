"""The roles of a run (RollArt §5.1): their workers, which are started before the run
begins, watched and restarted; and the calls of the user's code, which reach this
process over HTTP (`envs/roles.py`) and are forwarded as they are.

The engine of a judge is a role, too, which is started when it is called, and ended when
it has not been called for a while.

Invariants: this process imports no class of a role, and decodes no value of a call; a
worker that is lost, or does not answer in time, is restarted alone; a call is answered
within its limit, and what a lost worker owes is answered by the reason of the loss; a
GPU of a role is of no other process of the run; after `close` no worker is left.
"""

import asyncio
import contextlib
import functools
import hmac
import os
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from rollweave.core.mechanisms.membership.bindings import own
from rollweave.core.policy.binding import Binding, Demand, Unbound, bind
from rollweave.core.policy.waiting import Wait
from rollweave.envs.roles import CALL_BYTES, MESSAGEPACK, VARIABLE, encoded_arguments
from rollweave.io.http.bodies import body_of
from rollweave.io.http.guard import Guard
from rollweave.io.http.listening import listening
from rollweave.io.wire import decoder_of, encode
from rollweave.record.rundir import RunDir
from rollweave.runtime.hosts.cluster import GatheredHosts
from rollweave.runtime.roles.group import WorkerGroup, WorkerPlace
from rollweave.runtime.roles.role import share_of
from rollweave.runtime.roles.serving import JUDGE
from rollweave.runtime.tasks import Tasks, name_long_waits
from rollweave.schema.base import as_json
from rollweave.schema.commands import Warn
from rollweave.schema.config.engines import RoleConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, HostError, RollweaveError, WireError
from rollweave.schema.hosts import HostSlot, Program
from rollweave.schema.roles import (
    Arguments,
    CallFailed,
    CallLost,
    CallRefused,
    DeclaredMethod,
    Returned,
    RoleAnswer,
    RolesAddress,
    WorkerError,
    WorkerLostError,
)
from rollweave.schema.text import did_you_mean

T = TypeVar("T")

CALL_S = 600.0
"""Maximum seconds of a call of a method that is registered without a limit."""

GRACE_S = 5.0
"""Seconds by which the process of a judge may exceed `timeout_s` of its reward: it then
says itself that its engine gave no answer.
"""

IDLE_S = 60.0
"""Seconds without a call after which the engine of a judge ends."""

SLACK_S = 30.0
"""Seconds by which a caller waits longer than the controller: the controller gives up
first, and says why.
"""

LOOK_S = 0.5
"""Seconds between two looks for a host of a worker that has none."""

_decode_arguments = decoder_of(Arguments)
_decode_parts = msgspec.msgpack.Decoder(list[msgspec.Raw])
_decode_chat = msgspec.msgpack.Decoder(tuple[int, bytes])


@dataclass(frozen=True, kw_only=True)
class RoleOfRun:
    """A role as the configuration declares it. `given` is what declares the class, and
    `cls` the setting with it. Methods without a limit take `call_s`. With `idle_s`, its
    workers are there only while they are called.
    """

    name: str
    config: RoleConfig
    reference: str
    given: str
    arguments: Arguments
    pools: tuple[str, ...]
    call_s: float = CALL_S
    idle_s: float | None = None

    @property
    def cls(self) -> str:
        """The setting of the class, or of the judge's model."""
        name = self.name
        return f"roles.{name}.cls" if self.config.cls else f"rewards.{name}.judge.model"


def roles_of(config: RunConfig) -> list[RoleOfRun]:
    """Return the roles of a run, with the engines of its judges."""
    roles = {
        name: RoleOfRun(
            name=name,
            config=role,
            reference=role.cls,
            given=role.cls,
            arguments=encoded_arguments((), role.arguments, f"roles.{name}.arguments"),
            pools=config.pools_of(role.pool),
        )
        for name, role in config.roles.items()
    }
    for reward in config.rewards:
        if reward.embedded and reward.judge is not None:
            name, model = reward.name, reward.judge.model
            role = config.roles.get(name, RoleConfig())
            arguments = {"model": model, "timeout_s": reward.timeout_s}
            roles[name] = RoleOfRun(
                name=name,
                config=role,
                reference=JUDGE,
                given=model,
                arguments=encoded_arguments((), arguments, f"rewards.{name}.judge"),
                pools=config.pools_of(role.pool),
                call_s=reward.timeout_s + GRACE_S,
                idle_s=IDLE_S,
            )
    return list(roles.values())


def bind_roles(
    config: RunConfig, hosts: Sequence[HostSlot]
) -> tuple[list[Binding], list[Unbound], list[HostSlot]]:
    """Return the places of the workers of all roles, those without one, and what is
    left of the hosts for all other processes.
    """
    demands = [demand for role in roles_of(config) for demand in _demands(role)]
    places, unbound = bind(demands, own(hosts))
    for place in places:
        if place.shared:
            reason = "its GPUs must be those of no other worker, and there are too few"
            unbound.append(Unbound(process=place.process, reason=reason))
    taken = {(place.host, device) for place in places for device in place.devices}
    return places, unbound, [_without(host, taken) for host in hosts]


def _without(host: HostSlot, taken: Iterable[tuple[int, int]]) -> HostSlot:
    devices = tuple(one for one in host.devices if (host.number, one) not in taken)
    return msgspec.structs.replace(host, devices=devices)


def _demands(role: RoleOfRun) -> Iterator[Demand]:
    for rank in range(role.config.count):
        yield Demand(
            process=f"{role.name} {rank}",
            devices=role.config.gpus,
            pools=role.pools,
            group=role.name if role.config.gpus else "",  # workers without GPUs are spread
        )


@dataclass(slots=True, eq=False, kw_only=True)
class _Rank:
    """One worker of a role, through all of its restarts. `place` is its first place."""

    number: int
    place: Binding
    host: str
    """The name of the host."""
    opened: asyncio.Future[None]
    """Done once it is constructed for the first time."""
    group: WorkerGroup | None = None
    """None unless it takes calls."""
    where: str = ""
    """The host in words."""
    calls: int = 0
    idle_since: float = 0.0
    starting_since: float | None = None
    failures: int = 0
    """Number of losses since it has last answered a call."""
    given_up: str = ""


class _UnansweredError(Exception):
    """A call is not given to a worker."""

    def __init__(self, answer: CallLost | CallRefused) -> None:
        super().__init__(answer.error)
        self.answer = answer


class _Role:
    """The workers of one role."""

    def __init__(self, spec: RoleOfRun, ranks: list[_Rank], roles: "RunRoles") -> None:
        self._spec, self.ranks, self._roles = spec, ranks, roles
        self._loop = asyncio.get_running_loop()
        self._methods: dict[str, DeclaredMethod] | None = None
        """None until a worker is constructed."""
        self._changed, self._wanted = asyncio.Event(), asyncio.Event()
        self._asking: set[asyncio.Task[Any]] = set()
        self._callers: dict[object, float] = {}
        """The calls that wait for a worker, with the times since when."""
        if spec.idle_s is None:
            self._wanted.set()

    # Workers.

    async def keep(self, rank: _Rank) -> None:
        """Start a worker, and restart it when it is lost, until this task is cancelled.
        Raises RollweaveError if no worker of the role is left.
        """
        label, restarts = f"role {self._spec.name}", self._roles.config.watchdog.restarts
        while True:
            await self._wanted.wait()
            try:
                reason = await self._live(rank)
            except (WorkerError, HostError, OSError, WorkerLostError) as error:
                if not rank.opened.done() and self._spec.idle_s is None:
                    rank.opened.set_exception(self._refusal(rank, error))
                    return
                if not rank.opened.done() and isinstance(error, WorkerError):
                    raise self._refusal(rank, error) from error
                reason = str(error)
            if not reason:
                continue
            rank.failures += 1
            if rank.failures > restarts:
                rank.given_up = f"{label} {rank.number} is given up after {restarts} restarts"
                rank.given_up += f": {reason}"
                self._notify()
                if all(one.given_up for one in self.ranks):
                    raise RollweaveError(rank.given_up)
                self._roles.warn(Warn(component=label, message=rank.given_up))
                return
            text = f"is lost, and restarted ({rank.failures} of {restarts}): {reason}"
            self._roles.warn(Warn(component=f"{label} {rank.number}", message=text))

    async def _live(self, rank: _Rank) -> str:
        """Run one process of a worker. Return why it is lost, or "" if it was idle."""
        rank.starting_since = self._loop.time()
        group: WorkerGroup | None = None
        try:
            place = await self._roles.place(self._spec, rank)
            group = WorkerGroup(
                self._spec.name,
                None,
                places=[place],
                logs=self._roles.run.logs / "roles",
                reference=self._spec.reference,
                arguments=self._spec.arguments,
                alone=(rank.number, len(self.ranks)),
            )
            self._methods = await group.ready(self._roles.start_s)
            rank.group, rank.idle_since, rank.starting_since = group, self._loop.time(), None
            if not rank.opened.done():
                rank.opened.set_result(None)
            self._notify()
            return await self._until_lost(rank, group)
        finally:
            rank.group = rank.starting_since = None
            if group is not None:
                await group.close()

    async def _until_lost(self, rank: _Rank, group: WorkerGroup) -> str:
        idle_s = self._spec.idle_s
        while not group.lost.done():
            left_s = None
            if idle_s is not None:
                since = self._loop.time() if rank.calls else rank.idle_since
                left_s = since + idle_s - self._loop.time()
                if left_s <= 0:
                    self._wanted.clear()
                    return ""
            await asyncio.wait({group.lost}, timeout=left_s)
        return group.lost.result()

    def _refusal(self, rank: _Rank, error: Exception) -> ConfigError:
        """Return the error of a worker that does not even start at first, in which case
        the run does not begin.
        """
        spec, where = self._spec, f"on {rank.where}"
        rule, got, text = f"start {where}", repr(spec.given), str(error)
        if isinstance(error, WorkerError):
            failure = error.failures[0]
            rule, text = f"be constructed {where}", f"{failure.kind}: {failure.text}"
            if failure.rule:
                rule, text = failure.rule, failure.text
                rule += f" {where}" if text else ""
            elif failure.kind == TypeError.__name__ and spec.config.arguments:
                got += f", with arguments {dict(spec.config.arguments)}"
        reason = f": {text}" if text else ""
        return ConfigError(" ".join(f"{spec.cls} must {rule}, got {got}{reason}".split()))

    def waits(self) -> Iterator[Wait]:
        """Yield the waits for workers that start, and those of calls."""
        component = f"role {self._spec.name}"
        for rank in self.ranks:
            if rank.starting_since is not None:
                what = f"worker {rank.number} on {rank.where}: starting"
                limit_s = self._roles.start_s
                yield Wait(
                    component=component, what=what, since=rank.starting_since, limit_s=limit_s
                )
            elif rank.group is not None and self._spec.idle_s is None:  # else the reward waits
                for wait in rank.group.waits():
                    yield msgspec.structs.replace(wait, component=component)
        if self._callers:
            what = f"{len(self._callers)} calls wait for a worker"
            since = min(self._callers.values())
            yield Wait(component=component, what=what, since=since, limit_s=self._roles.start_s)

    # Calls.

    @property
    def limit_s(self) -> float:
        """The maximum seconds of a call, once it has a worker."""
        limits = [one.timeout_s or self._spec.call_s for one in (self._methods or {}).values()]
        return max(limits, default=self._spec.call_s)

    async def call(self, method: str, arguments: Arguments) -> RoleAnswer:
        """Call a method in its mode."""
        self._wanted.set()
        what = f"{self._spec.name}.{method}"
        try:
            async with asyncio.timeout(self._roles.start_s):
                declared = await self._until(lambda: self._declared(method))
                ranks = await self._until(lambda: self._chosen(declared))
        except TimeoutError:
            return CallLost(error=f"{what}() got no worker within {self._roles.start_s:g} s")
        except _UnansweredError as error:
            return error.answer
        parts = [arguments] * len(ranks)
        if declared.mode == "execute_each":
            try:
                parts = list(_parts(arguments, len(ranks)))
            except (msgspec.DecodeError, ValueError):
                rule = f"must have one element in each argument for each of {len(ranks)} workers"
                return CallRefused(error=f"{what} {rule}")
        within_s = declared.timeout_s or self._spec.call_s
        answers = await asyncio.gather(
            *(
                self._shielded(self._ask(rank, method, part, within_s))
                for rank, part in zip(ranks, parts, strict=True)
            )
        )
        return _together(answers, several=declared.mode in ("execute_all", "execute_each"))

    async def _until(self, found: Callable[[], T | None]) -> T:
        """Wait until there is something to be found among the workers."""
        this = object()
        self._callers[this] = self._loop.time()
        try:
            while (value := found()) is None:
                await self._changed.wait()
            return value
        finally:
            del self._callers[this]

    def _declared(self, method: str) -> DeclaredMethod | None:
        """Return the declaration of a method; None until it is known."""
        self._must_live(self.ranks, all)
        if self._methods is None or method in self._methods:
            return None if self._methods is None else self._methods[method]
        known = ", ".join(self._methods)
        rule = f"must be one of the registered methods of role {self._spec.name} ({known})"
        hint = did_you_mean(method, self._methods)
        raise _UnansweredError(CallRefused(error=f"method {rule}, got {method!r}{hint}"))

    def _must_live(
        self, ranks: Sequence[_Rank], how_many: Callable[[Iterable[object]], bool]
    ) -> None:
        """Raise _UnansweredError if any, or all, of these workers are given up."""
        reasons = [one.given_up for one in ranks]
        if how_many(reasons):
            raise _UnansweredError(CallLost(error=next(filter(None, reasons))))

    def _chosen(self, declared: DeclaredMethod) -> list[_Rank] | None:
        """Return the workers that are to execute a call; None until they can."""
        if declared.mode in ("execute_all", "execute_each"):
            self._must_live(self.ranks, any)
            return self.ranks if all(rank.group is not None for rank in self.ranks) else None
        ranks = self.ranks[:1] if declared.mode == "execute_first" else self.ranks
        self._must_live(ranks, all)
        able = [
            rank for rank in ranks if rank.group is not None and (declared.beside or not rank.calls)
        ]
        return [min(able, key=lambda rank: (rank.calls, rank.number))] if able else None

    def _shielded(self, asking: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        """Let a call go on if its caller is gone, since its worker executes it."""
        task = self._loop.create_task(asking, name=f"call of role {self._spec.name}")
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return asyncio.shield(task)

    def _ask(
        self, rank: _Rank, method: str, arguments: Arguments, within_s: float
    ) -> Coroutine[Any, Any, Returned | CallFailed | CallLost]:
        """Take a worker at once, and return what asks it."""
        group = rank.group
        assert group is not None, "it was chosen"
        rank.calls += 1

        async def ask() -> Returned | CallFailed | CallLost:
            try:
                (value,) = await group.call(method, {0: arguments}, within_s=within_s)
                answer: Returned | CallFailed = Returned(call=0, value=value)
            except WorkerError as error:
                answer = CallFailed(failures=error.failures)
            except WorkerLostError as error:
                return CallLost(error=str(error))
            finally:
                rank.calls -= 1
                rank.idle_since = self._loop.time()
                self._notify()
            rank.failures = 0
            return answer

        return ask()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def cancel(self) -> None:
        """Cancel the calls under way."""
        for task in self._asking:
            task.cancel()


def _parts(arguments: Arguments, count: int) -> Iterator[Arguments]:
    """Yield the arguments of each worker: one element of every argument. Raises
    ValueError.
    """
    args = [_decode_parts.decode(raw) for raw in arguments.args]
    kwargs = {name: _decode_parts.decode(raw) for name, raw in arguments.kwargs.items()}
    if any(len(values) != count for values in (*args, *kwargs.values())):
        raise ValueError
    for place in range(count):
        named = {name: values[place] for name, values in kwargs.items()}
        yield Arguments(args=tuple(values[place] for values in args), kwargs=named)


def _together(answers: Sequence[Returned | CallFailed | CallLost], *, several: bool) -> RoleAnswer:
    """Return the answer to a call from those of its workers."""
    for answer in answers:
        if isinstance(answer, CallLost):
            return answer
    failures = [
        one for answer in answers if isinstance(answer, CallFailed) for one in answer.failures
    ]
    if failures:
        return CallFailed(failures=tuple(failures))
    values = [answer.value for answer in answers if isinstance(answer, Returned)]
    return Returned(call=0, value=msgspec.Raw(encode(values)) if several else values[0])


@dataclass(eq=False, kw_only=True)
class RunRoles:
    """The roles of a run between `open` and `close`. `machine` has the hosts with which
    the run begins; `warn` receives warnings for the user, and `report` the component
    and the line of each long wait.
    """

    config: RunConfig
    run: RunDir
    cluster: GatheredHosts
    machine: Sequence[HostSlot]
    tasks: Tasks
    warn: Callable[[Warn], None]
    report: Callable[[str, str], None]
    address: RolesAddress | None = None
    """The address for calls; None without roles."""
    hosts: Sequence[HostSlot] = ()
    """The hosts without the GPUs of roles, for all other processes."""
    _roles: dict[str, _Role] = field(default_factory=dict)
    _keeping: list[asyncio.Task[Any]] = field(default_factory=list)
    _secret: str = field(default_factory=functools.partial(secrets.token_urlsafe, 16))

    @property
    def start_s(self) -> float:
        """Maximum seconds until a worker is constructed, and until a call gets one."""
        return self.config.watchdog.start_s

    @property
    def urls(self) -> dict[str, str]:
        """The base URL of each judge whose engine is a role, by the reward's name."""
        judges = (reward.name for reward in self.config.rewards if reward.embedded)
        return {name: f"{self.address.url}/{name}" for name in judges if self.address is not None}

    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        """Start all workers but those of judges, and wait until they are constructed.
        Raises ConfigError.
        """
        names = {host.number: self._name(host) for host in self.machine}
        places, unbound, self.hosts = bind_roles(self.config, self.machine)
        if unbound:
            raise ConfigError("\n".join(map(describe_unbound, unbound)))
        loop, specs = asyncio.get_running_loop(), roles_of(self.config)
        if not specs:
            return
        by_process = {place.process: place for place in places}
        for spec in specs:
            ranks = [
                _Rank(
                    number=rank,
                    place=(place := by_process[f"{spec.name} {rank}"]),
                    host=names[place.host],
                    opened=loop.create_future(),
                )
                for rank in range(spec.config.count)
            ]
            self._roles[spec.name] = _Role(spec, ranks, self)
        for place in places:
            self.cluster.reserve(names[place.host], place.devices)
        address = await stack.enter_async_context(
            listening(
                self._application(),
                self.cluster.address,
                0,
                guard=Guard(token=None),
                shutdown_s=1.0,
            )
        )
        stack.push_async_callback(self.close)
        self._keeping.append(self.tasks.spawn(self._name_waits(), "name the waits for roles"))
        for name, role in self._roles.items():
            self._keeping += [self.tasks.spawn(role.keep(rank), name) for rank in role.ranks]
        first = [spec.name for spec in specs if spec.idle_s is None]
        opening = [rank.opened for name in first for rank in self._roles[name].ranks]
        await asyncio.gather(*opening)
        limit_s = self.start_s + max(role.limit_s for role in self._roles.values()) + SLACK_S
        self.address = RolesAddress(url=f"{address}/{self._secret}", limit_s=limit_s)

    async def close(self) -> None:
        """End all workers, in order if they can."""
        for role in self._roles.values():
            role.cancel()
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)

    async def _name_waits(self) -> None:
        await name_long_waits(
            lambda: [wait for role in self._roles.values() for wait in role.waits()],
            clock=asyncio.get_running_loop().time,
            report=lambda component, line: self.report(component, line),  # it changes
        )

    async def place(self, spec: RoleOfRun, rank: _Rank) -> WorkerPlace:
        """Return the place of a worker: on the host with its GPUs, which it waits for,
        or else on any host of its pool. Raises HostError.
        """
        deadline = asyncio.get_running_loop().time() + self.start_s
        while (host := self._host(spec, rank)) is None:
            if asyncio.get_running_loop().time() > deadline:
                raise HostError(f"no host of the role has joined within {self.start_s:g} s")
            await asyncio.sleep(LOOK_S)
        there = self.cluster.hosts.host(host.number)
        rank.host, rank.where = there.name, there.name if there.is_here else f"host {there.name}"
        crowd = sum(one.host == rank.host for one in self._roles[spec.name].ranks)
        share = share_of(rank.place.devices, host.cpus // max(1, crowd))
        return WorkerPlace(
            spawn=there.starting(Program.ROLE, share),
            address=there.address,
            devices=rank.place.devices,
        )

    def _host(self, spec: RoleOfRun, rank: _Rank) -> HostSlot | None:
        present = own(self.cluster.joined() or self.machine)
        hosts = [host for host in present if host.number in self.cluster.hosts.by_number]
        named = {self._name(host): host for host in hosts}
        if rank.host in named or spec.config.gpus:
            return named.get(rank.host)
        others = [
            msgspec.structs.replace(other.place, host=named[other.host].number)
            for role in self._roles.values()
            for other in role.ranks
            if other is not rank and other.host in named
        ]
        places, _ = bind([list(_demands(spec))[rank.number]], hosts, others)
        return next((host for host in hosts if places and host.number == places[0].host), None)

    def _name(self, slot: HostSlot) -> str:
        host = self.cluster.hosts.by_number.get(slot.number)
        return slot.name if host is None else host.name

    def _application(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/{secret}/{role}/chat/completions", self._chat)
        app.router.add_post("/{secret}/{role}/{method}", self._call)
        return app

    async def _read(self, request: web.Request) -> bytes:
        if not hmac.compare_digest(request.match_info["secret"].encode(), self._secret.encode()):
            raise web.HTTPNotFound
        return await body_of(request, most=CALL_BYTES)

    async def _call(self, request: web.Request) -> web.Response:
        body, name = await self._read(request), request.match_info["role"]
        role = self._roles.get(name)
        if role is None:
            known = ", ".join(self._roles)
            rule = f"role must be one of the run's ({known})"
            hint = did_you_mean(name, self._roles)
            answer: RoleAnswer = CallRefused(error=f"{rule}, got {name!r}{hint}")
        else:
            try:
                arguments = _decode_arguments(body)
            except WireError as error:
                raise web.HTTPBadRequest(reason="the body must be a call") from error
            answer = await role.call(request.match_info["method"], arguments)
        return web.Response(body=encode(answer), content_type=MESSAGEPACK)

    async def _chat(self, request: web.Request) -> web.Response:
        """Forward a judge's request to its engine."""
        body, name = await self._read(request), request.match_info["role"]
        if name not in self.urls:
            raise web.HTTPNotFound
        arguments = Arguments(args=(msgspec.Raw(encode(body)),))
        answer = await self._roles[name].call("complete", arguments)
        if isinstance(answer, Returned):
            status, body = _decode_chat.decode(answer.value)
        else:
            text = str(answer.failures[0]) if isinstance(answer, CallFailed) else answer.error
            status, body = 503, as_json({"error": {"message": text}})
        return web.Response(status=status, body=body, content_type="application/json")


def describe_unbound(one: Unbound) -> str:
    """Return the line that refuses a worker without a place."""
    name, _, rank = one.process.rpartition(" ")
    return f"roles.{name} must have a place for each worker, got worker {rank}: {one.reason}"


@contextlib.asynccontextmanager
async def opened_roles(
    config: RunConfig,
    run: RunDir,
    cluster: GatheredHosts,
    tasks: Tasks,
    *,
    machine: Sequence[HostSlot],
    warn: Callable[[Warn], None],
    on_status: Callable[[str], None],
) -> AsyncIterator[RunRoles]:
    """Keep the roles of a run for the time of the context, in which the user's code of
    this process and its children can call them. `machine` has the hosts with which the
    run begins. Raises ConfigError.
    """
    async with contextlib.AsyncExitStack() as stack:
        roles = RunRoles(
            config=config,
            run=run,
            cluster=cluster,
            machine=machine,
            tasks=tasks,
            warn=warn,
            report=lambda _, line: on_status(line),
        )
        if config.roles:
            on_status(f"starting roles {', '.join(config.roles)}")
        await roles.open(stack)
        if roles.address is not None:
            os.environ[VARIABLE] = as_json(roles.address).decode()
            stack.callback(os.environ.pop, VARIABLE, None)
        yield roles
