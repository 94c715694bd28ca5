"""A client of rollout services: submits, waits, tries again, and spreads over several
of them.

Invariants: a rollout has one id wherever it is asked for, so asking again is harmless;
a service that does not answer loses its rollouts to another one; what it was asked for
and somebody else has done is cancelled there as soon as it answers again.
"""

import asyncio
import contextlib
import itertools
import os
import resource
import secrets
import urllib.parse
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from rollweave.core.policy.balancing import Host, Hysteresis, spread
from rollweave.io.http.guard import read_token
from rollweave.record.rundir import RunDir
from rollweave.schema.address import host_of, parse_address
from rollweave.schema.errors import RollweaveError
from rollweave.schema.service import (
    Completion,
    EngineRequest,
    EngineStatus,
    MemberStatus,
    RolloutRequest,
    RolloutStatus,
)
from rollweave.service.loop import LoopThread

POLL_S, LEAST_POLL_S = 20.0, 1.0
"""Of one question whether a rollout is done; less while there are more rollouts than
connections.
"""

FILES = 1 << 16
"""Files that the process may open where the system sets no limit.

Half of those that are not open yet are for connections.
"""

BACKOFF_S, MOST_BACKOFF_S = 0.1, 5.0
"""Before a first and a later try; doubled each time."""

TRIES = 8
"""Of a request whose service does not answer, before it counts as dead: ten seconds or
so.
"""

CANCEL_S = 5.0
"""For a service to hear that a rollout is cancelled; later it is told when it answers
again.
"""

DEAD_S = 15.0
"""Until a dead service is asked again."""


DEAL_S = 2.0
"""Between two looks at who has which engines; a service that has not answered three of
them has lost its share.
"""


Addresses = str | Path | Sequence[str | Path]
"""Addresses of services, or their directories."""


