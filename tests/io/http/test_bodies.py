"""Bodies are bounded in bytes, inflated bytes and time."""

import asyncio
import contextlib
import functools
import gzip
import io
import os
import threading
import zlib
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
from aiohttp import web

from rollweave.io.http import bodies
from rollweave.io.http.bodies import FREE_BYTES, RATIO, body_of
from rollweave.io.http.guard import Guard
from rollweave.io.http.listening import listening

MOST = 4 * FREE_BYTES
HEAD = {"Content-Type": "application/json"}


@contextlib.asynccontextmanager
async def served(*, seconds: float = 30.0) -> AsyncIterator[str]:
    async def length(request: web.Request) -> web.Response:
        return web.json_response(len(await body_of(request, most=MOST, seconds=seconds)))

    app = web.Application()
    app.add_routes([web.post("/", length)])
    async with listening(app, "127.0.0.1", 0, guard=Guard(token=None), shutdown_s=0.1) as url:
        yield url + "/"


@contextlib.asynccontextmanager
async def posted(url: str, zipped: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
    head = HEAD | {"Content-Encoding": "gzip"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=zipped, headers=head) as response,
    ):
        yield response


@functools.cache
def noise() -> bytes:
    return os.urandom(MOST)


@pytest.mark.parametrize(
    ("coding", "sent", "status"),
    [
        (None, noise, 200),
        (None, lambda: noise() + b"x", 413),
        ("gzip", lambda: gzip.compress(b"{}" * 1000), 200),
        ("deflate", lambda: zlib.compress(b"{}" * 1000), 200),
        ("gzip", lambda: gzip.compress(noise()[: MOST // 2]), 200),
        ("gzip", lambda: gzip.compress(b" " * FREE_BYTES), 200),  # a thousandfold, but little
        ("gzip", lambda: gzip.compress(b" " * (MOST + 1)), 413),
        ("gzip", lambda: gzip.compress(b" " * (64 << 20)), 413),
        ("gzip", lambda: gzip.compress(b"{}" * 1000)[:-5], 400),
        ("gzip", lambda: gzip.compress(b"{}") * 2, 400),
        ("gzip", lambda: b"not zipped", 400),
        ("br", lambda: b"{}", 415),
        ("gzip, gzip", lambda: gzip.compress(gzip.compress(b"{}")), 415),
    ],
    ids=[
        "plain at the bound",
        "plain above the bound",
        "gzip of little",
        "deflate of little",
        "gzip of noise",
        "gzip of a thousandfold that is little",
        "gzip of one byte above the bound",
        "gzip of far above the bound",
        "gzip cut short",
        "gzip of two members",
        "not gzip",
        "another coding",
        "gzip twice",
    ],
)
async def test_bounds_bodies_as_sent_and_as_inflated(
    coding: str | None, sent: Callable[[], bytes], status: int
) -> None:
    async with served() as url, aiohttp.ClientSession() as session:
        head = HEAD | ({"Content-Encoding": coding} if coding else {})
        async with session.post(url, data=io.BytesIO(sent()), headers=head) as response:
            assert response.status == status


async def test_refuses_ratios_beyond_the_limit_within_the_bound() -> None:
    sent = gzip.compress(b" " * (2 * FREE_BYTES))
    assert len(sent) * RATIO < 2 * FREE_BYTES < MOST
    async with served() as url, posted(url, sent) as response:
        assert response.status == 413
        assert (
            response.reason
            == f"the body must inflate to at most {RATIO} times what was sent, got more"
        )


async def test_bodies_are_inflated_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, inflated = [], bodies._inflated
    monkeypatch.setattr(
        bodies,
        "_inflated",
        lambda *arguments: (threads.append(threading.current_thread()), inflated(*arguments))[1],
    )
    async with served() as url, posted(url, gzip.compress(b"{}")) as response:
        assert await response.json() == 2
    assert threads
    assert threading.current_thread() not in threads


async def test_refuses_late_bodies() -> None:
    async with served(seconds=0.05) as url:
        host, _, port = url.removeprefix("http://").strip("/").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST / HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: 100\r\n\r\n{{"
        )
        writer.write(head.encode())
        assert b" 408 " in await reader.readline()
        writer.close()
