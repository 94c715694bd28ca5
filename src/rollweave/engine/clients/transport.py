"""Exchanges with one HTTP server, and the knowledge whether it is still there.

Invariants: a request is sent again only where the server refused it before it computed
anything (429, 503), never after a connection broke, since the request may have been the
reason; an answer has limits of size and of time from its first byte; the server is lost
after several failed health checks in a row, and for good. Checks are made regularly
and, when a connection breaks, at once: whoever's connection broke learns whether the
server is gone (`EngineLostError`) or serves on (`EngineError`).

aiohttp is client and server in one well-kept library: it pools connections, has limits
for each phase of an exchange, and its server cancels a handler when the client hangs
up, which is how an abort arrives.
"""

import asyncio
import itertools
import os
import socket
from collections.abc import Callable

import aiohttp
from aiohttp.abc import ResolveResult
from aiohttp.resolver import ThreadedResolver

from rollweave.core.policy.balancing import Hysteresis
from rollweave.schema.address import Hosts, host_of, ip_address
from rollweave.schema.errors import EngineError, EngineLostError

RETRIES = 4
"""Times that a request which the server was too busy for is sent again, before its
owner may choose another engine.
"""

FIRST_RETRY_S, MAX_RETRY_S = 0.5, 30.0
"""Before the first of them where the server names no time, then twice as long each; and
the longest that it may name.
"""

RECHECK_S = 0.1
"""Between a failed health check and the next: a verdict is due."""

MAX_PAUSE_S = 5.0
"""Maximum seconds between two tries to reach a server that has not answered yet: it may
load its model for minutes.
"""

BODY_S = 30.0
"""Seconds between an answer's first byte and its last: it is computed by then, and only
has to travel.
"""

OnRetry = Callable[[str, int, float], None]
"""Called when a server cannot be reached yet, with the reason, the number of tries and
the seconds to the next try.
"""

ANSWER_BYTES = 64 << 20
"""Bytes of the longest answer: a hundred thousand tokens, each with its log-prob, take
a tenth of it.
"""

IDLE_S = 4.0
"""Seconds that an unused connection is kept: uvicorn, under most servers, closes its
end after 5.
"""

ERROR_CHARS = 300
"""Of a server's own words in an error."""

BUSY = (429, 503)


class BusyError(Exception):
    """The server refused before it computed anything; `after_s` is the pause that it
    asks for, if it names one.
    """

    def __init__(self, status: int, after_s: float | None) -> None:
        super().__init__(f"status {status}")
        self.after_s = after_s


