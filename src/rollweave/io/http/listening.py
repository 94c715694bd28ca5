"""HTTP listeners. All are opened and closed here, behind the guard, with deadlines and
bounds; the options of a command that serves over HTTP say at which address, and whom
the guard admits.

Invariants: a request reaches the application only through its guard (`guard.py`); only
`bodies.py` reads and inflates a body; a connection without a complete request is closed
after a deadline, and so is a connection whose client does not read; while there is a
connection without a complete request, a new client is admitted in its place.
"""

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
from aiohttp import http_exceptions, web

from rollweave.io.http.bodies import check_expectation, withhold
from rollweave.io.http.guard import Guard, given_token, networks_of
from rollweave.schema.address import check_names
from rollweave.schema.errors import ConfigError

BACKLOG = 128
"""Maximum number of connections that wait in the kernel. The same number may be
accepted before the first of them is handled.
"""

HEAD_S = 30.0
"""Seconds within which a connection must send a request's head, counted from the start
of the connection or from its last answer.
"""

LINGER_S = 2.0
"""Seconds for the rest of a request that was answered before it was read: closing
immediately could discard the answer.
"""

STALL_S = 60.0
"""Seconds after which a client that reads nothing of an answer is disconnected."""

REJECTING = 64
"""Maximum number of connections over the bound that wait for a refusal at the same
time; further connections are closed without a refusal.
"""

REJECT_S = 2.0
"""Maximum seconds that a connection over the bound may take to send a request and read
the refusal.
"""

RETRY_S = 1
"""Seconds after which a client that was refused may try again (Retry-After)."""

FILES = 1 << 16
"""Maximum number of open files to request from the system. A larger number would slow
down child programs that close every possible descriptor.
"""

_LOG = logging.getLogger("rollweave.http")

ADDRESS = "--host and --port"
"""The options of the address, as errors name them."""


def _is_ours(record: logging.LogRecord) -> bool:
    """Return False for the record of invalid HTTP, which is reported to the client and
    is no failure of the server.
    """
    return not (
        record.exc_info and isinstance(record.exc_info[1], http_exceptions.HttpProcessingError)
    )


_LOG.addFilter(_is_ours)


def check_address(host: str, port: int, *, names: str) -> None:
    """Raise ConfigError if no server can listen at this address, before anything else
    is started. `names` are the names of the settings.
    """
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        raise _cannot_listen(host, port, error, names=names) from error


def _cannot_listen(host: str, port: int, error: OSError, *, names: str) -> ConfigError:
    """Return an error that gives the system's reason in one line."""
    # Unknown names have the resolver's negative error numbers.
    known = error.errno is not None and error.errno > 0
    reason = (
        os.strerror(error.errno)
        if known and error.errno is not None
        else error.strerror or str(error)
    )
    return ConfigError(
        f"{names} must be a free address of this machine, got {host}:{port}: "
        f"{reason[:1].lower()}{reason[1:]}"
    )


@contextlib.asynccontextmanager
async def listening(
    app: web.Application,
    host: str,
    port: int,
    *,
    guard: Guard,
    shutdown_s: float,
    most: int | None = None,
    names: str | None = None,
) -> AsyncIterator[str]:
    """Serve while the context is open; yield the base URL. Port 0 stands for any free
    port.

    Raises OSError if the port is taken; or ConfigError if `names`, the names of the
    settings of host and port, is given.

    A client that disconnects cancels its request. On exit, requests under way have
    `shutdown_s` seconds to finish. At most `most` connections are admitted, by default
    half of the files that may be open. For a moment, `BACKLOG` + `REJECTING` further
    connections may be open, which also take files.
    """
    app.middlewares.extend((guard.middleware(), check_expectation))
    runner = web.AppRunner(
        app, access_log=None, shutdown_timeout=shutdown_s, handler_cancellation=True
    )
    await runner.setup()
    try:
        assert runner.server is not None, "it was set up"
        withhold(runner.server)
        tracker = ConnectionTracker(
            runner.server, most if most is not None else _half_of_the_files()
        )
        try:
            listener = await asyncio.get_running_loop().create_server(
                lambda: ConnectionLimiter(tracker), host, port, backlog=BACKLOG
            )
        except OSError as error:  # another program took the port after `check_address`
            if names is None:
                raise
            raise _cannot_listen(host, port, error, names=names) from error
        try:
            bound = listener.sockets[0].getsockname()
            yield (
                f"http://[{bound[0]}]:{bound[1]}"
                if ":" in bound[0]
                else f"http://{bound[0]}:{bound[1]}"
            )
        finally:
            listener.close()
            tracker.close()
    finally:
        await runner.cleanup()


