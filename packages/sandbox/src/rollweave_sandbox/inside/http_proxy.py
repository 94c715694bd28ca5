"""An HTTP proxy inside the sandbox: it accepts programs' connections, passes their
requests to the host and the host's responses back. Needs Python 3.9 and its standard
library alone.

Invariants: connections, bodies and all buffered data are bounded; a request is passed
on once, in parts, and at most `max_in_flight` requests are unanswered at a time; if its
program disconnects, the request is reported; a client that stalls in
mid-request, or stops reading its response, is disconnected. Parts are small, so other
calls on the channel never wait for a whole body.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import resource
import selectors
import socket
import threading
import time
from http import HTTPStatus
from typing import Any

from .frames import Deadline, Result, Stop
from .http1 import BadRequest, HttpRequest, RequestDecoder

CONNECTIONS = 256
"""Maximum number of connections, unless a quarter of the files that the server may open
is fewer. Beyond this number, a new connection replaces the least recently active
connection without a request, or waits to be accepted.
"""

GRACE_S = 0.5
"""Seconds after its last activity for which a connection keeps its place: a program
that has just connected is about to send its request.
"""

PART_BYTES = 1 << 20
"""Maximum bytes of a body in one frame, which takes a millisecond of the channel."""

RECEIVE_BYTES = 1 << 18
"""Maximum number of bytes in one read from a socket."""

PENDING_BYTES = 64 << 20
"""Maximum total size in bytes of the requests that are not yet passed on."""

AHEAD_BYTES = 1 << 16
"""Maximum number of bytes that a program may send after an unanswered request."""

STALL_S = 60.0
"""Maximum seconds until a request is complete, until more of a response is read, and
between requests.
"""

LINGER_S = 2.0
"""Seconds for which a connection stays open after its last response, for a program that
is still sending.
"""

FOREVER = float("inf")

FORWARDED_HEADERS = (
    "accept",
    "authorization",
    "content-type",
    "idempotency-key",
    "x-api-key",
    "x-stainless-retry-count",
)
"""Request headers that are passed to the host: headers that identify the client, and
headers that identify a repeated request.
"""


class Connection:
    """One connection.

    `number` is the number of its request that is passed on, at least in part; 0 if
    there is none. `sent` is the number of bytes of the request's body that are passed
    on. `active_at` is when the connection was accepted, or data was last received or
    sent.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.active_at = time.monotonic()
        self.decoder = RequestDecoder()
        self.request: HttpRequest | None = None
        self.number = self.sent = 0
        self.out = bytearray()
        self.chunked = self.last = False
        self.events = selectors.EVENT_READ
        self.until = time.monotonic() + STALL_S


class ResponsePart:
    """A part of a response. The first part has a `status`, and no part follows an
    `abort`.
    """

    def __init__(
        self,
        number: int,
        *,
        status: int | None,
        headers: dict[str, str],
        body: bytes,
        last: bool,
        abort: bool,
    ) -> None:
        self.number, self.status, self.headers, self.body = number, status, headers, body
        self.last, self.abort = last, abort


