"""A client of one or several rollout services: submits rollouts, waits for them,
retries, and balances the load.

Invariants: a rollout has the same id at every service, so submitting it again is
harmless; a service that does not answer loses its rollouts to another one; a rollout
that another service has completed is cancelled as soon as the first one answers again.
"""

import asyncio
import contextlib
import os
import resource
import secrets
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar

import aiohttp
import msgspec

from rollweave.core.policy.health import Hysteresis
from rollweave.io.http.guard import read_token
from rollweave.record.rundir import RunDir
from rollweave.schema.address import host_of, parse_address
from rollweave.schema.errors import RollweaveError
from rollweave_service.loop_context import LoopContext
from rollweave_service.messages import (
    Completions,
    EngineRequest,
    EngineStatus,
    EngineStatuses,
    Error,
    MemberStatus,
    RolloutPage,
    RolloutRequest,
    RolloutStatus,
)
from rollweave_service.spreading import Host, spread

T = TypeVar("T")

POLL_S, MIN_POLL_S = 20.0, 1.0
"""Seconds that one request waits for a rollout to be done; down to the minimum while
there are more rollouts than connections.
"""

MAX_FILES = 1 << 16
"""Number of files that the process may open if the system sets no limit.

Half of those that are not open yet are for connections.
"""

BACKOFF_S, MAX_BACKOFF_S = 0.1, 5.0
"""Seconds before the first retry, doubled for each further one, up to the maximum."""

ATTEMPTS = 8
"""Maximum attempts of a request that is not answered. After that, about ten seconds,
the service counts as dead.
"""

CANCEL_S = 5.0
"""Maximum seconds to cancel a rollout. If the service does not answer by then, the
rollout is cancelled once it does.
"""

DEAD_S = 15.0
"""Seconds until a dead service is tried again."""

REBALANCE_S = 2.0
"""Seconds between two checks of the services' engines. A service that misses three
checks loses its share of the engines.
"""

NO_ANSWER = (aiohttp.ClientError, TimeoutError)
"""The errors of a request that is not answered."""

Addresses = str | Path | Sequence[str | Path]
"""One or several addresses or directories of services."""


class ServiceError(RollweaveError):
    """The service refused a request: `status` is the HTTP status, `kind` the error's
    type.
    """

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class NoServiceError(RollweaveError):
    """No service answers."""


class ClientClosedError(RollweaveError):
    """The client's context was left, or never entered."""

    def __init__(self) -> None:
        super().__init__(
            "the client must be used inside `async with`, which must not end before its calls"
        )


@dataclass(slots=True)
class _Server:
    address: str
    token: str | None = None
    outstanding: int = 0
    dead_until: float = 0.0
    failure: str = ""  # its address, and why it did not answer the last time
    # ids of rollouts to cancel there, because another service has taken them over
    to_cancel: list[str] = field(default_factory=list)
    health: Hysteresis | None = None  # None until engines are assigned to services

    def describe(self, error: Exception) -> str:
        return f"{self.address} ({str(error) or type(error).__name__})"


class _Call(NamedTuple, Generic[T]):
    """A request: its method, path and body, and the type of its answer."""

    method: str
    path: str
    answer: type[T]
    body: msgspec.Struct | None = None


def _path(id: str) -> str:
    return f"/v1/rollouts/{urllib.parse.quote(id, safe='')}"


def _submission(request: RolloutRequest) -> _Call[RolloutStatus]:
    return _Call("POST", "/v1/rollouts", RolloutStatus, request)


def _status(id: str, *, wait_s: float = 0.0) -> _Call[RolloutStatus]:
    return _Call("GET", f"{_path(id)}?wait={wait_s:g}", RolloutStatus)


def _cancellation(id: str) -> _Call[RolloutStatus]:
    return _Call("DELETE", _path(id), RolloutStatus)


def _registration(engine: EngineRequest) -> _Call[EngineStatus]:
    return _Call("POST", "/v1/engines", EngineStatus, engine)


