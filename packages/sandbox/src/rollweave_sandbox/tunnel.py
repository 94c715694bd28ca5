"""A tunnel from a sandbox without a network to one HTTP service of the host, such as
the gateway for an agent program inside.

`async with tunnel(sandbox, url) as inside_url`: requests to `inside_url` in the sandbox
are forwarded to `url`. They travel over the sandbox's channel, so the tunnel works with
every back end, with sandboxes from a pool, and without mounts or a network.

Invariants: requests go only to the host and port of `url`, to paths beneath its path,
and requests and responses carry only headers of a short list; all other requests are
refused. Messages from the sandbox are checked, and a sandbox that breaks the protocol
is killed. If a program disconnects, its request is cancelled, so its generation ends.
When the context closes, or the sandbox ends, no task and no socket is left.
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
from typing import Any, Final

import aiohttp
import msgspec
from yarl import URL

from rollweave.io.http.fields import openai_error
from rollweave.sandbox.base import MIB, Reply, Sandbox, fields_of
from rollweave.schema.errors import (
    SandboxError,
    SandboxLostError,
    SandboxRefusedError,
    SandboxSpoiledError,
)
from rollweave_sandbox.inside.http1 import BODY_BYTES, METHODS
from rollweave_sandbox.inside.http_proxy import FORWARDED_HEADERS

MAX_IN_FLIGHT: Final = 16
"""Maximum number of requests in flight: the number of turns that a session of the
gateway may have at the same time.
"""

PENDING_BYTES: Final = 64 * MIB
"""Maximum total size in bytes of a sandbox's requests in flight."""

POLL_S: Final = 30.0
"""Maximum seconds of one long poll; the next long poll follows immediately."""

CALL_S: Final = 10.0
"""Maximum seconds of any other call: no other call waits for a program."""

SLACK_S: Final = 60.0
"""Seconds that a reply may be late, because the sandbox is frozen for a snapshot or
short of CPU, before the sandbox counts as lost.
"""

CONNECT_S: Final = 5.0
"""Maximum seconds until the service accepts a connection."""

RETRY_S: Final = 0.1
"""Seconds between attempts at a call that the sandbox has no capacity for."""

RESPONSE_HEADERS: Final = ("cache-control", "content-type", "retry-after")
"""Response headers that are forwarded to programs."""

PATH = re.compile(r"(?:/[A-Za-z0-9._~:@-]+)*")
"""Allowed paths beneath the service's path. Escapes are not allowed, because they would
spell refused paths in a second way.
"""

VALUE = re.compile(r"[\x20-\x7e\t]{0,8192}")
"""Allowed values of headers."""

_log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def tunnel(sandbox: Sandbox, url: str) -> AsyncIterator[str]:
    """Yield a URL that reaches `url` from inside the sandbox, which may have one tunnel
    at a time.

    Raises ValueError for a URL that is not plain http, SandboxError if the sandbox
    cannot listen. The end of the sandbox is reported to its other callers, not here.
    """
    base = _checked(url)
    opened = await sandbox.call(
        "tunnel_open", timeout_s=CALL_S, slack_s=SLACK_S, max_in_flight=MAX_IN_FLIGHT
    )
    # The session uses no proxy or netrc of the environment and no cookies, follows no
    # redirects, and leaves bodies as they are.
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
            yield f"http://127.0.0.1:{fields_of(opened, _Opened).port}{base.raw_path.rstrip('/')}"
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
    """A reply to `tunnel_next`: disconnected requests, and a part of a request unless
    `number` is 0. The first part has a method.
    """

    disconnected: list[int]
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
    """One open tunnel, which `run` serves until it is cancelled or the sandbox is
    gone.
    """

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
            pass  # other callers of the sandbox get the reason
        except* SandboxError as errors:
            _log.warning(
                "sandbox %s is killed, its tunnel failed: %s",
                self._sandbox.id,
                errors.exceptions[0],
            )
            self._sandbox.kill()
        except* Exception:
            self._sandbox.kill()  # its programs would wait forever
            raise

    async def _serve(self, group: asyncio.TaskGroup) -> None:
        while True:
            while len(self._tasks) >= 2 * MAX_IN_FLIGHT:  # the sandbox is slow to accept responses
                await asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_COMPLETED)
            reply = await self.call("tunnel_next", timeout_s=POLL_S)
            event = fields_of(reply, _Event)
            for number in event.disconnected:
                self._cancel(number)
            if event.number and (request := self._part(event, reply.body)) is not None:
                self._last = request.number
                task = group.create_task(self._answer(request), name=f"tunnel-{request.number}")
                self._tasks[request.number] = task
                task.add_done_callback(functools.partial(self._done, request))

    def _cancel(self, number: int) -> None:
        """Cancel the request of a disconnected program, unless it is answered
        already.
        """
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

        Raises SandboxSpoiledError for a part that breaks the protocol.
        """
        request = self._receiving
        if request is None:
            if not event.method or event.number <= self._last:
                raise SandboxSpoiledError(
                    f"it sent a part of request {event.number}, which is over"
                )
            request = _Request(
                number=event.number, method=event.method, target=event.target, headers=event.headers
            )
        elif event.method or event.number != request.number:
            raise SandboxSpoiledError(
                f"it sent request {event.number} during request {request.number}"
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
        head_sent = False
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
                    await self._send(request, data, last=last, **({} if head_sent else head))
                    head_sent = True
                    if last:
                        return
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if head_sent:
                await self._send(request, abort=True)
            else:
                await self._refuse(
                    request, 502, f"the service cannot be reached: {type(error).__name__}"
                )

    def _refusal(self, request: _Request, beneath: str) -> tuple[int, str] | None:
        """Return HTTP status and reason if a request must not reach the service, else
        None.
        """
        if request.method not in METHODS:
            return 405, f"method must be one of {', '.join(METHODS)}, got {request.method:.20}"
        inside = request.target.startswith(self._prefix) and PATH.fullmatch(beneath)
        if not inside or any(part in (".", "..") for part in beneath.split("/")):
            return 404, f"path must be beneath {self._prefix}/, got {request.target:.200}"
        return None

    async def _refuse(self, request: _Request, status: int, why: str) -> None:
        body = json.dumps(openai_error(status, why)).encode()
        await self._send(
            request, body, last=True, status=status, headers={"content-type": "application/json"}
        )

    async def _send(self, request: _Request, body: bytes = b"", **args: Any) -> None:
        await self.call("tunnel_answer", body, timeout_s=CALL_S, number=request.number, **args)

    async def call(self, action: str, body: bytes = b"", *, timeout_s: float, **args: Any) -> Reply:
        """Call an action. Repeat the call after `RETRY_S` seconds if the sandbox has no
        capacity for it. The reply may be late by `SLACK_S` seconds.
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


def _checked(url: str) -> URL:
    parsed = URL(url, encoded=True)
    plain = (
        parsed.scheme == "http"
        and parsed.host
        and not (parsed.user or parsed.raw_query_string or parsed.raw_fragment)
    )
    path = parsed.raw_path.rstrip("/")
    if (
        not plain
        or not PATH.fullmatch(path)
        or any(part in (".", "..") for part in path.split("/"))
    ):
        raise ValueError(
            f"url must be http://HOST:PORT/PATH, of letters, digits and -._~:@, got {url!r}"
        )
    return parsed


def _forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name in RESPONSE_HEADERS
        if (value := headers.get(name)) is not None and VALUE.fullmatch(value)
    }
