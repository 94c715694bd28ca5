"""The connections of programs that speak HTTP with us, and what is between them and the
host. Python 3.9, stdlib alone.

Invariants: connections, bodies, and all that is held are bounded; a request is handed
out once, in parts, at most `at_once` of them before any is answered; one whose program
goes away meanwhile is told of as gone; who is silent amid a request, or does not read
its answer, is left. Parts are small: the other calls of the channel never wait for a
whole body.
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

from .calls import Deadline, Result, Stop
from .http1 import BadRequest, Request, RequestDecoder

CONNECTIONS = 256
"""At once, or a quarter of the files that the server may open: further ones wait to be
accepted.
"""

PART_BYTES = 1 << 20
"""Of a body in one frame: a millisecond of the channel."""

RECEIVE_BYTES = 1 << 18
"""Taken from a socket at once."""

HELD_BYTES = 64 << 20
"""Of all requests that were not handed out yet."""

AHEAD_BYTES = 1 << 16
"""That a program may send behind a request which is not answered."""

SILENT_S = 60.0
"""Seconds for a request to be whole, for an answer to be read on, and between requests."""

LINGER_S = 2.0
"""Seconds for a program to take notice of a last answer while it still sends."""

FOREVER = float("inf")

PASSED = ("accept", "authorization", "content-type", "idempotency-key", "x-stainless-retry-count")
"""Headers that the host is told of: what says who asks, and whether it asks again."""


class Peer:
    """One connection.

    `number`: of its request that was handed out, at least in part; 0: none.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.decoder = RequestDecoder()
        self.request: Request | None = None
        self.number = self.handed = 0
        self.out = bytearray()
        self.chunked = self.last = False
        self.events = selectors.EVENT_READ
        self.until = time.monotonic() + SILENT_S

    @property
    def idle(self) -> bool:
        return self.request is None and not (self.out or self.last or self.decoder.begun)