class RolloutClient:
    """`async with RolloutClient(addresses) as client: await client.rollout(...)`.

    All calls belong to one event loop. Leaving the context cancels pending rollouts;
    their calls, and all later ones, raise ClientClosedError.
    """

    def __init__(self, addresses: Addresses, *, token: str | None = None) -> None:
        """Create a client. Each address is that of a service, or the directory of a
        service on this host, which contains its address and token.

        `token` is for services whose directory is not given. Raises ValueError without
        an address, or for an invalid one.
        """
        entries = [addresses] if isinstance(addresses, str | Path) else list(addresses)
        if not entries:
            raise ValueError("addresses must have at least one, got none")
        tokens = dict(_locate(entry, token) for entry in entries)
        self._servers = [_Server(address, token=own) for address, own in tokens.items()]
        self._session: aiohttp.ClientSession | None = None
        self._leaving = False
        self._calls: set[asyncio.Task[RolloutStatus]] = set()  # one for each of `rollout`
        self._connections = max(1, _unopened_files() // 2)
        # first come, first served, unlike a connector's limit
        self._free = asyncio.Semaphore(self._connections)
        self._polled = 0  # number of rollouts for whose end a service is polled
        self._engines: dict[str, EngineRequest] = {}  # engines to assign, by address
        self._assigned: set[str] = set()  # all addresses that were ever assigned
        self._rebalancing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=POLL_S + 30.0)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=limits, connector=connector)
        self._leaving = False
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leaving = True
        try:
            if self._rebalancing is not None:
                self._rebalancing.cancel()
                await asyncio.wait([self._rebalancing])
                self._rebalancing = None
            for call in self._calls:
                call.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)
        finally:
            if self._session is not None:
                await self._session.close()
                self._session = None

    async def rollout(self, request: RolloutRequest) -> RolloutStatus:
        """Run a rollout, and return it with its results once all members are done.
        Cancelling the call cancels the rollout.

        Raises ServiceError if the request is refused for good, NoServiceError if no
        service answers, and ClientClosedError if the context is left first.
        """
        if self._session is None or self._leaving:
            raise ClientClosedError
        call = asyncio.create_task(self._rollout(_named(request)))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            return await call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # the context was left
                raise ClientClosedError from None
            raise

    async def _rollout(self, request: RolloutRequest) -> RolloutStatus:
        status = await self._on_any(request, lambda server: self._run_on(server, request))
        await self._cancel_abandoned()
        return status

    async def rollouts(self, requests: Iterable[RolloutRequest]) -> AsyncIterator[RolloutStatus]:
        """Run all rollouts at once; yield each as soon as it is done."""
        tasks = [asyncio.ensure_future(self.rollout(request)) for request in requests]
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def submit(self, request: RolloutRequest) -> RolloutStatus:
        """Submit a rollout without waiting for it; pass its `id` to `get`, `stream` and
        `cancel`.

        Leaving the context does not cancel it. Raises ServiceError if the request is
        refused for good, and NoServiceError if no service answers.
        """
        request = _named(request)
        call = _submission(request)
        return await self._on_any(request, lambda server: self._retry(server, call))

    async def get(self, id: str, *, wait_s: float = 0.0) -> RolloutStatus:
        """Return a rollout's status, with the results of members that are done, after
        `wait_s`, or once the rollout is done.

        Another client may have submitted it. Raises ServiceError (404) if no service
        knows it, NoServiceError if a service that might know it does not answer.
        """
        server, status = await self._find(id)
        deadline = _now() + wait_s
        while status.state != "done" and (remaining_s := deadline - _now()) > 0:
            call = _status(id, wait_s=min(remaining_s, POLL_S))
            status = await self._retry(server, call)
        return status

    async def cancel(self, id: str) -> RolloutStatus:
        """Cancel a rollout: members that are not done end as `cancelled`.

        Returns its status; raises as `get`.
        """
        server, _ = await self._find(id)
        return await self._retry(server, _cancellation(id))

    async def stream(self, id: str) -> AsyncIterator[MemberStatus]:
        """Yield the members of a rollout with their results, each as soon as it is
        done. Raises as `get`.
        """
        server, status = await self._find(id)
        yielded, after = set[str](), 0
        query = f"rollout={urllib.parse.quote(id, safe='')}&limit=1000&wait={POLL_S:g}"
        while True:
            for member in status.members:
                if member.stage == "done" and member.id not in yielded:
                    yielded.add(member.id)
                    yield member
            if status.state == "done":
                return
            is_new = False
            while not is_new:
                path = f"/v1/completions?after={after}&{query}"
                page = await self._retry(server, _Call("GET", path, Completions))
                after = page.next
                is_new = any(one.member not in yielded for one in page.completions)
            status = await self._retry(server, _status(id))

    async def list_rollouts(self, *, unfinished: bool = False) -> list[RolloutStatus]:
        """Return all rollouts, or only unfinished ones, without results, for each
        service in the order of acceptance.

        Raises NoServiceError if a service does not answer.
        """
        statuses: list[RolloutStatus] = []
        query = f"limit=1000&unfinished={'true' if unfinished else 'false'}"
        for server in self._servers:
            page, after = None, 0
            try:
                while page is None or page.rollouts:
                    path = f"/v1/rollouts?after={after}&{query}"
                    page = await self._retry(server, _Call("GET", path, RolloutPage))
                    statuses += page.rollouts
                    after = page.next
            except NO_ANSWER as error:
                raise NoServiceError(
                    f"a service does not answer: {server.describe(error)}"
                ) from error
        return statuses

    async def register(self, request: EngineRequest) -> None:
        """Register an engine with every service."""
        for server in self._servers:
            await self._send(server, _registration(request))

    async def register_engines(self, engines: Sequence[EngineRequest]) -> None:
        """Distribute engines over the services: each gets first those of its own host,
        then the rest in turn (`spreading`).

        As long as the context is open, engines move when a service stops answering, or
        answers again. A later call replaces these engines; engines that were registered
        in another way are left alone. Raises ServiceError for an engine that is
        refused, and NoServiceError if no service answers.
        """
        if self._rebalancing is not None:
            self._rebalancing.cancel()
        self._engines = {engine.address: engine for engine in engines}
        self._assigned |= self._engines.keys()
        if not await self._assign_engines():
            raise NoServiceError(
                f"none of {', '.join(server.address for server in self._servers)} answers"
            )
        self._rebalancing = asyncio.create_task(self._rebalance(), name="rebalance engines")

    async def health(self) -> dict[str, dict[str, Any]]:
        """Return the health of each service, by address; services that do not answer
        are missing.
        """
        health = {}
        for server in self._servers:
            with contextlib.suppress(ServiceError, *NO_ANSWER):
                call = _Call("GET", "/health", dict[str, Any])
                health[server.address] = await self._send(server, call)
        return health

    # One service.

    async def _find(self, id: str) -> tuple[_Server, RolloutStatus]:
        """Find the service that knows a rollout, and the rollout's status there.

        Raises as `get`.
        """
        unknown: ServiceError | None = None
        failures = []
        for server in self._servers:
            try:
                return server, await self._retry(server, _status(id))
            except ServiceError as error:
                if error.status != 404:
                    raise
                unknown = error
            except NO_ANSWER as error:
                failures.append(server.describe(error))
        if failures or unknown is None:
            raise NoServiceError(
                f"no service that answers knows rollout {id!r:.100}; these do "
                f"not answer: {', '.join(failures)}"
            )
        raise unknown

    async def _run_on(self, server: _Server, request: RolloutRequest) -> RolloutStatus:
        """Submit the rollout and wait until it is done; submit it again if the service
        was restarted without its directory.
        """
        server.outstanding += request.members
        self._polled += 1
        try:
            while True:
                await self._retry(server, _submission(request), is_patient=True)
                try:
                    return await self._until_done(server, request.id)
                except ServiceError as error:
                    if error.status != 404:
                        raise
                await asyncio.sleep(BACKOFF_S)
        except asyncio.CancelledError:
            cancelling = self._send_in_turn(server, _cancellation(request.id))
            try:
                await asyncio.shield(asyncio.wait_for(cancelling, CANCEL_S))
            except NO_ANSWER:
                server.to_cancel.append(request.id)
            except ServiceError:
                pass  # the request never reached the service
            raise
        finally:
            server.outstanding -= request.members
            self._polled -= 1

    async def _until_done(self, server: _Server, id: str) -> RolloutStatus:
        while True:
            seconds = max(MIN_POLL_S, POLL_S * min(1.0, self._connections / self._polled))
            status = await self._retry(server, _status(id, wait_s=seconds), is_patient=True)
            if status.state == "done":
                return status

    async def _retry(self, server: _Server, call: _Call[T], *, is_patient: bool = False) -> T:
        """Call `_send_in_turn`, and retry a few times if the service does not answer or
        is busy. A caller that `is_patient` waits without end for one that is busy, and
        leaves one that shuts down as if it did not answer.
        """
        failures, wait_s = 0, BACKOFF_S
        while True:
            try:
                return await self._send_in_turn(server, call)
            except ServiceError as error:
                failures += not is_patient or error.kind == "closed"
                if error.status not in (429, 503) or (failures == ATTEMPTS and not is_patient):
                    raise
                if failures == ATTEMPTS:
                    raise aiohttp.ClientConnectionError("it is shutting down") from error
            except NO_ANSWER:
                failures += 1
                if failures == ATTEMPTS:
                    raise
            await asyncio.sleep(wait_s * (0.5 + secrets.randbelow(1000) / 1000))
            wait_s = min(2 * wait_s, MAX_BACKOFF_S)

    async def _send_in_turn(self, server: _Server, call: _Call[T]) -> T:
        """Call `_send` once a connection is free. Requests that each rollout makes go
        through here.
        """
        async with self._free:
            return await self._send(server, call)

    async def _send(self, server: _Server, call: _Call[T]) -> T:
        """Send one request, and return its answer."""
        if self._session is None or self._session.closed:
            raise ClientClosedError
        headers, data = {}, None
        if call.body is not None:
            headers, data = {"Content-Type": "application/json"}, msgspec.json.encode(call.body)
        if server.token is not None:
            headers["Authorization"] = f"Bearer {server.token}"
        async with self._session.request(
            call.method, server.address + call.path, data=data, headers=headers
        ) as response:
            answer = await response.read()
        if response.status < 400:
            return msgspec.json.decode(answer, type=call.answer)
        try:
            error = msgspec.json.decode(answer, type=Error).error
            kind, message = error.type, error.message
        except msgspec.DecodeError:  # it is not in the service's form
            kind, message = "", answer[:200].decode(errors="replace")
        raise ServiceError(response.status, kind, f"{server.address}: {message}")

    # Engines.

    async def _rebalance(self) -> None:
        while True:
            await asyncio.sleep(REBALANCE_S)
            with contextlib.suppress(ServiceError, *NO_ANSWER):
                await self._assign_engines()

    async def _assign_engines(self) -> bool:
        """Register its share of the engines with each service that answers, and
        withdraw all others there.

        Returns whether any service answers.
        """
        registered = await asyncio.gather(*map(self._engines_of, self._servers))
        healthy = []
        for server, engines in zip(self._servers, registered, strict=True):
            if server.health is None:
                server.health = Hysteresis(healthy=engines is not None)
            if server.health.observe(engines is not None):
                healthy.append(Host(server=server.address, host=host_of(server.address)))
        shares = spread(
            [Host(server=address, host=host_of(address)) for address in self._engines], healthy
        )
        for server, engines in zip(self._servers, registered, strict=True):
            if engines is None or server.address not in shares:
                continue
            share = shares[server.address]
            for address in [address for address in share if address not in engines]:
                await self._send(server, _registration(self._engines[address]))
            for address, engine_id in engines.items():
                if address in self._assigned and address not in share:
                    path = f"/v1/engines/{engine_id}?force=true"
                    await self._send(server, _Call("DELETE", path, EngineStatuses))
        return bool(healthy)

    async def _engines_of(self, server: _Server) -> dict[str, str] | None:
        """Return the ids of the engines that are registered with a service, by address;
        None if it does not answer.
        """
        try:
            async with asyncio.timeout(REBALANCE_S):
                answer = await self._send(server, _Call("GET", "/v1/engines", EngineStatuses))
        except (ServiceError, *NO_ANSWER):
            return None
        return {
            engine.address: engine.id
            for engine in answer.engines
            if engine.address and not engine.draining and engine.status != "removed"
        }

    # All services.

    async def _on_any(
        self, request: RolloutRequest, run: Callable[[_Server], Awaitable[RolloutStatus]]
    ) -> RolloutStatus:
        """Return what `run` returns for the first service that answers.

        Raises NoServiceError.
        """
        failed: list[_Server] = []
        while True:
            server = self._choose(failed)
            if request.id in server.to_cancel:  # it is tried again after a failure
                server.to_cancel.remove(request.id)
            try:
                return await run(server)
            except NO_ANSWER as error:
                server.dead_until, server.failure = _now() + DEAD_S, server.describe(error)
                server.to_cancel.append(request.id)  # that service may have accepted it
                failed.append(server)

    def _choose(self, failed: list[_Server]) -> _Server:
        """Return the service with the fewest outstanding members, which is not in
        `failed` and, if possible, not dead. Raises NoServiceError.
        """
        remaining = [server for server in self._servers if server not in failed]
        alive = [server for server in remaining if server.dead_until <= _now()]
        if not remaining:
            raise NoServiceError(
                "no service answers: "
                f"{', '.join(server.failure or server.address for server in self._servers)}"
            )
        return min(alive or remaining, key=lambda server: server.outstanding)

    async def _cancel_abandoned(self) -> None:
        """Cancel rollouts that were moved away from a service, if it may answer
        again.
        """
        for server in self._servers:
            if server.to_cancel and server.dead_until <= _now():
                job_ids, server.to_cancel = server.to_cancel, []
                for job_id in job_ids:
                    with contextlib.suppress(ServiceError, *NO_ANSWER):
                        await self._send(server, _cancellation(job_id))