class HttpProxy:
    """The listener and its connections. `send` may be called from any thread."""

    def __init__(self, max_in_flight: int) -> None:
        self._max_in_flight, self._active, self._count = max_in_flight, 0, 0
        self._capacity = min(CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._connections: dict[Connection, None] = {}
        self._in_flight: dict[int, Connection] = {}
        self._ready: collections.deque[Connection] = collections.deque()
        self._sending: Connection | None = None
        self._disconnected: list[int] = []
        self._answers: collections.deque[ResponsePart] = collections.deque()
        self._lock = threading.Lock()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        for sock in (self._wake, self._woken):
            sock.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, self._drain_wakeups)
        self._listening = False
        self._listen_at = FOREVER
        self.port: int = self._listener.getsockname()[1]

    def send(self, answer: ResponsePart) -> None:
        """Queue a part of a response, which the current or next long poll sends."""
        with self._lock:
            if not self._closed:
                self._answers.append(answer)
                with contextlib.suppress(BlockingIOError):
                    self._wake.send(b"x")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for connection in list(self._connections):
                self._drop(connection)
            self._selector.close()
            for sock in (self._listener, self._wake, self._woken):
                sock.close()

    def next(self, deadline: Deadline, stop: Stop) -> Result:
        """Serve the connections until there is an event for the host, and return the
        event, or an empty event once the time is up or the call is cancelled.
        """
        self._listen(True)
        self._selector.register(stop.fd, selectors.EVENT_READ)
        try:
            while True:
                self._send_responses()
                self._drop_stalled()
                if self._listen_at <= time.monotonic():
                    self._listen(True)
                event = self._event()
                if event is not None:
                    return event
                past = deadline.past
                for key, events in self._selector.select(self._wait_s(deadline)):
                    if key.data is None:
                        return {"disconnected": []}, b""
                    key.data(events)
                if past:
                    return self._event() or ({"disconnected": []}, b"")
        finally:
            self._selector.unregister(stop.fd)

    def _wait_s(self, deadline: Deadline) -> float:
        until = min([self._listen_at, *(connection.until for connection in self._connections)])
        return max(0.0, min(deadline.left_ms / 1000.0, until - time.monotonic()))

    # --- the host ---

    def _event(self) -> Result | None:
        connection = self._sending
        if connection is None and self._ready and self._active < self._max_in_flight:
            connection = self._ready.popleft()
        if connection is None and not self._disconnected:
            return None
        header: dict[str, Any] = {"disconnected": self._disconnected}
        self._disconnected = []
        if connection is None:
            return header, b""
        request = connection.request
        assert request is not None
        if not connection.number:
            self._count += 1
            connection.number, connection.sent = self._count, 0
            self._in_flight[connection.number] = connection
            self._active += 1
            headers = {
                name: request.headers[name] for name in FORWARDED_HEADERS if name in request.headers
            }
            header.update(method=request.method, target=request.target, headers=headers)
        part = request.body[connection.sent : connection.sent + PART_BYTES]
        connection.sent += len(part)
        more = connection.sent < len(request.body)
        self._sending = connection if more else None
        if not more:
            request.body = b""
        return {**header, "number": connection.number, "more": more}, part

    def _drain_wakeups(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(RECEIVE_BYTES)

    def _send_responses(self) -> None:
        """Send the queued parts of responses."""
        while self._answers:
            answer = self._answers.popleft()
            connection = self._in_flight.get(answer.number)
            if connection is None:
                continue  # the program has disconnected
            if answer.abort:
                self._drop(connection, notify=False)
                continue
            keep = connection.request is not None and connection.request.keep
            if answer.status is not None:
                # A response of several parts is chunked, or ends with the connection.
                connection.chunked = keep and not answer.last
                connection.out += _head(
                    answer.status, answer, chunked=connection.chunked, keep=keep
                )
            if answer.body:
                connection.out += (
                    b"%x\r\n%b\r\n" % (len(answer.body), answer.body)
                    if connection.chunked
                    else answer.body
                )
            if answer.last:
                connection.out += b"0\r\n\r\n" if connection.chunked else b""
                self._answered(connection, keep)
            self._write(connection)

    def _answered(self, connection: Connection, keep: bool) -> None:
        del self._in_flight[connection.number]
        self._active -= 1
        connection.request, connection.number, connection.last = None, 0, not keep
        if keep:
            self._read_on(connection)

    # --- the programs ---

    def _listen(self, on: bool) -> None:
        if on and not self._listening:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        elif self._listening and not on:
            self._selector.unregister(self._listener)
        self._listening, self._listen_at = on, FOREVER

    def _make_room(self) -> bool:
        """Drop a connection if the number of connections is at its maximum. Return
        whether there is room for another connection; if not, listen again when there
        may be room.
        """
        if len(self._connections) < self._capacity:
            return True
        asking_nothing = [
            connection for connection in self._connections if connection.request is None
        ]
        oldest = min(asking_nothing, key=lambda connection: connection.active_at, default=None)
        if oldest is not None and oldest.active_at + GRACE_S <= time.monotonic():
            self._drop(oldest)
            return True
        self._listen(False)
        if oldest is not None:
            self._listen_at = oldest.active_at + GRACE_S
        return False

    def _accept(self, _: int) -> None:
        if not self._make_room():
            return
        try:
            sock = self._listener.accept()[0]
        except BlockingIOError:
            return
        except OSError:  # out of descriptors: retry when a descriptor is free, or at the next poll
            self._listen(False)
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(sock)
        self._connections[connection] = None
        self._selector.register(
            sock, connection.events, functools.partial(self._on_ready, connection)
        )

    def _on_ready(self, connection: Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write(connection)
        if events & selectors.EVENT_READ and connection in self._connections:
            self._read(connection)

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        connection.active_at = time.monotonic()
        if not data:
            self._drop(connection)
        elif not connection.last:
            if not connection.decoder.started and connection.request is None:
                connection.until = time.monotonic() + STALL_S
            connection.decoder.feed(data)
            if connection.request is None:
                self._read_on(connection)
            elif connection.decoder.buffered > AHEAD_BYTES:
                self._drop(connection)

    def _read_on(self, connection: Connection) -> None:
        """Take the next request of a connection if it is complete."""
        try:
            connection.request = connection.decoder.take()
            if (
                connection.request is None
                and sum(other.decoder.buffered for other in self._connections) + self._waiting()
                > PENDING_BYTES
            ):
                raise BadRequest(
                    503, f"requests that wait must have at most {PENDING_BYTES} bytes together"
                )
        except BadRequest as error:
            self._refuse(connection, error)
            return
        if connection.request is not None:
            connection.until = FOREVER
            self._ready.append(connection)
        if connection.decoder.awaited:
            connection.decoder.awaited = False
            connection.out += b"HTTP/1.1 100 Continue\r\n\r\n"
            self._write(connection)

    def _waiting(self) -> int:
        return sum(
            len(connection.request.body)
            for connection in self._connections
            if connection.request is not None
        )

    def _refuse(self, connection: Connection, error: BadRequest) -> None:
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        body = json.dumps(
            {"error": {"message": str(error), "type": kind, "param": None, "code": None}}
        ).encode()
        connection.decoder, connection.request, connection.last = RequestDecoder(), None, True
        head = _status(error.status) + b"Content-Type: application/json\r\n"
        connection.out += head + b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (
            len(body),
            body,
        )
        connection.until = time.monotonic() + STALL_S
        self._write(connection)

    def _write(self, connection: Connection) -> None:
        if connection not in self._connections or not connection.out:
            return
        waited = len(connection.out)
        try:
            while connection.out:
                del connection.out[: connection.socket.send(connection.out)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        now = time.monotonic()
        if len(connection.out) < waited:
            connection.active_at = now
        if connection.out:
            connection.until = (
                connection.until
                if len(connection.out) == waited and connection.until != FOREVER
                else now + STALL_S
            )
        elif connection.last:
            # Closing immediately would answer further data with a reset, which could
            # discard our response.
            connection.until = now + LINGER_S
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_WR)
        else:
            connection.until = now + STALL_S if connection.request is None else FOREVER
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.out else 0)
        if events != connection.events:
            connection.events = events
            self._selector.modify(
                connection.socket, events, functools.partial(self._on_ready, connection)
            )

    def _drop_stalled(self) -> None:
        now = time.monotonic()
        for connection in [
            connection for connection in self._connections if connection.until <= now
        ]:
            self._drop(connection)

    def _drop(self, connection: Connection, *, notify: bool = True) -> None:
        """Close a connection, unless it is closed. Closing ends its request, which is
        reported to the host if `notify` is true.
        """
        if connection not in self._connections:
            return
        del self._connections[connection]
        with contextlib.suppress(ValueError):
            self._ready.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        connection.request = None
        if self._sending is connection:
            self._sending = None
        if connection.number:
            del self._in_flight[connection.number]
            self._active -= 1
            if notify:
                self._disconnected.append(connection.number)
        if not self._closed:
            self._listen(True)


def _status(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


def _head(status: int, answer: ResponsePart, *, chunked: bool, keep: bool) -> bytes:
    lines = [f"{name}: {value}\r\n" for name, value in answer.headers.items()]
    if chunked:
        lines.append("Transfer-Encoding: chunked\r\n")
    elif answer.last:
        lines.append(f"Content-Length: {len(answer.body)}\r\n")
    if not keep:
        lines.append("Connection: close\r\n")
    return _status(status) + "".join(lines).encode("latin-1") + b"\r\n"
