"""Connections that send nothing, send half a request, or read nothing do not burden
other clients.
"""

import asyncio
import contextlib
import re
import resource
import socket
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp import web

from rollweave.io.http import listening as module
from rollweave.io.http.guard import Guard
from rollweave.io.http.listening import listening
from rollweave.schema.errors import ConfigError


class Gate:
    """A server whose `/held` answers once it is free, and whose `/large` is more than a
    connection holds.
    """

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.under_way = asyncio.Semaphore(0)

    async def hold(self, _: web.Request) -> web.Response:
        self.under_way.release()
        await self.free.wait()
        return web.Response(text="free")

    async def large(self, _: web.Request) -> web.Response:
        return web.Response(body=bytes(64 << 20))

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")


@contextlib.asynccontextmanager
async def served(most: int = 10) -> AsyncIterator[tuple[Gate, str, int]]:
    gate, app = Gate(), web.Application()
    app.add_routes(
        [
            web.get("/held", gate.hold),
            web.get("/large", gate.large),
            web.get("/health", gate.health),
        ]
    )
    async with listening(
        app, "127.0.0.1", 0, guard=Guard(token=None), shutdown_s=0.1, most=most
    ) as url:
        yield gate, url, int(url.rpartition(":")[2])


@contextlib.asynccontextmanager
async def connections(
    port: int, count: int, data: bytes = b""
) -> AsyncIterator[list[socket.socket]]:
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.setblocking(False)
            await loop.sock_connect(one, ("127.0.0.1", port))
            await loop.sock_sendall(one, data)
        yield sockets


async def ended(one: socket.socket) -> bool:
    """Wait until the other end closes the connection."""
    try:
        while await asyncio.get_running_loop().sock_recv(one, 1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


async def test_an_address_is_checked_before_a_server_and_named_by_its_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, rule = "127.0.0.1", "H and P must be a free address of this machine, got"
    more: dict[str, Any] = {"guard": Guard(token=None), "shutdown_s": 0}
    with socket.create_server((host, 0)) as taken:
        port = taken.getsockname()[1]
        busy = re.escape(f"{rule} {host}:{port}: address already in use")
        with pytest.raises(ConfigError, match=f"^{busy}$"):
            module.check_address(host, port, names="H and P")
        for names, error in (("H and P", ConfigError), (None, OSError)):
            with pytest.raises(error, match=r"(?i)address already in use"):
                async with listening(web.Application(), host, port, names=names, **more):
                    raise AssertionError
    module.check_address(host, port, names="H and P")
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=unknown))
    with pytest.raises(ConfigError, match=f"^{rule} a:80: name or service not known$"):
        module.check_address("a", 80, names="H and P")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="--allow-host"):
        module.Access(host=host, port=port, names=("a b",)).check()
    assert module.Access(host=host, port=port).check() is None


def test_half_of_the_files_are_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = list[tuple[int, tuple[int, int]]]()
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: limits.append(limit))
    none = resource.RLIM_INFINITY
    for soft, hard, most, raised in (
        *((1024, 4096, 2048, 4096), (4096, 4096, 2048, 0), (1024, 1 << 20, 1 << 15, 1 << 16)),
        *((1 << 17, none, 1 << 16, 0), (1024, none, 1 << 15, 1 << 16), (none, none, 1 << 15, 0)),
    ):
        limit = {resource.RLIMIT_NOFILE: (soft, hard)}
        monkeypatch.setattr(resource, "getrlimit", limit.__getitem__)
        assert module._half_of_the_files() == most
        assert limits == ([(resource.RLIMIT_NOFILE, (raised, hard))] if raised else [])
        limits.clear()


@pytest.mark.parametrize("data", [b"", b"GET /health HTTP/1.1\r\nHost: loc"])
async def test_idle_connections_are_closed_for_new_ones_longest_idle_first(data: bytes) -> None:
    async with (
        served() as (_, url, port),
        aiohttp.ClientSession() as session,
        connections(port, 200, data) as silent,
    ):
        async with session.get(url + "/health") as response:
            assert response.status == 200
        assert await ended(silent[0])
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)


async def test_no_connection_with_a_request_in_flight_is_closed() -> None:
    async with served(most=3) as (gate, url, port), aiohttp.ClientSession() as session:
        requests = [asyncio.create_task(session.get(url + "/held")) for _ in range(3)]
        for _ in requests:
            await gate.under_way.acquire()
        async with (
            connections(port, 20),
            aiohttp.ClientSession() as other,
            other.get(url + "/health") as answer,
        ):
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        gate.free.set()
        for response in await asyncio.gather(*requests):
            assert await response.text() == "free"
        async with session.get(url + "/health") as answer:  # answered, they are idle again
            assert answer.status == 200
        async with connections(port, 3) as silent:
            async with aiohttp.ClientSession() as other, other.get(url + "/health") as answer:
                assert answer.status == 200
            assert len(silent) == 3


@pytest.mark.parametrize("data", [b"", b"GET /health HTTP/1.1\r\nHost: loc"])
async def test_a_connection_without_a_request_is_closed(
    monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(module, "HEAD_S", 0.05)
    async with served() as (_, _, port), connections(port, 1, data) as (one,):
        assert await ended(one)


async def test_a_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALL_S", 0.05)
    dropped = asyncio.Event()
    monkeypatch.setattr(
        module.Connection,
        "drop",
        lambda self, drop=module.Connection.drop: (drop(self), dropped.set()),
    )
    async with served() as (_, _, port):
        request = f"GET /large HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
        async with connections(port, 1, request.encode()):
            await dropped.wait()


async def test_a_client_that_reads_slowly_gets_the_whole_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "STALL_S", 0.5)
    async with (
        served() as (_, url, _),
        aiohttp.ClientSession() as session,
        session.get(url + "/large") as response,
    ):
        assert len(await response.read()) == 64 << 20