class ServiceError(RollweaveError):
    """The service refused: `status` is that of HTTP, `kind` the error's type."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class NoServiceError(RollweaveError):
    """No service answers."""


class ClientClosedError(RollweaveError):
    """The client was left, or never entered."""

    def __init__(self) -> None:
        super().__init__("the client must be entered, and not left until its calls have ended")


@dataclass(slots=True)
class _Server:
    address: str
    token: str | None = None
    outstanding: int = 0
    dead_until: float = 0.0
    ailment: str = ""  # its address, and why it did not answer when it was last given up
    # ids to cancel there, which another service has done
    owed: list[str] = field(default_factory=list)
    health: Hysteresis | None = None  # as far as engines are dealt; None before they were


class _Completions(msgspec.Struct):
    completions: list[Completion]


class _Listed(msgspec.Struct):
    rollouts: list[RolloutStatus]
    next: int


class RolloutClient:
    """`async with RolloutClient(addresses) as client: await client.rollout(...)`.

    All calls belong to one event loop. Leaving the client cancels rollouts that are
    pending, whose calls raise ClientClosedError, as every later call does.
    """

    def __init__(self, addresses: Addresses, *, token: str | None = None) -> None:
        """Each address is a service's, or the directory of a service on this host,
        which has its address and token.

        `token` is for services whose directory is not given. Raises ValueError without
        an address, or for an invalid one.
        """
        several = [addresses] if isinstance(addresses, str | Path) else list(addresses)
        if not several:
            raise ValueError("addresses must have at least one, got none")
        found = dict(_place(one, token) for one in several)
        self._servers = [_Server(address, token=known) for address, known in found.items()]
        self._session: aiohttp.ClientSession | None = None
        self._leaving = False
        self._pending: set[asyncio.Timeout] = set()  # one for each call of `rollout`
        self._idle = asyncio.Event()  # set while there are none
        self._idle.set()
        self._connections = max(1, _unopened_files() // 2)
        # in turn, which a connector's limit is not
        self._free = asyncio.Semaphore(self._connections)
        self._asking = 0  # rollouts that a service is being asked about
        self._engines: dict[str, EngineRequest] = {}  # to be dealt, by address
        self._dealt: set[str] = set()  # addresses that ever were
        self._dealing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=POLL_S + 30.0)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=limits, connector=connector)
        self._leaving = False
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leaving = True
        try:
            if self._dealing is not None:
                self._dealing.cancel()
                await asyncio.wait([self._dealing])
                self._dealing = None
            for pending in self._pending:
                pending.reschedule(_now())
            await self._idle.wait()
        finally:
            if self._session is not None:
                await self._session.close()
                self._session = None

    async def rollout(self, request: RolloutRequest) -> RolloutStatus:
        """The rollout with its results, once all members are done. Cancelling the call
        cancels the rollout.

        Raises ServiceError for a request that is refused for good, NoServiceError where
        no service answers, ClientClosedError where the client is left first.
        """
        if self._session is None or self._leaving:
            raise ClientClosedError
        until_left = asyncio.timeout(None)
        self._pending.add(until_left)
        self._idle.clear()
        try:
            async with until_left:
                return await self._rollout(request)
        except TimeoutError:
            if until_left.expired():
                raise ClientClosedError from None
            raise
        finally:
            self._pending.discard(until_left)
            if not self._pending:
                self._idle.set()

    async def _rollout(self, request: RolloutRequest) -> RolloutStatus:
        if not request.id:
            request = msgspec.structs.replace(request, id=f"c-{secrets.token_hex(8)}")
        left: list[_Server] = []
        while True:
            server = self._choose(left)
            if request.id in server.owed:  # asked again, after nobody answered
                server.owed.remove(request.id)
            server.outstanding += request.members
            self._asking += 1
            try:
                found = await self._on(server, request)
                break
            except (aiohttp.ClientError, TimeoutError) as error:
                server.dead_until = _now() + DEAD_S
                server.owed.append(request.id)
                server.ailment = _ailment(server, error)
                left.append(server)
            except asyncio.CancelledError:
                try:
                    await asyncio.shield(
                        asyncio.wait_for(self._ask(server, "DELETE", _path(request.id)), CANCEL_S)
                    )
                except (aiohttp.ClientError, TimeoutError):
                    server.owed.append(request.id)
                except ServiceError:
                    pass  # it never came there
                raise
            finally:
                server.outstanding -= request.members
                self._asking -= 1
        await self._settle()
        return found

    async def rollouts(self, requests: Iterable[RolloutRequest]) -> AsyncIterator[RolloutStatus]:
        """All of them at once, each as it is done."""
        tasks = [asyncio.ensure_future(self.rollout(request)) for request in requests]
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def submit(self, request: RolloutRequest) -> RolloutStatus:
        """Ask for a rollout without waiting for it; its `id` is for `get`, `stream` and
        `cancel`.

        Leaving the client does not cancel it. Raises ServiceError if the request is
        refused for good, NoServiceError.
        """
        if not request.id:
            request = msgspec.structs.replace(request, id=f"c-{secrets.token_hex(8)}")
        body, left = msgspec.json.encode(request), list[_Server]()
        while True:
            server = self._choose(left)
            try:
                return msgspec.json.decode(
                    await self._patiently(server, "POST", "/v1/rollouts", body), type=RolloutStatus
                )
            except (aiohttp.ClientError, TimeoutError) as error:
                server.dead_until, server.ailment = _now() + DEAD_S, _ailment(server, error)
                server.owed.append(request.id)  # that service may have accepted it
                left.append(server)

    async def get(self, id: str, *, wait_s: float = 0.0) -> RolloutStatus:
        """Return a rollout's status, with the results of members that are done, after
        `wait_s`, or once the rollout is done.

        Another client may have submitted it. Raises ServiceError (404) if no service
        knows it, NoServiceError if a service that might know it does not answer.
        """
        server, status = await self._find(id)
        until = _now() + wait_s
        while status.state != "done" and (left_s := until - _now()) > 0:
            answer = await self._patiently(
                server, "GET", f"{_path(id)}?wait={min(left_s, POLL_S):g}"
            )
            status = msgspec.json.decode(answer, type=RolloutStatus)
        return status

    async def cancel(self, id: str) -> RolloutStatus:
        """Cancel a rollout: members that are not done end as `cancelled`.

        Returns its status; raises as `get`.
        """
        server, _ = await self._find(id)
        return msgspec.json.decode(
            await self._patiently(server, "DELETE", _path(id)), type=RolloutStatus
        )

    async def stream(self, id: str) -> AsyncIterator[MemberStatus]:
        """Yield the members of a rollout with their results, each as soon as it is
        done. Raises as `get`.
        """
        server, status = await self._find(id)
        told, after = set[str](), 0
        query = f"rollout={urllib.parse.quote(id, safe='')}&limit=1000&wait={POLL_S:g}"
        while True:
            for member in status.members:
                if member.stage == "done" and member.id not in told:
                    told.add(member.id)
                    yield member
            if status.state == "done":
                return
            found: list[Completion] = []
            while not any(one.member not in told for one in found):
                answer = await self._patiently(
                    server, "GET", f"/v1/completions?after={after}&{query}"
                )
                found = msgspec.json.decode(answer, type=_Completions).completions
                after = found[-1].number if found else after
            status = msgspec.json.decode(
                await self._patiently(server, "GET", _path(id)), type=RolloutStatus
            )

    async def list_rollouts(self, *, unfinished: bool = False) -> list[RolloutStatus]:
        """Yield all rollouts, or only unfinished ones, without results, for each
        service in the order of acceptance.

        Raises NoServiceError if a service does not answer.
        """
        found: list[RolloutStatus] = []
        for server in self._servers:
            try:
                found += await self._listed(server, unfinished=unfinished)
            except (aiohttp.ClientError, TimeoutError) as error:
                raise NoServiceError(f"no service answers: {_ailment(server, error)}") from error
        return found

    async def register(self, request: EngineRequest) -> None:
        """Give every service this engine."""
        for server in self._servers:
            await self._send(server, "POST", "/v1/engines", msgspec.json.encode(request))

    async def register_engines(self, engines: Sequence[EngineRequest]) -> None:
        """Deal these engines to the services: to each first those of its own host, the
        rest in turn (`core/policy/balancing`).

        For as long as the client is entered they move when a service does not answer
        any more, or does again. A later call's engines take the place of these; engines
        that were registered otherwise are left alone. Raises ServiceError for one that
        is refused, NoServiceError where no service answers.
        """
        if self._dealing is not None:
            self._dealing.cancel()
        self._engines = {engine.address: engine for engine in engines}
        self._dealt |= self._engines.keys()
        if not await self._deal():
            raise NoServiceError(
                f"none of {', '.join(server.address for server in self._servers)} answers"
            )
        self._dealing = asyncio.create_task(self._deal_again(), name="deal engines")

    async def health(self) -> dict[str, dict[str, Any]]:
        """What each service says of itself, by address; those that do not answer are
        missing.
        """
        found = {}
        for server in self._servers:
            with contextlib.suppress(aiohttp.ClientError, ServiceError, TimeoutError):
                found[server.address] = msgspec.json.decode(
                    await self._send(server, "GET", "/health"), type=dict[str, Any]
                )
        return found

    # One service.

    async def _find(self, id: str) -> tuple[_Server, RolloutStatus]:
        """Find the service that knows a rollout, and the rollout's status there.

        Raises as `get`.
        """
        unknown: ServiceError | None = None
        ailments = []
        for server in self._servers:
            try:
                return server, msgspec.json.decode(
                    await self._patiently(server, "GET", _path(id)), type=RolloutStatus
                )
            except ServiceError as error:
                if error.status != 404:
                    raise
                unknown = error
            except (aiohttp.ClientError, TimeoutError) as error:
                ailments.append(_ailment(server, error))
        if ailments or unknown is None:
            raise NoServiceError(
                f"no service that answers knows rollout {id!r:.100}; these do "
                f"not: {', '.join(ailments)}"
            )
        raise unknown

    async def _listed(self, server: _Server, *, unfinished: bool) -> list[RolloutStatus]:
        """Yield the rollouts of one service, page by page."""
        found: list[RolloutStatus] = []
        query = f"limit=1000&unfinished={'true' if unfinished else 'false'}"
        after = 0
        while True:
            page = msgspec.json.decode(
                await self._patiently(server, "GET", f"/v1/rollouts?after={after}&{query}"),
                type=_Listed,
            )
            if not page.rollouts:
                return found
            found += page.rollouts
            after = page.next

    async def _patiently(
        self, server: _Server, method: str, path: str, body: bytes | None = None
    ) -> bytes:
        """Call `_ask`, and retry a few times if the service is busy or does not answer."""
        wait_s = BACKOFF_S
        for tries in itertools.count(1):
            try:
                return await self._ask(server, method, path, body)
            except ServiceError as error:
                if error.status not in (429, 503) or tries == TRIES:
                    raise
            except (aiohttp.ClientError, TimeoutError):
                if tries == TRIES:
                    raise
            await asyncio.sleep(wait_s * (0.5 + secrets.randbelow(1000) / 1000))
            wait_s = min(2 * wait_s, MOST_BACKOFF_S)
        raise AssertionError("the loop above has no end")

    async def _on(self, server: _Server, request: RolloutRequest) -> RolloutStatus:
        """Submit and wait. What fails on the way is tried again here, a few times."""
        body, path = msgspec.json.encode(request), _path(request.id)
        submitted, failures, wait_s = False, 0, BACKOFF_S
        while True:
            try:
                if not submitted:
                    await self._ask(server, "POST", "/v1/rollouts", body)
                    submitted = True
                seconds = max(LEAST_POLL_S, POLL_S * min(1.0, self._connections / self._asking))
                status = msgspec.json.decode(
                    await self._ask(server, "GET", f"{path}?wait={seconds:g}"), type=RolloutStatus
                )
                failures, wait_s = 0, BACKOFF_S
                if status.state == "done":
                    return status
                continue
            except ServiceError as error:
                if error.status == 404 and submitted:
                    submitted = False  # it has begun anew, without its directory
                elif error.status not in (429, 503):
                    raise
                elif error.kind == "closed":
                    failures += 1  # it is ending
            except (aiohttp.ClientError, TimeoutError):
                failures += 1
                if failures >= TRIES:
                    raise
            if failures >= TRIES:
                raise aiohttp.ClientConnectionError("it is ending")
            await asyncio.sleep(wait_s * (0.5 + secrets.randbelow(1000) / 1000))
            wait_s = min(2 * wait_s, MOST_BACKOFF_S)

    async def _ask(
        self, server: _Server, method: str, path: str, body: bytes | None = None
    ) -> bytes:
        """`_send` where there are as many as rollouts: each has its turn."""
        async with self._free:
            return await self._send(server, method, path, body)

    async def _send(
        self, server: _Server, method: str, path: str, body: bytes | None = None
    ) -> bytes:
        if self._session is None or self._session.closed:
            raise ClientClosedError
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if server.token is not None:
            headers["Authorization"] = f"Bearer {server.token}"
        async with self._session.request(
            method, server.address + path, data=body, headers=headers
        ) as response:
            answer = await response.read()
            if response.status >= 400:
                kind, message = _error(answer)
                raise ServiceError(response.status, kind, f"{server.address}: {message}")
            return answer

    # Engines.

    async def _deal_again(self) -> None:
        while True:
            await asyncio.sleep(DEAL_S)
            with contextlib.suppress(aiohttp.ClientError, ServiceError, TimeoutError):
                await self._deal()

    async def _deal(self) -> bool:
        """Let each service that answers have its share of the engines.

        False if none does.
        """
        found = await asyncio.gather(*map(self._engines_of, self._servers))
        living = []
        for server, known in zip(self._servers, found, strict=True):
            if server.health is None:
                server.health = Hysteresis(healthy=known is not None)
            if server.health.observe(known is not None):
                living.append(Host(server=server.address, host=host_of(server.address)))
        uses = spread(
            [Host(server=address, host=host_of(address)) for address in self._engines], living
        )
        for server, known in zip(self._servers, found, strict=True):
            if known is None or server.address not in uses:
                continue
            shares = uses[server.address]
            for address in [address for address in shares if address not in known]:
                await self._send(
                    server, "POST", "/v1/engines", msgspec.json.encode(self._engines[address])
                )
            for address, engine_id in known.items():
                if address in self._dealt and address not in shares:
                    # it moves to another service
                    await self._send(server, "DELETE", f"/v1/engines/{engine_id}?force=true")
        return bool(living)

    async def _engines_of(self, server: _Server) -> dict[str, str] | None:
        """Ids of the engines that are registered there, by address.

        None if it does not answer.
        """
        try:
            async with asyncio.timeout(DEAL_S):
                answer = msgspec.json.decode(
                    await self._send(server, "GET", "/v1/engines"),
                    type=dict[str, list[EngineStatus]],
                )
        except (aiohttp.ClientError, ServiceError, TimeoutError):
            return None
        there = (
            engine
            for engine in answer["engines"]
            if not engine.draining and engine.status != "removed"
        )
        return {engine.address: engine.id for engine in there if engine.address}

    # All of them.

    def _choose(self, left: list[_Server]) -> _Server:
        """The one with the least outstanding that answers, and has not just lost this
        rollout. Raises NoServiceError.
        """
        living = [
            server for server in self._servers if server not in left and server.dead_until <= _now()
        ]
        wanted = living or [server for server in self._servers if server not in left]
        if not wanted:
            raise NoServiceError(
                "no service answers: "
                f"{', '.join(server.ailment or server.address for server in self._servers)}"
            )
        return min(wanted, key=lambda server: server.outstanding)

    async def _settle(self) -> None:
        """Cancel what a service that answers again still does for nobody."""
        for server in self._servers:
            if server.owed and server.dead_until <= _now():
                owed, server.owed = server.owed, []
                for job_id in owed:
                    with contextlib.suppress(aiohttp.ClientError, ServiceError, TimeoutError):
                        await self._send(server, "DELETE", _path(job_id))


class Rollouts:
    """The same for programs without an event loop: `with Rollouts(addresses) as
    rollouts: rollouts.run(requests)`.
    """

    def __init__(self, addresses: Addresses, *, token: str | None = None) -> None:
        self._client = RolloutClient(addresses, token=token)
        self._loop = LoopThread("rollouts")

    def __enter__(self) -> Self:
        self._loop.start()
        self._loop.call(self._client.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call(self._client.__aexit__(kind, error, trace))
        self._loop.stop()

    def run(self, requests: Iterable[RolloutRequest]) -> list[RolloutStatus]:
        """All of them at once; results in the order of the requests. Errors are those
        of `RolloutClient.rollout`.

        The first error, and Ctrl-C, cancel the others.
        """

        async def all_of_them() -> list[RolloutStatus]:
            try:
                async with asyncio.TaskGroup() as several:
                    tasks = [
                        several.create_task(self._client.rollout(request)) for request in requests
                    ]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            return [task.result() for task in tasks]

        return self._loop.call(all_of_them())

    def submit(self, request: RolloutRequest) -> RolloutStatus:
        """Ask for a rollout without waiting for it, as `RolloutClient.submit`."""
        return self._loop.call(self._client.submit(request))

    def get(self, id: str, *, wait_s: float = 0.0) -> RolloutStatus:
        """Where a rollout stands, with results, as `RolloutClient.get`."""
        return self._loop.call(self._client.get(id, wait_s=wait_s))

    def cancel(self, id: str) -> RolloutStatus:
        """Cancel a rollout, as `RolloutClient.cancel`."""
        return self._loop.call(self._client.cancel(id))

    def stream(self, id: str) -> Iterator[MemberStatus]:
        """The members of a rollout, each as soon as it is done, as
        `RolloutClient.stream`.
        """
        members = self._client.stream(id)

        async def following() -> MemberStatus | None:
            return await anext(members, None)

        while (member := self._loop.call(following())) is not None:
            yield member

    def list_rollouts(self, *, unfinished: bool = False) -> list[RolloutStatus]:
        """All that the services know, as `RolloutClient.list_rollouts`."""
        return self._loop.call(self._client.list_rollouts(unfinished=unfinished))

    def register(self, request: EngineRequest) -> None:
        """Give every service this engine."""
        self._loop.call(self._client.register(request))

    def register_engines(self, engines: Sequence[EngineRequest]) -> None:
        """Deal these engines to the services.

        Errors are those of `RolloutClient.register_engines`.
        """
        self._loop.call(self._client.register_engines(engines))


def _unopened_files() -> int:
    """Return the number of files that this process may open beside those that it has open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (FILES if soft == resource.RLIM_INFINITY else soft) - len(os.listdir("/proc/self/fd"))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _ailment(server: _Server, error: Exception) -> str:
    return f"{server.address} ({str(error) or type(error).__name__})"


def _place(one: str | Path, token: str | None) -> tuple[str, str | None]:
    """Return the address and token of a service. Raises ValueError."""
    if isinstance(one, str) and "://" in one:
        return parse_address(one, field="addresses"), token
    run = RunDir(Path(one))
    if not run.address.is_file():
        raise ValueError(
            "addresses must be http://host:port, or the directory of a service that "
            f"runs, got {str(one)!r:.200}"
        )
    return run.address.read_text().strip(), read_token(run.token) if run.token.exists() else token


def _path(job_id: str) -> str:
    return f"/v1/rollouts/{urllib.parse.quote(job_id, safe='')}"


def _error(answer: bytes) -> tuple[str, str]:
    """Type and message; "" and the answer itself where it is not of the service's form."""
    try:
        error = msgspec.json.decode(answer)["error"]
        return str(error["type"]), str(error["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return "", answer[:200].decode(errors="replace")
