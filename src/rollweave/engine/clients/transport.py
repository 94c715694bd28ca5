"""Exchanges with one HTTP server, and the decision whether it is still there.

Invariants: a request is sent again only if the server refused it before computing
anything (429, 503), never after a connection broke, since the request may have been the
cause; an answer has limits of size and of time from its first byte; the server is lost
for good after several failed health checks in a row. Checks are made regularly, and at
once when a connection breaks: the caller then learns whether the server is gone
(`EngineLostError`) or still serves (`EngineError`).

aiohttp is client and server in one well-maintained library: it pools connections, has
limits for each phase of an exchange, and its server cancels a handler when the client
disconnects, which is how an abort arrives.
"""

import asyncio
import itertools
import os
import socket
from collections.abc import Awaitable, Callable, Iterator

import aiohttp
from aiohttp.abc import ResolveResult
from aiohttp.resolver import ThreadedResolver

from rollweave.core.policy.health import Hysteresis
from rollweave.schema.address import Hosts, host_of, ip_address
from rollweave.schema.errors import EngineError, EngineLostError
from rollweave.schema.text import decimal

Read = Callable[[aiohttp.ClientResponse, str], Awaitable[bytes]]
"""Reads the body of an answer to a request of this path."""

MAX_RETRIES = 4
"""Maximum number of retries of a request that the server was too busy for, before its
owner may choose another engine.
"""

FIRST_RETRY_S, MAX_RETRY_S = 0.5, 30.0
"""Seconds before the first retry if the server names no time, doubled each time; and
the maximum seconds that the server may name.
"""

RECHECK_S = 0.1
"""Seconds between a failed health check and the next one."""

MAX_PAUSE_S = 5.0
"""Maximum seconds between two attempts to reach a server that has not answered yet: it
may load its model for minutes.
"""

BODY_S = 30.0
"""Maximum seconds between an answer's first byte and its last: it is computed by then,
and only has to be transferred.
"""

SILENCE_S = 300.0
"""Maximum seconds between two parts of a streamed answer. A server sends nothing while
its weights are updated, or while a turn waits for memory that others have.
"""

STREAM_BYTES = 256 << 20
"""Maximum number of bytes in a streamed answer: half a million tokens, of which vLLM
sends each with 500.
"""


class TooLongError(EngineError):
    """An answer has more bytes than allowed."""


async def read_bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the body of an answer. Raises TooLongError if it has more than `limit`
    bytes.
    """
    parts, size = [], 0
    async for part in response.content.iter_chunked(1 << 16):
        parts.append(part)
        size += len(part)
        if size > limit:
            raise TooLongError(f"an answer of more than {limit} bytes")
    return b"".join(parts)


OnRetry = Callable[[str, int, float], None]
"""Called when a server cannot be reached yet, with the reason, the number of tries and
the seconds to the next try.
"""

ANSWER_BYTES = 64 << 20
"""Maximum number of bytes in an answer: a hundred thousand tokens, each with its
log-prob, take a tenth of it.
"""

IDLE_S = 4.0
"""Seconds that an unused connection is kept: uvicorn, under most servers, closes its
end after 5.
"""

ERROR_CHARS = 300
"""Maximum number of characters of a server's message in an error."""

BUSY = (429, 503)
UNAUTHORIZED = 401

DATA = b"data: "
"""Beginning of a server-sent event with an answer; others are comments."""


EVENT_END = b"\n\n"


class EventDecoder:
    """Finds the server-sent events in a stream, whose parts may end anywhere."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, part: bytes) -> Iterator[bytes]:
        """Yield the data of each event that this part completes. What is known of an
        unfinished event is not searched again.
        """
        searched = max(0, len(self._rest) - len(EVENT_END) + 1)
        self._rest += part
        while (end := self._rest.find(EVENT_END, searched)) >= 0:
            event = bytes(self._rest[:end])
            del self._rest[: end + len(EVENT_END)]
            searched = 0
            if event.startswith(DATA):
                yield event.removeprefix(DATA)


class StatusError(EngineError):
    """The server refuses a request with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BusyError(Exception):
    """The server refused before it computed anything; `after_s` is the pause that it
    asks for, if it names one.
    """

    def __init__(self, status: int, after_s: float | None) -> None:
        super().__init__(f"status {status}")
        self.after_s = after_s


