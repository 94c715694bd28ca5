"""A client of rollout services: submits, waits, tries again, and spreads over several of them.

Invariants: a rollout has one id wherever it is asked for, so asking again is harmless; a service that does not answer loses its
rollouts to another one; what it was asked for and somebody else has done is cancelled there as soon as it answers again.
"""

import asyncio
import contextlib
import resource
import secrets
import urllib.parse
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from rollweave.policy.balancing import Host, Hysteresis, spread
from rollweave.schema.errors import RollweaveError
from rollweave.schema.service import EngineRequest, EngineStatus, RolloutRequest, RolloutStatus
from rollweave.service.loop import LoopThread

POLL_S, LEAST_POLL_S = 20.0, 1.0
"""Of one question whether a rollout is done; less while there are more rollouts than connections."""

FILES = 1 << 16
"""Open files that we count on where the system sets no limit; half of those there may be are for connections."""

BACKOFF_S, MOST_BACKOFF_S = 0.1, 5.0
"""Before a first and a later try; doubled each time."""

TRIES = 8
"""Of a request whose service does not answer, before it counts as dead: ten seconds or so."""

CANCEL_S = 5.0
"""For a service to hear that a rollout is cancelled; later it is told when it answers again."""

DEAD_S = 15.0
"""Until a dead service is asked again."""


DEAL_S = 2.0
"""Between two looks at who has which engines; a service that has not answered three of them has lost its share."""