class ConnectionTracker:
    """Tracks the connections of `server`. Connections without a complete request are
    closed to admit new ones.
    """

    def __init__(self, server: web.Server, most: int) -> None:
        self.server, self._most = server, most
        self.rejecting: set[ConnectionLimiter] = set()
        self._idle: dict[str, dict[Connection, None]] = {}  # by peer, longest idle first
        handle = server.request_handler

        async def handled(request: web.BaseRequest) -> web.StreamResponse:
            if isinstance(request.protocol, Connection):
                self._forget(request.protocol)  # until it is answered
            return await handle(request)

        server.request_handler = handled

    def has_room(self) -> bool:
        """Return whether one more connection is admitted.

        If needed, close a connection without a complete request, of the peer with the
        most such connections.
        """
        if len(self.server.connections) < self._most:
            return True
        peers = max(self._idle.values(), key=len, default=None)
        if peers is None:
            return False
        next(iter(peers)).drop()
        return True

    def refusal(self) -> bytes:
        """Return a complete HTTP response, which is sent without the request being
        parsed.
        """
        error = {"type": "busy", "message": f"at most {self._most} connections may be open"}
        body = msgspec.json.encode({"error": error, "detail": error["message"]})
        head = (
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nRetry-After: "
            f"{RETRY_S}\r\nConnection: close"
        )
        return b"HTTP/1.1 503 Service Unavailable\r\n" + head.encode() + b"\r\n\r\n" + body

    def note_idle(self, connection: "Connection") -> None:
        self._forget(connection)
        self._idle.setdefault(connection.peer, {})[connection] = None

    def note_lost(self, connection: "Connection") -> None:
        self._forget(connection)

    def _forget(self, connection: "Connection") -> None:
        peers = self._idle.get(connection.peer, {})
        peers.pop(connection, None)
        if not peers:
            self._idle.pop(connection.peer, None)

    def close(self) -> None:
        """Close the connections that were refused."""
        for limiter in self.rejecting:
            limiter.close()


class Connection(web.RequestHandler):
    """One client's connection.

    The connection is idle from its start, or from its last answer, to the end of the
    next request's head.
    """

    __slots__ = ("_buffered", "_stall", "_stream", "_tracker", "peer")

    def __init__(self, tracker: ConnectionTracker) -> None:
        # `log_access` is called for the end of every answer; it logs nothing.
        super().__init__(
            tracker.server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=HEAD_S,
            lingering_time=LINGER_S,
            auto_decompress=False,
            logger=_LOG,
        )
        self._tracker = tracker
        self._stream: asyncio.Transport | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._buffered = 0
        self.peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream"
        self._stream = transport
        self.peer = str((transport.get_extra_info("peername") or ("",))[0])
        # so that `pause_writing` is called as soon as anything waits
        transport.set_write_buffer_limits(high=0)
        self._tracker.note_idle(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._tracker.note_lost(self)
        self._end_stall()
        super().connection_lost(exc)

    def log_access(
        self, request: web.BaseRequest, response: web.StreamResponse, time: float | None
    ) -> None:
        self._tracker.note_idle(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        self._end_stall()
        super().resume_writing()

    def _watch(self) -> None:
        assert self._stream is not None, "it writes"
        self._buffered = self._stream.get_write_buffer_size()
        self._stall = asyncio.get_running_loop().call_later(STALL_S, self._check_stall)

    def _check_stall(self) -> None:
        """Close the connection if the client has read nothing since the last check;
        nothing is added to the buffer between checks.
        """
        assert self._stream is not None, "it writes"
        if self._stream.get_write_buffer_size() < self._buffered:
            self._watch()
        else:
            self.drop()

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def drop(self) -> None:
        """Close the connection immediately and discard what the client has not read."""
        self._tracker.note_lost(self)
        if self._stream is not None:
            self._stream.abort()


class ConnectionLimiter(asyncio.Protocol):
    """Admits a new connection, or asks the client to try again later."""

    def __init__(self, tracker: ConnectionTracker) -> None:
        self._tracker = tracker
        self._transport: asyncio.Transport | None = None
        self._answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream"
        if self._tracker.has_room():
            connection = Connection(self._tracker)
            transport.set_protocol(connection)
            connection.connection_made(transport)
        elif len(self._tracker.rejecting) < REJECTING:
            self._transport = transport
            self._tracker.rejecting.add(self)
            asyncio.get_running_loop().call_later(REJECT_S, self.close)
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Send the refusal once the client has sent anything.

        Further data is read and dropped, because closing earlier could discard the
        refusal.
        """
        if self._transport is not None and not self._answered:
            self._answered = True
            self._transport.write(self._tracker.refusal())
            self._transport.write_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tracker.rejecting.discard(self)

    def close(self) -> None:
        """Close the connection without waiting for the client."""
        if self._transport is not None:
            self._transport.abort()


def _half_of_the_files() -> int:
    """Raise the limit of open files and return half of it; the other half is for
    engines, sandboxes and our own files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        # Some systems refuse the very maximum that they report.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            soft = target
    return (FILES if soft == resource.RLIM_INFINITY else soft) // 2


@dataclass(frozen=True, kw_only=True)
class Access:
    """The address of a server and the clients that it admits.

    `names` are further names under which clients reach it; `no_token` admits every
    program on this host, and `networks` those at addresses in these networks.
    """

    host: str = "127.0.0.1"
    port: int = 8300
    token_env: str | None = None
    no_token: bool = False
    names: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()

    def guard(self, token: str | None) -> Guard:
        """Return the guard of a server with this token. Raises ConfigError for a
        network that is none.
        """
        networks = networks_of(self.networks, named="--allow")
        return Guard(token=token, hosts=self.names, networks=networks)

    def check(self) -> str | None:
        """Return the token in the variable `token_env`, or None without a variable.
        Raises ConfigError for wrong options, and if no server can listen at the
        address.
        """
        token = given_token(
            self.token_env, no_token=self.no_token, host=self.host, named="--token-env"
        )
        try:
            check_names(self.names, field="--allow-host")
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.guard(token)
        check_address(self.host, self.port, names=ADDRESS)
        return token