class Transport:
    """One server at `url`, which requires `token` unless that is empty. `body_s` is as
    `BODY_S`, and `silence_s` as `SILENCE_S`.

    It connects to `hosts` only; None admits all. `reply_s` bounds connecting, a health
    check and a `get`. A `leased` server that refuses the token has been started anew or
    is leased to another engine, and is lost.
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
        silence_s: float = SILENCE_S,
        leased: bool = False,
    ) -> None:
        self._name, self._url, self._leased = name, url.rstrip("/"), leased
        if hosts is not None and ip_address(host := host_of(url)) and not hosts.admits_ip(host):
            raise EngineError(
                f"{name} is at {host}, which is not among the hosts that may be reached"
            )
        self._reply_s, self._body_s, self._silence_s = reply_s, body_s, silence_s
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = self._loop.create_future()
        """Done, with the reason, once the server is given up."""
        self._health, self.trouble = Hysteresis(), "it was never asked"
        self._confirming: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        # The pool itself is not bounded: health checks and aborts must always get
        # through.
        resolver = _Resolver(hosts) if hosts is not None else None
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, resolver=resolver)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=reply_s)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers)

    def raise_if_lost(self) -> None:
        """Raise `EngineLostError` once the server is lost."""
        if self.lost.done():
            raise EngineLostError(self.lost.result())

    def mark_lost(self, reason: str) -> None:
        """Declare the server lost."""
        if not self.lost.done():
            self.lost.set_result(f"{self._name}: {reason}")

    def disconnect(self) -> None:
        """Close every connection, without waiting. This is harmless when repeated."""
        if self._closing is None:
            self._closing = self._loop.create_task(
                self._session.close(), name=f"close {self._name}"
            )

    async def wait_closed(self) -> None:
        """Return once every connection is closed."""
        self.disconnect()
        assert self._closing is not None
        await asyncio.shield(self._closing)

    # Exchanges

    async def post(self, path: str, body: bytes) -> tuple[bytes, float]:
        """Return the body of a successful answer, and the seconds that it took; retry
        while the server is too busy.
        """
        return await self._post(path, body, lambda _: self._read_body)

    async def stream(
        self,
        path: str,
        body: bytes,
        on_event: Callable[[bytes, float], None],
        *,
        patient: bool = False,
    ) -> tuple[bytes, float]:
        """Call `on_event` with the data of each event of a successful answer and the
        seconds since its request was sent. Return the body of an answer that is not
        streamed although that was asked for, empty otherwise, and the seconds that the
        answer took. `on_event` may raise, which ends the answer. With `patient`, the
        time between two parts is not bounded. Requests are repeated as by `post`; the
        pauses between them do not count.
        """
        silence_s = None if patient else self._silence_s

        def reads(began: float) -> Read:
            async def read(response: aiohttp.ClientResponse, path: str) -> bytes:
                if response.status != 200 or response.content_type == "application/json":
                    return await self._read_body(response, path)
                await self._read_events(
                    response,
                    path,
                    lambda event: on_event(event, self._loop.time() - began),
                    silence_s,
                )
                return b""

            return read

        return await self._post(path, body, reads)

    async def _post(
        self, path: str, body: bytes, reads: Callable[[float], Read]
    ) -> tuple[bytes, float]:
        """Post until the server is not too busy. `reads` makes the reader of an answer
        from the loop's time at which its request began.
        """
        for attempt in itertools.count():
            began = self._loop.time()
            try:
                answer = await self._exchange("POST", path, body, reads(began))
                return answer, self._loop.time() - began
            except BusyError as busy:
                pause = busy.after_s if busy.after_s is not None else FIRST_RETRY_S * 2**attempt
                if attempt == MAX_RETRIES or pause > MAX_RETRY_S:
                    raise EngineError(
                        f"{self._name} is too busy: {busy}, asked {attempt + 1} times"
                    ) from None
            await asyncio.sleep(pause)
        raise AssertionError("the loop above has no end")

    async def post_once(self, path: str, body: bytes) -> bytes:
        """Return the body of a successful answer.

        Raises `BusyError`, `EngineLostError` if the server is gone, else `EngineError`.
        """
        return await self._exchange("POST", path, body, self._read_body)

    async def get(self, path: str) -> bytes:
        """Get a resource as `post_once` does, within `reply_s`; a server that is too
        busy for it counts as failed.
        """
        try:
            async with asyncio.timeout(self._reply_s):
                return await self._exchange("GET", path, None, self._read_body)
        except (TimeoutError, BusyError) as error:
            reason = str(error) or f"{self._reply_s:g} s are over"
            raise EngineError(f"{self._name} did not answer {path}: {reason}") from None

    async def _exchange(self, method: str, path: str, body: bytes | None, read: Read) -> bytes:
        self.raise_if_lost()
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            async with self._session.request(
                method, self._url + path, data=body, headers=headers, allow_redirects=False
            ) as response:
                if response.status in BUSY:
                    raise BusyError(
                        response.status, retry_after_s(response.headers.get("Retry-After"))
                    )
                self._check_lease(response.status)
                self.raise_if_lost()
                answer = await read(response, path)
        except (aiohttp.ClientError, OSError) as error:
            await self.confirm_health()
            self.raise_if_lost()
            text = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise EngineError(
                f"{self._name} is still there, but its answer to {path} broke off: {text}"
            ) from error
        if response.status != 200:
            detail = answer[: 4 * ERROR_CHARS].decode(errors="replace")[:ERROR_CHARS]
            raise StatusError(
                response.status,
                f"{self._name} answered {path} with status {response.status}: {detail}",
            )
        return answer

    def _check_lease(self, status: int) -> None:
        """Declare a leased server lost whose answer says that the lease is over."""
        if self._leased and status == UNAUTHORIZED:
            self.mark_lost("its lease is over: it was started anew, or is another engine's")

    async def _read_body(self, response: aiohttp.ClientResponse, path: str) -> bytes:
        """Read the body, within its limits."""
        scope = asyncio.timeout(self._body_s)
        try:
            async with scope:
                return await read_bounded(response, ANSWER_BYTES)
        except TooLongError:
            raise EngineError(
                f"{self._name} answers {path} with more than {ANSWER_BYTES} bytes"
            ) from None
        except TimeoutError:
            if not scope.expired():
                raise
            raise EngineError(
                f"{self._name} did not end its answer to {path} within {self._body_s:g} s"
            ) from None

    async def _read_events(
        self,
        response: aiohttp.ClientResponse,
        path: str,
        on_event: Callable[[bytes], None],
        silence_s: float | None,
    ) -> None:
        """Read server-sent events until the answer ends, each within `silence_s` of the
        one before; None sets no limit.
        """
        decoder, size, began = EventDecoder(), 0, False
        while True:
            try:
                async with asyncio.timeout(silence_s if began else None) as scope:
                    part = await response.content.readany()
            except TimeoutError:
                if not scope.expired():
                    raise
                raise EngineError(
                    f"{self._name} did not continue its answer to {path} within {silence_s:g} s"
                ) from None
            if not part:
                return
            began, size = True, size + len(part)
            if size > STREAM_BYTES:
                raise EngineError(
                    f"{self._name} answers {path} with more than {STREAM_BYTES} bytes"
                )
            for event in decoder.feed(part):
                on_event(event)

    # Health

    async def wait_healthy(self, on_retry: OnRetry) -> None:
        """Wait, without a limit, until the server is healthy.

        `on_retry` is called after each failed attempt.
        """
        tries, pause_s = 0, RECHECK_S
        while not self._health.observe(good := await self._healthy()):
            if good:  # check once more, to be sure
                await asyncio.sleep(RECHECK_S)
                continue
            tries += 1
            on_retry(self.trouble, tries, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def confirm_health(self) -> None:
        """Check until the server is known to be alive, or lost.

        Concurrent callers share one check.
        """
        if self._confirming is None or self._confirming.done():
            self._confirming = self._loop.create_task(
                self._check_until_sure(), name=f"check {self._name}"
            )
        await asyncio.shield(self._confirming)

    async def _check_until_sure(self) -> None:
        while not self.lost.done():
            good = await self._healthy()
            if not self._health.observe(good):
                self.mark_lost(f"does not answer: {self.trouble}")
            if good:
                return
            await asyncio.sleep(RECHECK_S)

    async def _healthy(self) -> bool:
        """Make one health check. A server that answers that it has no such path is
        alive.
        """
        try:
            async with (
                asyncio.timeout(self._reply_s),
                self._session.get(f"{self._url}/health", allow_redirects=False) as response,
            ):
                self.trouble = f"its health is status {response.status}"
                self._check_lease(response.status)
                return response.status < 500
        except TimeoutError:
            self.trouble = f"no answer to a health check within {self._reply_s:g} s"
        except (
            aiohttp.ClientError,
            OSError,
            RuntimeError,
        ) as error:  # RuntimeError means that we have disconnected
            self.trouble = _system_reason(error)
        return False


def _system_reason(error: Exception) -> str:
    """Return the system's reason why a connection could not be made."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if not isinstance(cause, OSError) or not cause.errno:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    # An unknown name has one of the resolver's negative numbers.
    reason = os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
    return reason[:1].lower() + reason[1:]


class _Resolver(ThreadedResolver):
    """Resolves names, and refuses those that point to hosts outside `Hosts`."""

    def __init__(self, hosts: Hosts) -> None:
        super().__init__()
        self._hosts = hosts

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        results = await super().resolve(host, port, family)
        wrong = [result["host"] for result in results if not self._hosts.admits_ip(result["host"])]
        if wrong and not self._hosts.admits_name(host):
            raise OSError(
                0,
                f"{host} is at {', '.join(wrong)}, which is not among the hosts that "
                "may be reached",
            )
        return results


def retry_after_s(retry_after: str | None) -> float | None:
    """Parse a Retry-After in seconds; None if it is absent or a date, which would need
    the server's clock.
    """
    seconds = decimal((retry_after or "").strip())
    return seconds if seconds is not None and seconds >= 0 else None