class ServiceError(RollweaveError):
    """The service refused: `status` is that of HTTP, `kind` the error's type."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind


class NoServiceError(RollweaveError):
    """No service answers."""


@dataclass(slots=True)
class _Server:
    address: str
    outstanding: int = 0
    dead_until: float = 0.0
    ailment: str = ""  # its address, and why it did not answer when it was last given up
    owed: list[str] = field(default_factory=list)  # ids to cancel there, which another service has done
    health: Hysteresis | None = None  # as far as engines are dealt; None before they were


class RolloutClient:
    """`async with RolloutClient(addresses) as client: await client.rollout(...)`. All calls belong to one event loop."""

    def __init__(self, addresses: str | Sequence[str], *, token: str | None = None) -> None:
        """Raises ValueError without an address, and for one that is none."""
        several = [addresses] if isinstance(addresses, str) else list(addresses)
        if not several:
            raise ValueError("addresses must have at least one, got none")
        for address in several:
            if not (address.startswith(("http://", "https://")) and _host(address)):
                raise ValueError(f"addresses must be http://host:port or https://host:port, got {address!r:.100}")
        self._servers = [_Server(address.rstrip("/")) for address in dict.fromkeys(several)]
        self._headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        self._session: aiohttp.ClientSession | None = None
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._connections = (FILES if soft == resource.RLIM_INFINITY else soft) // 2
        self._free = asyncio.Semaphore(self._connections)  # in turn, which a connector's limit is not
        self._asking = 0  # rollouts that a service is being asked about
        self._engines: dict[str, EngineRequest] = {}  # to be dealt, by address
        self._dealt: set[str] = set()  # addresses that ever were
        self._dealing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        limits = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=POLL_S + 30.0)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=limits, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._dealing is not None:
            self._dealing.cancel()
            self._dealing = None
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def rollout(self, request: RolloutRequest) -> RolloutStatus:
        """The rollout with its results, once all members are done. Cancelling the call cancels the rollout.

        Raises ServiceError for a request that is refused for good, NoServiceError where no service answers.
        """
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
                server.ailment = f"{server.address} ({str(error) or type(error).__name__})"
                left.append(server)
            except asyncio.CancelledError:
                try:
                    await asyncio.shield(asyncio.wait_for(self._ask(server, "DELETE", _path(request.id)), CANCEL_S))
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

    async def register(self, request: EngineRequest) -> None:
        """Give every service this engine."""
        for server in self._servers:
            await self._send(server, "POST", "/v1/engines", msgspec.json.encode(request))

    async def register_engines(self, engines: Sequence[EngineRequest]) -> None:
        """Deal these engines to the services: to each first those of its own host, the rest in turn (`policy/balancing`).

        For as long as the client is entered they move when a service does not answer any more, or does again. A later call's
        engines take the place of these; engines that were registered otherwise are left alone. Raises ServiceError for one that
        is refused, NoServiceError where no service answers.
        """
        if self._dealing is not None:
            self._dealing.cancel()
        self._engines = {engine.address: engine for engine in engines}
        self._dealt |= self._engines.keys()
        if not await self._deal():
            raise NoServiceError(f"none of {', '.join(server.address for server in self._servers)} answers")
        self._dealing = asyncio.create_task(self._deal_again(), name="deal engines")

    async def health(self) -> dict[str, dict[str, Any]]:
        """What each service says of itself, by address; those that do not answer are missing."""
        found = {}
        for server in self._servers:
            with contextlib.suppress(aiohttp.ClientError, ServiceError, TimeoutError):
                found[server.address] = msgspec.json.decode(await self._send(server, "GET", "/health"), type=dict[str, Any])
        return found

    # One service.

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
                status = msgspec.json.decode(await self._ask(server, "GET", f"{path}?wait={seconds:g}"), type=RolloutStatus)
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

    async def _ask(self, server: _Server, method: str, path: str, body: bytes | None = None) -> bytes:
        """`_send` where there are as many as rollouts: each has its turn."""
        async with self._free:
            return await self._send(server, method, path, body)

    async def _send(self, server: _Server, method: str, path: str, body: bytes | None = None) -> bytes:
        assert self._session is not None, "the client is entered"
        async with self._session.request(method, server.address + path, data=body) as response:
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
        """Let each service that answers have its share of the engines. False if none does."""
        found = await asyncio.gather(*map(self._engines_of, self._servers))
        living = []
        for server, known in zip(self._servers, found, strict=True):
            if server.health is None:
                server.health = Hysteresis(healthy=known is not None)
            if server.health.observe(known is not None):
                living.append(Host(server=server.address, host=_host(server.address)))
        uses = spread([Host(server=address, host=_host(address)) for address in self._engines], living)
        for server, known in zip(self._servers, found, strict=True):
            if known is None or server.address not in uses:
                continue
            shares = uses[server.address]
            for address in [address for address in shares if address not in known]:
                await self._send(server, "POST", "/v1/engines", msgspec.json.encode(self._engines[address]))
            for address, engine_id in known.items():
                if address in self._dealt and address not in shares:
                    await self._send(server, "DELETE", f"/v1/engines/{engine_id}")
        return bool(living)

    async def _engines_of(self, server: _Server) -> dict[str, str] | None:
        """Ids of the engines that are registered there, by address. None if it does not answer."""
        try:
            async with asyncio.timeout(DEAL_S):
                answer = msgspec.json.decode(await self._send(server, "GET", "/v1/engines"), type=dict[str, list[EngineStatus]])
        except (aiohttp.ClientError, ServiceError, TimeoutError):
            return None
        return {engine.address: engine.id for engine in answer["engines"] if engine.address and not engine.draining}

    # All of them.

    def _choose(self, left: list[_Server]) -> _Server:
        """The one with the least outstanding that answers, and has not just lost this rollout. Raises NoServiceError."""
        living = [server for server in self._servers if server not in left and server.dead_until <= _now()]
        wanted = living or [server for server in self._servers if server not in left]
        if not wanted:
            raise NoServiceError(
                f"no service answers: {', '.join(server.ailment or server.address for server in self._servers)}"
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
    """The same for programs without an event loop: `with Rollouts(addresses) as rollouts: rollouts.run(requests)`."""

    def __init__(self, addresses: str | Sequence[str], *, token: str | None = None) -> None:
        self._client = RolloutClient(addresses, token=token)
        self._loop = LoopThread("rollouts")

    def __enter__(self) -> Self:
        self._loop.start()
        self._loop.call(self._client.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.call(self._client.__aexit__(kind, error, trace))
        self._loop.stop()

    def run(self, requests: Iterable[RolloutRequest]) -> list[RolloutStatus]:
        """All of them at once; results in the order of the requests. Errors are those of `RolloutClient.rollout`.

        The first error, and Ctrl-C, cancel the others.
        """

        async def all_of_them() -> list[RolloutStatus]:
            try:
                async with asyncio.TaskGroup() as several:
                    tasks = [several.create_task(self._client.rollout(request)) for request in requests]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            return [task.result() for task in tasks]

        return self._loop.call(all_of_them())

    def register(self, request: EngineRequest) -> None:
        """Give every service this engine."""
        self._loop.call(self._client.register(request))

    def register_engines(self, engines: Sequence[EngineRequest]) -> None:
        """Deal these engines to the services. Errors are those of `RolloutClient.register_engines`."""
        self._loop.call(self._client.register_engines(engines))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _host(address: str) -> str:
    return urllib.parse.urlsplit(address).hostname or ""


def _path(job_id: str) -> str:
    return f"/v1/rollouts/{urllib.parse.quote(job_id, safe='')}"


def _error(answer: bytes) -> tuple[str, str]:
    """Type and message; "" and the answer itself where it is not of the service's form."""
    try:
        error = msgspec.json.decode(answer)["error"]
        return str(error["type"]), str(error["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return "", answer[:200].decode(errors="replace")