class Transport:
    """One server at `url`, which requires `token` unless that is empty. `body_s` is as
    `BODY_S`.

    Connects to `hosts` only; None: to any. `reply_s` bounds connecting, a health check
    and a `get`.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        token: str = "",
        hosts: Hosts | None = None,
        reply_s: float,
        body_s: float = BODY_S,
    ) -> None:
        self._name, self._url = name, url.rstrip("/")
        if hosts is not None and ip_address(host := host_of(url)) and not hosts.admits_ip(host):
            raise EngineError(
                f"{name} is at {host}, which is not among the hosts that may be reached"
            )
        self._reply_s, self._body_s = reply_s, body_s
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = self._loop.create_future()
        """Done, with the reason, once the server is given up."""
        self._health, self.trouble = Hysteresis(), "it was never asked"
        self._examining: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        # The pool itself is not bounded: health checks and aborts must get through
        # whatever else is under way.
        resolver = _Resolver(hosts) if hosts is not None else None
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, resolver=resolver)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=reply_s)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)

    def must_live(self) -> None:
        """Raise `EngineLostError` once the server is lost."""
        if self.lost.done():
            raise EngineLostError(self.lost.result())

    def lose(self, reason: str) -> None:
        """Give the server up."""
        if not self.lost.done():
            self.lost.set_result(f"{self._name}: {reason}")

    def hang_up(self) -> None:
        """Close every connection, without waiting. Harmless when repeated."""
        if self._closing is None:
            self._closing = self._loop.create_task(
                self._session.close(), name=f"close {self._name}"
            )

    async def closed(self) -> None:
        """Return when every connection is closed."""
        self.hang_up()
        assert self._closing is not None
        await asyncio.shield(self._closing)

    # Exchanges.

    async def post(self, path: str, body: bytes) -> tuple[bytes, float]:
        """The body of a good answer, and the seconds that it took; sent again while the
        server is too busy.
        """
        for attempt in itertools.count():
            began = self._loop.time()
            try:
                return await self.post_once(path, body), self._loop.time() - began
            except BusyError as busy:
                pause = busy.after_s if busy.after_s is not None else FIRST_RETRY_S * 2**attempt
                if attempt == RETRIES or pause > MAX_RETRY_S:
                    raise EngineError(
                        f"{self._name} is too busy: {busy}, asked {attempt + 1} times"
                    ) from None
            await asyncio.sleep(pause)
        raise AssertionError("the loop above has no end")

    async def post_once(self, path: str, body: bytes) -> bytes:
        """The body of a good answer.

        Raises `BusyError`, `EngineLostError` where the server is gone, else
        `EngineError`.
        """
        return await self._exchanged("POST", path, body)

    async def get(self, path: str) -> bytes:
        """As `post_once`, within `reply_s`; a server that is too busy for it has
        failed.
        """
        try:
            async with asyncio.timeout(self._reply_s):
                return await self._exchanged("GET", path, None)
        except (TimeoutError, BusyError) as error:
            reason = str(error) or f"{self._reply_s:g} s are over"
            raise EngineError(f"{self._name} did not answer {path}: {reason}") from None

    async def _exchanged(self, method: str, path: str, body: bytes | None) -> bytes:
        self.must_live()
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            async with self._session.request(
                method, self._url + path, data=body, headers=headers, allow_redirects=False
            ) as response:
                if response.status in BUSY:
                    raise BusyError(response.status, _seconds(response.headers.get("Retry-After")))
                answer = await self._whole(response, path)
        except (aiohttp.ClientError, OSError) as error:
            await self.examine()
            self.must_live()
            text = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise EngineError(
                f"{self._name} serves on, but its answer to {path} broke off: {text}"
            ) from error
        if response.status != 200:
            words = answer[: 4 * ERROR_CHARS].decode(errors="replace")[:ERROR_CHARS]
            raise EngineError(
                f"{self._name} answered {path} with status {response.status}: {words}"
            )
        return answer

    async def _whole(self, response: aiohttp.ClientResponse, path: str) -> bytes:
        """The body, within its limits."""
        parts, size = [], 0
        scope = asyncio.timeout(self._body_s)
        try:
            async with scope:
                async for part in response.content.iter_chunked(1 << 16):
                    parts.append(part)
                    size += len(part)
                    if size > ANSWER_BYTES:
                        raise EngineError(
                            f"{self._name} answers {path} with more than {ANSWER_BYTES} bytes"
                        )
        except TimeoutError:
            if not scope.expired():
                raise
            raise EngineError(
                f"{self._name} did not end its answer to {path} within {self._body_s:g} s"
            ) from None
        return b"".join(parts)

    # Health.

    async def risen(self, failed: OnRetry) -> None:
        """Wait, without a limit, until the server is healthy.

        `failed` is called after each failed try.
        """
        tries, pause_s = 0, RECHECK_S
        while not self._health.observe(good := await self._healthy()):
            if good:  # once more, to be sure
                await asyncio.sleep(RECHECK_S)
                continue
            tries += 1
            failed(self.trouble, tries, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def examine(self) -> None:
        """Check until it is sure that the server is there, or lost.

        Whoever asks meanwhile gets the same verdict.
        """
        if self._examining is None or self._examining.done():
            self._examining = self._loop.create_task(
                self._until_sure(), name=f"examine {self._name}"
            )
        await asyncio.shield(self._examining)

    async def _until_sure(self) -> None:
        while not self.lost.done():
            good = await self._healthy()
            if not self._health.observe(good):
                self.lose(f"does not answer: {self.trouble}")
            if good:
                return
            await asyncio.sleep(RECHECK_S)

    async def _healthy(self) -> bool:
        """One health check. A server that has no such path, and says so, lives."""
        try:
            async with (
                asyncio.timeout(self._reply_s),
                self._session.get(f"{self._url}/health", allow_redirects=False) as response,
            ):
                self.trouble = f"its health is status {response.status}"
                return response.status < 500
        except TimeoutError:
            self.trouble = f"no answer to a health check within {self._reply_s:g} s"
        except (
            aiohttp.ClientError,
            OSError,
            RuntimeError,
        ) as error:  # the last where we have hung up
            self.trouble = _plainly(error)
        return False


def _plainly(error: Exception) -> str:
    """Return the system's reason why a connection could not be made."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if not isinstance(cause, OSError) or not cause.errno:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    # An unknown name has one of the resolver's negative numbers.
    words = os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
    return words[:1].lower() + words[1:]


class _Resolver(ThreadedResolver):
    """Resolves names, and refuses those that point to hosts outside `Hosts`."""

    def __init__(self, hosts: Hosts) -> None:
        super().__init__()
        self._hosts = hosts

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await super().resolve(host, port, family)
        wrong = [one["host"] for one in found if not self._hosts.admits_ip(one["host"])]
        if wrong and not self._hosts.admits_name(host):
            raise OSError(
                0,
                f"{host} is at {', '.join(wrong)}, which is not among the hosts that "
                "may be reached",
            )
        return found


def _seconds(retry_after: str | None) -> float | None:
    """A Retry-After in seconds; None where there is none, or a date, which would need
    the server's clock.
    """
    try:
        seconds = float(retry_after or "")
    except ValueError:
        return None
    return seconds if seconds >= 0 else None