class Rollouts(LoopContext):
    """A `RolloutClient` for programs without an event loop: `with Rollouts(addresses)
    as rollouts: rollouts.run(requests)`.
    """

    def __init__(self, addresses: Addresses, *, token: str | None = None) -> None:
        super().__init__("rollouts")
        self._client = RolloutClient(addresses, token=token)

    async def _open(self) -> None:
        await self._stack.enter_async_context(self._client)

    def run(self, requests: Iterable[RolloutRequest]) -> list[RolloutStatus]:
        """Run all rollouts at once; return them in the order of the requests. Errors
        are those of `RolloutClient.rollout`.

        The first error, and Ctrl-C, cancel the others.
        """

        async def run_all() -> list[RolloutStatus]:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._client.rollout(request)) for request in requests
                    ]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            return [task.result() for task in tasks]

        return self._loop.call(run_all())

    def submit(self, request: RolloutRequest) -> RolloutStatus:
        """Submit a rollout without waiting for it, as `RolloutClient.submit`."""
        return self._loop.call(self._client.submit(request))

    def get(self, id: str, *, wait_s: float = 0.0) -> RolloutStatus:
        """Return a rollout's status, with results, as `RolloutClient.get`."""
        return self._loop.call(self._client.get(id, wait_s=wait_s))

    def cancel(self, id: str) -> RolloutStatus:
        """Cancel a rollout, as `RolloutClient.cancel`."""
        return self._loop.call(self._client.cancel(id))

    def stream(self, id: str) -> Iterator[MemberStatus]:
        """Yield the members of a rollout, each as soon as it is done, as
        `RolloutClient.stream`.
        """
        members = self._client.stream(id)

        async def next_member() -> MemberStatus | None:
            return await anext(members, None)

        while (member := self._loop.call(next_member())) is not None:
            yield member

    def list_rollouts(self, *, unfinished: bool = False) -> list[RolloutStatus]:
        """Return the rollouts of all services, as `RolloutClient.list_rollouts`."""
        return self._loop.call(self._client.list_rollouts(unfinished=unfinished))

    def register(self, request: EngineRequest) -> None:
        """Register an engine with every service."""
        self._loop.call(self._client.register(request))

    def register_engines(self, engines: Sequence[EngineRequest]) -> None:
        """Distribute engines over the services, as `RolloutClient.register_engines`."""
        self._loop.call(self._client.register_engines(engines))


def _unopened_files() -> int:
    """Return the number of files that this process may still open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_FILES if soft == resource.RLIM_INFINITY else soft
    return limit - len(os.listdir("/proc/self/fd"))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _named(request: RolloutRequest) -> RolloutRequest:
    """Return the request with an id, by which it can be repeated."""
    return msgspec.structs.replace(request, id=request.id or f"c-{secrets.token_hex(8)}")


def _locate(entry: str | Path, token: str | None) -> tuple[str, str | None]:
    """Return the address and token of a service. Raises ValueError."""
    if isinstance(entry, str) and "://" in entry:
        return parse_address(entry, field="addresses"), token
    run = RunDir(Path(entry))
    if not run.address.is_file():
        raise ValueError(
            "addresses must be http://host:port, or the directory of a running service, "
            f"got {str(entry)!r:.200}"
        )
    return run.address.read_text().strip(), read_token(run.token) if run.token.exists() else token
