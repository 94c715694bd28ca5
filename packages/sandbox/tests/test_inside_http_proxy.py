"""The events that the proxy reports to the host in long polls, without a sandbox."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rollweave_sandbox.inside import http_proxy
from rollweave_sandbox.inside.frames import Deadline, Stop
from rollweave_sandbox.inside.http_proxy import AHEAD_BYTES, PART_BYTES, HttpProxy, ResponsePart

GET = b"GET /a HTTP/1.1\r\nAuthorization: t\r\nX-Other: u\r\n\r\n"


class Host:
    """A client of a proxy, which the test's thread serves during calls."""

    def __init__(self, proxy: HttpProxy) -> None:
        self.proxy, self.stop = proxy, Stop()

    def next(self, timeout_s: float = 20.0) -> tuple[dict[str, Any], bytes]:
        return self.proxy.next(Deadline(timeout_s), self.stop)

    def quiet(self) -> bool:
        """Return whether there is no event, after all data sent so far."""
        return all(self.next(0.0) == ({"disconnected": []}, b"") for _ in range(20))

    def answer(
        self,
        number: int,
        body: bytes = b"yes",
        *,
        last: bool = True,
        status: int | None = 200,
        abort: bool = False,
    ) -> None:
        self.proxy.send(
            ResponsePart(number, status=status, headers={}, body=body, last=last, abort=abort)
        )


@contextlib.contextmanager
def opened(max_in_flight: int = 2) -> Iterator[Host]:
    host = Host(HttpProxy(max_in_flight))
    try:
        yield host
    finally:
        host.proxy.close()
        host.stop.close()


def sent(host: Host, wire: bytes = GET) -> socket.socket:
    """Connect a program that has sent data."""
    sock = socket.create_connection(("127.0.0.1", host.proxy.port), timeout=20)
    sock.sendall(wire)
    return sock


def test_limits_requests_in_flight() -> None:
    with opened(max_in_flight=2) as host:
        programs = [sent(host) for _ in range(4)]
        first = host.next()[0]
        expected = {"method": "GET", "target": "/a", "headers": {"authorization": "t"}}
        assert first == {"disconnected": [], "number": 1, **expected, "more": False}
        assert host.next()[0]["number"] == 2
        assert host.quiet()
        programs[0].close()
        third, disconnected = host.next()[0], [1]
        if "number" not in third:
            assert third == {"disconnected": [1]}
            third, disconnected = host.next()[0], []
        assert (third["disconnected"], third["number"]) == (disconnected, 3)
        assert host.quiet()
        host.answer(2)
        assert host.next()[0]["number"] == 4
        assert programs[1].recv(1000).endswith(b"Content-Length: 3\r\n\r\nyes")
        host.answer(1)  # it is gone
        assert host.quiet()
        for sock in programs:
            sock.close()


def test_a_large_body_comes_in_parts_and_ends_with_its_program() -> None:
    body = bytes(range(256)) * (PART_BYTES // 100)
    head = b"POST /a HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)
    with opened() as host:
        for complete in (True, False):
            sock = sent(host, head)
            sending = threading.Thread(target=sock.sendall, args=(body,))
            sending.start()
            events = [host.next()]
            sending.join()
            assert len(events[0][1]) == PART_BYTES
            if not complete:
                sock.close()
                event = host.next()[0]
                while not event["disconnected"]:
                    event = host.next()[0]
                assert event == {"disconnected": [events[0][0]["number"]]}
                assert host.quiet()
                break
            while events[-1][0]["more"]:
                events.append(host.next())
            assert b"".join(part for _, part in events) == body
            assert all("method" not in header for header, _ in events[1:])
            host.answer(events[0][0]["number"], b"a", last=False)
            host.answer(events[0][0]["number"], b"b", status=None)
            assert host.quiet()
            assert sock.recv(1000).endswith(
                b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n0\r\n\r\n"
            )
            sock.close()


def test_a_client_that_sends_endlessly_is_disconnected() -> None:
    with opened() as host:
        sock = sent(host)
        assert host.next()[0]["number"] == 1
        events = []
        with contextlib.suppress(ConnectionError):
            while not events:
                sock.sendall(b"x" * (AHEAD_BYTES // 2))
                events = host.next(0.0)[0]["disconnected"]
        assert (events or host.next()[0]["disconnected"]) == [1]
        sock.close()


def test_an_abort_closes_the_connection_without_an_event() -> None:
    with opened() as host:
        sock = sent(host)
        host.answer(host.next()[0]["number"], b"half", last=False)
        host.answer(1, b"", status=None, last=False, abort=True)
        assert host.quiet()
        assert b"".join(iter(lambda: sock.recv(1000), b"")).endswith(b"4\r\nhalf\r\n")
        sock.close()


def test_a_cancelled_poll_loses_no_event() -> None:
    with opened() as host:
        host.stop.set()
        assert host.next(1000.0) == ({"disconnected": []}, b"")
        host.stop.clear()
        sock = sent(host)
        assert host.next()[0]["number"] == 1
        sock.close()
        assert host.next()[0] == {"disconnected": [1]}


def test_a_program_that_has_just_connected_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_proxy, "CONNECTIONS", 4)
    monkeypatch.setattr(http_proxy, "GRACE_S", 1000.0)
    with opened() as host:
        flood = [sent(host, b"POST /a") for _ in range(3)]
        fresh = sent(host, b"")
        assert host.quiet()
        flood += [sent(host, b"POST /a") for _ in range(10)]
        assert host.quiet()
        fresh.sendall(GET)
        assert host.next()[0]["number"] == 1
        for sock in [fresh, *flood]:
            sock.close()


def test_the_least_recently_active_connection_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_proxy, "CONNECTIONS", 2)
    monkeypatch.setattr(http_proxy, "GRACE_S", 0.05)
    with opened() as host:
        first, second = sent(host, b"POST /a"), sent(host, b"POST /a")
        assert host.quiet()
        first.sendall(b" HTTP/1.1\r\n")
        assert host.quiet()
        third = sent(host)
        assert host.next()[0]["number"] == 1  # after the grace, by the proxy's own clock
        assert second.recv(1) == b""
        first.sendall(b"Content-Length: 0\r\n\r\n")
        assert host.next()[0]["number"] == 2
        for sock in (first, second, third):
            sock.close()
