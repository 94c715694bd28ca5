"""Brings one HTTP service of the host's into a sandbox that has no network: the
gateway, for an agent program inside.

`async with tunnel(sandbox, url) as inside_url`: who asks at `inside_url` within the
sandbox is answered by what is at `url`. It works over the sandbox's channel, so with
every back end, with sandboxes that wait in a pool, and without mounts or a network.

Invariants: requests go to that one host and port, and to paths beneath that of `url`;
nothing else that is request reaches it, and no header but those of a short list, either
way. What the sandbox says is checked: one that breaks the protocol is killed. The
request of a program that goes away is cancelled, so its generation ends. When the
context closes, or the sandbox ends, no task and no socket is left.
"""

import asyncio
import contextlib
import functools
import io
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
from yarl import URL

from rollweave.sandbox.base import MIB, Sandbox
from rollweave.sandbox.channel import Reply
from rollweave.sandbox.inside.http1 import BODY_BYTES, METHODS
from rollweave.sandbox.inside.http_proxy import FORWARDED_HEADERS
from rollweave.schema.errors import (
    SandboxError,
    SandboxLostError,
    SandboxRefusedError,
    SandboxSpoiledError,
)

MAX_IN_FLIGHT: Final = 16
"""Requests under way: as many turns as a session of the gateway has at once."""

PENDING_BYTES: Final = 64 * MIB
"""Of all requests of a sandbox that are under way."""

POLL_S: Final = 30.0
"""Seconds of one long poll. Its end is no event: the next one follows."""

CALL_S: Final = 10.0
"""Seconds for any other call: it waits for no program."""

SLACK_S: Final = 60.0
"""Seconds that a sandbox may be late: it may be frozen for a snapshot, or short of CPU.

Then it is given up.
"""

CONNECT_S: Final = 5.0
"""Seconds for the service to accept a connection."""

RETRY_S: Final = 0.1
"""Seconds before a call is tried again which the sandbox had no room for."""

RESPONSE_HEADERS: Final = ("cache-control", "content-type", "retry-after")
"""Headers of answers that programs see."""

PATH = re.compile(r"(?:/[A-Za-z0-9._~:@-]+)*")
"""Beneath that of the service.

No escapes: they would be another way to write what is refused.
"""

VALUE = re.compile(r"[\x20-\x7e\t]{0,8192}")
"""Of a header."""

_log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def tunnel(sandbox: Sandbox, url: str) -> AsyncIterator[str]:
    """Inside, the URL that is yielded is `url`. One at a time for each sandbox.

    Raises ValueError for a URL that is not plain http, SandboxError where the sandbox
    cannot listen. A sandbox that ends meanwhile is heard of by whoever uses it.
    """
    base = _checked(url)
    opened = await sandbox.call(
        "tunnel_open", timeout_s=CALL_S, slack_s=SLACK_S, max_in_flight=MAX_IN_FLIGHT
    )
    # Nothing of the environment: no proxy, no netrc. No redirects, no cookies, and the
    # body as it is.
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=MAX_IN_FLIGHT),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
    ) as http:
        client = _Tunnel(sandbox, http, base)
        serving = asyncio.create_task(client.run(), name="tunnel")
        try:
            yield f"http://127.0.0.1:{_convert(opened, _Opened).port}{base.raw_path.rstrip('/')}"
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            with contextlib.suppress(SandboxError):
                await client.call("tunnel_close", timeout_s=CALL_S)
            if not serving.cancelled():
                serving.result()


class _Opened(msgspec.Struct):
    port: int


class _Event(msgspec.Struct):
    """What `tunnel_next` tells. A first part has a method; `number` 0: no part."""

    gone: list[int]
    number: int = 0
    method: str = ""
    target: str = ""
    headers: dict[str, str] = {}
    more: bool = False


@dataclass(kw_only=True)
class _Request:
    number: int
    method: str
    target: str
    headers: Mapping[str, str]
    body: bytearray = field(default_factory=bytearray)
    refused: tuple[int, str] | None = None