class Answer:
    """A part of an answer: the first has a `status`.

    After an `abort` there will be no other one.
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


class Desk:
    """The listener, its connections, and what is between them and the host.

    `tell` is for every thread.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once, self._active, self._count = at_once, 0, 0
        self._room = min(CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._peers: dict[Peer, None] = {}
        self._asking: dict[int, Peer] = {}
        self._ready: collections.deque[Peer] = collections.deque()
        self._handing: Peer | None = None
        self._gone: list[int] = []
        self._answers: collections.deque[Answer] = collections.deque()
        self._guard = threading.Lock()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        for sock in (self._wake, self._woken):
            sock.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, self._awake)
        self._listening = False
        self.port: int = self._listener.getsockname()[1]

    def tell(self, answer: Answer) -> None:
        """What the long poll shall send, now or when there is one again."""
        with self._guard:
            if not self._closed:
                self._answers.append(answer)
                with contextlib.suppress(BlockingIOError):
                    self._wake.send(b"x")

    def close(self) -> None:
        with self._guard:
            self._closed = True
            for peer in list(self._peers):
                self._drop(peer)
            self._selector.close()
            for sock in (self._listener, self._wake, self._woken):
                sock.close()

    def next(self, deadline: Deadline, stop: Stop) -> Result:
        """What there is to tell the host; nothing once the time is up or the call
        should stop.
        """
        self._listen(True)
        self._selector.register(stop.fd, selectors.EVENT_READ)
        try:
            while True:
                self._settle()
                self._leave_the_silent()
                found = self._notice()
                if found is not None:
                    return found
                past = deadline.past
                for key, events in self._selector.select(self._wait_s(deadline)):
                    if key.data is None:
                        return {"gone": []}, b""
                    key.data(events)
                if past:
                    return self._notice() or ({"gone": []}, b"")
        finally:
            self._selector.unregister(stop.fd)

    def _wait_s(self, deadline: Deadline) -> float:
        until = min((peer.until for peer in self._peers), default=FOREVER)
        return max(0.0, min(deadline.left_ms / 1000.0, until - time.monotonic()))

    # --- the host ---

    def _notice(self) -> Result | None:
        peer = self._handing
        if peer is None and self._ready and self._active < self._at_once:
            peer = self._ready.popleft()
        if peer is None and not self._gone:
            return None
        header: dict[str, Any] = {"gone": self._gone}
        self._gone = []
        if peer is None:
            return header, b""
        request = peer.request
        assert request is not None
        if not peer.number:
            self._count += 1
            peer.number, peer.handed = self._count, 0
            self._asking[peer.number] = peer
            self._active += 1
            headers = {name: request.headers[name] for name in PASSED if name in request.headers}
            header.update(method=request.method, target=request.target, headers=headers)
        part = request.body[peer.handed : peer.handed + PART_BYTES]
        peer.handed += len(part)
        more = peer.handed < len(request.body)
        self._handing = peer if more else None
        if not more:
            request.body = b""
        return {**header, "number": peer.number, "more": more}, part

    def _awake(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(RECEIVE_BYTES)

    def _settle(self) -> None:
        """Send what the host answered."""
        while self._answers:
            answer = self._answers.popleft()
            peer = self._asking.get(answer.number)
            if peer is None:
                continue  # it has gone meanwhile
            if answer.abort:
                self._drop(peer, told=False)
                continue
            keep = peer.request is not None and peer.request.keep
            if answer.status is not None:
                # A part that is not the last has a length of its own, or ends with the
                # connection.
                peer.chunked = keep and not answer.last
                peer.out += _head(answer.status, answer, chunked=peer.chunked, keep=keep)
            if answer.body:
                peer.out += (
                    b"%x\r\n%b\r\n" % (len(answer.body), answer.body)
                    if peer.chunked
                    else answer.body
                )
            if answer.last:
                peer.out += b"0\r\n\r\n" if peer.chunked else b""
                self._answered(peer, keep)
            self._write(peer)

    def _answered(self, peer: Peer, keep: bool) -> None:
        del self._asking[peer.number]
        self._active -= 1
        peer.request, peer.number, peer.last = None, 0, not keep
        if keep:
            self._read_on(peer)

    # --- the programs ---

    def _listen(self, on: bool) -> None:
        if on and not self._listening:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        elif self._listening and not on:
            self._selector.unregister(self._listener)
        self._listening = on

    def _accept(self, _: int) -> None:
        if len(self._peers) >= self._room:
            asking_nothing = [peer for peer in self._peers if peer.request is None]
            if not asking_nothing:
                self._listen(False)
                return
            self._drop(next((peer for peer in asking_nothing if peer.idle), asking_nothing[0]))
        try:
            sock = self._listener.accept()[0]
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: when one is closed, or at the next long poll
            self._listen(False)
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = Peer(sock)
        self._peers[peer] = None
        self._selector.register(sock, peer.events, functools.partial(self._happened, peer))

    def _happened(self, peer: Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write(peer)
        if events & selectors.EVENT_READ and peer in self._peers:
            self._read(peer)

    def _read(self, peer: Peer) -> None:
        try:
            data = peer.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
        elif not peer.last:
            if not peer.decoder.begun and peer.request is None:
                peer.until = time.monotonic() + SILENT_S
            peer.decoder.feed(data)
            if peer.request is None:
                self._read_on(peer)
            elif peer.decoder.held > AHEAD_BYTES:
                self._drop(peer)

    def _read_on(self, peer: Peer) -> None:
        """Take the next request of a connection, if it is whole."""
        try:
            peer.request = peer.decoder.take()
            if (
                peer.request is None
                and sum(each.decoder.held for each in self._peers) + self._waiting() > HELD_BYTES
            ):
                raise BadRequest(
                    503, f"requests that wait must have at most {HELD_BYTES} bytes together"
                )
        except BadRequest as error:
            self._refuse(peer, error)
            return
        if peer.request is not None:
            peer.until = FOREVER
            self._ready.append(peer)
        if peer.decoder.awaited:
            peer.decoder.awaited = False
            peer.out += b"HTTP/1.1 100 Continue\r\n\r\n"
            self._write(peer)

    def _waiting(self) -> int:
        return sum(len(peer.request.body) for peer in self._peers if peer.request is not None)

    def _refuse(self, peer: Peer, error: BadRequest) -> None:
        kind = "server_error" if error.status >= 500 else "invalid_request_error"
        body = json.dumps(
            {"error": {"message": str(error), "type": kind, "param": None, "code": None}}
        ).encode()
        peer.decoder, peer.request, peer.last = RequestDecoder(), None, True
        head = _status(error.status) + b"Content-Type: application/json\r\n"
        peer.out += head + b"Content-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body)
        peer.until = time.monotonic() + SILENT_S
        self._write(peer)

    def _write(self, peer: Peer) -> None:
        if peer not in self._peers or not peer.out:
            return
        waited = len(peer.out)
        try:
            while peer.out:
                del peer.out[: peer.socket.send(peer.out)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)
            return
        now = time.monotonic()
        if peer.out:
            peer.until = (
                peer.until if len(peer.out) == waited and peer.until != FOREVER else now + SILENT_S
            )
        elif peer.last:
            # Closed at once, what it still sends would be answered by a reset, which
            # takes our answer along.
            peer.until = now + LINGER_S
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_WR)
        else:
            peer.until = now + SILENT_S if peer.request is None else FOREVER
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
        if events != peer.events:
            peer.events = events
            self._selector.modify(peer.socket, events, functools.partial(self._happened, peer))

    def _leave_the_silent(self) -> None:
        now = time.monotonic()
        for peer in [peer for peer in self._peers if peer.until <= now]:
            self._drop(peer)

    def _drop(self, peer: Peer, *, told: bool = True) -> None:
        """Close a connection, unless it is.

        Its request is over, of which the host is told if it does not know.
        """
        if peer not in self._peers:
            return
        del self._peers[peer]
        with contextlib.suppress(ValueError):
            self._ready.remove(peer)
        self._selector.unregister(peer.socket)
        peer.socket.close()
        peer.request = None
        if self._handing is peer:
            self._handing = None
        if peer.number:
            del self._asking[peer.number]
            self._active -= 1
            if told:
                self._gone.append(peer.number)
        if not self._closed:
            self._listen(True)


def _status(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


def _head(status: int, answer: Answer, *, chunked: bool, keep: bool) -> bytes:
    lines = [f"{name}: {value}\r\n" for name, value in answer.headers.items()]
    if chunked:
        lines.append("Transfer-Encoding: chunked\r\n")
    elif answer.last:
        lines.append(f"Content-Length: {len(answer.body)}\r\n")
    if not keep:
        lines.append("Connection: close\r\n")
    return _status(status) + "".join(lines).encode("latin-1") + b"\r\n"