class _Tunnel:
    """One open tunnel. `run` serves it until it is cancelled, or the sandbox is gone."""

    def __init__(self, sandbox: Sandbox, http: aiohttp.ClientSession, base: URL) -> None:
        self._sandbox, self._http, self._base = sandbox, http, base
        self._prefix = base.raw_path.rstrip("/")
        self._receiving: _Request | None = None
        self._last = 0
        self._pending_bytes = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                await self._serve(group)
        except* SandboxSpoiledError as errors:
            self._sandbox.kill(spoiled=str(errors.exceptions[0]))
        except* SandboxLostError:
            pass  # whoever uses the sandbox hears why
        except* SandboxError as errors:
            _log.warning(
                "sandbox %s is killed, its tunnel failed: %s",
                self._sandbox.id,
                errors.exceptions[0],
            )
            self._sandbox.kill()
        except* Exception:
            self._sandbox.kill()  # its programs would wait for ever
            raise

    async def _serve(self, group: asyncio.TaskGroup) -> None:
        while True:
            while len(self._tasks) >= 2 * MAX_IN_FLIGHT:  # the sandbox is slow to take answers
                await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_COMPLETED)
            reply = await self.call("tunnel_next", timeout_s=POLL_S)
            event = _convert(reply, _Event)
            for number in event.gone:
                self._cancel(number)
            if event.number and (request := self._part(event, reply.body)) is not None:
                self._last = request.number
                task = group.create_task(self._answer(request), name=f"tunnel-{request.number}")
                self._tasks[request.number] = task
                task.add_done_callback(functools.partial(self._done, request))

    def _cancel(self, number: int) -> None:
        """The program is gone. It may have been answered meanwhile."""
        if self._receiving is not None and self._receiving.number == number:
            self._pending_bytes -= len(self._receiving.body)
            self._receiving = None
        task = self._tasks.get(number)
        if task is not None:
            task.cancel()

    def _done(self, request: _Request, _: asyncio.Task[None]) -> None:
        self._pending_bytes -= len(request.body)
        del self._tasks[request.number]

    def _part(self, event: _Event, body: bytes) -> _Request | None:
        """Return the request if this part completes it.

        Raises SandboxSpoiledError for messages that no tunnel sends.
        """
        request = self._receiving
        if request is None:
            if not event.method or event.number <= self._last:
                raise SandboxSpoiledError(
                    f"it sent a part of request {event.number}, which is over"
                )
            request = _Request(
                number=event.number,
                method=event.method,
                target=event.target,
                headers=event.headers,
            )
        elif event.method or event.number != request.number:
            raise SandboxSpoiledError(
                f"it sent request {event.number} amid request {request.number}"
            )
        if len(request.body) + len(body) > BODY_BYTES:
            raise SandboxSpoiledError(f"it sent a request of more than {BODY_BYTES} bytes")
        if self._pending_bytes + len(body) > PENDING_BYTES:
            request.refused = (
                503,
                f"requests under way must have at most {PENDING_BYTES} bytes together",
            )
        if request.refused is None:
            request.body += body
            self._pending_bytes += len(body)
        self._receiving = request if event.more else None
        self._last = max(self._last, request.number)
        return None if event.more else request

    async def _answer(self, request: _Request) -> None:
        beneath = request.target.partition("?")[0].removeprefix(self._prefix)
        refused = request.refused or self._refusal(request, beneath)
        if refused is not None:
            await self._refuse(request, *refused)
            return
        begun = False
        try:
            async with self._http.request(
                request.method,
                self._base.with_path(self._prefix + beneath, encoded=True),
                headers={
                    name: value
                    for name in FORWARDED_HEADERS
                    if (value := request.headers.get(name)) and VALUE.fullmatch(value)
                },
                data=io.BytesIO(request.body) if request.method == "POST" else None,
                allow_redirects=False,
            ) as response:
                head = {"status": response.status, "headers": _forwarded(response.headers)}
                while True:
                    data = await response.content.readany()
                    last = response.content.at_eof()
                    await self._send(request, data, last=last, **({} if begun else head))
                    begun = True
                    if last:
                        return
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if begun:
                await self._send(request, abort=True)
            else:
                await self._refuse(
                    request, 502, f"the service cannot be reached: {type(error).__name__}"
                )

    def _refusal(self, request: _Request, beneath: str) -> tuple[int, str] | None:
        """Status and reason, where a request is none for the service."""
        if request.method not in METHODS:
            return 405, f"method must be one of {', '.join(METHODS)}, got {request.method:.20}"
        inside = request.target.startswith(self._prefix) and PATH.fullmatch(beneath)
        if not inside or any(part in (".", "..") for part in beneath.split("/")):
            return 404, f"path must be beneath {self._prefix}/, got {request.target:.200}"
        return None

    async def _refuse(self, request: _Request, status: int, why: str) -> None:
        kind = "server_error" if status >= 500 else "invalid_request_error"
        body = json.dumps(
            {"error": {"message": why, "type": kind, "param": None, "code": None}}
        ).encode()
        await self._send(
            request, body, last=True, status=status, headers={"content-type": "application/json"}
        )

    async def _send(self, request: _Request, body: bytes = b"", **args: Any) -> None:
        await self.call("tunnel_answer", body, timeout_s=CALL_S, number=request.number, **args)

    async def call(self, action: str, body: bytes = b"", *, timeout_s: float, **args: Any) -> Reply:
        """A call, tried again where the sandbox has no room for one.

        It may be late by much.
        """
        tries = round(SLACK_S / RETRY_S)
        while True:
            try:
                return await self._sandbox.call(
                    action, body, timeout_s=timeout_s, slack_s=SLACK_S, **args
                )
            except SandboxRefusedError:
                tries -= 1
                if not tries:
                    raise
                await asyncio.sleep(RETRY_S)


T = TypeVar("T")


def _convert(reply: Reply, kind: type[T]) -> T:
    try:
        return msgspec.convert(reply.header, kind)
    except msgspec.ValidationError as error:
        raise SandboxSpoiledError(f"the sandbox sent a reply of another shape: {error}") from error


def _checked(url: str) -> URL:
    found = URL(url, encoded=True)
    plain = (
        found.scheme == "http"
        and found.host
        and not (found.user or found.raw_query_string or found.raw_fragment)
    )
    path = found.raw_path.rstrip("/")
    if (
        not plain
        or not PATH.fullmatch(path)
        or any(part in (".", "..") for part in path.split("/"))
    ):
        raise ValueError(
            f"url must be http://HOST:PORT/PATH, of letters, digits and -._~:@, got {url!r}"
        )
    return found


def _forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name in RESPONSE_HEADERS
        if (value := headers.get(name)) is not None and VALUE.fullmatch(value)
    }
