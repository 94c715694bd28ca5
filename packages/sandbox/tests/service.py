"""Services that programs in a sandbox call, and programs that call them."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from aiohttp import web

from rollweave.sandbox.base import ExecResult, Sandbox


@dataclass
class Spy:
    """A service that records the method, path, headers and body of requests.

    It responds with `answer`, with `hold` only once `free` is set.
    """

    answer: bytes = b"yes"
    hold: bool = False
    url: str = ""
    seen: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    started: asyncio.Queue[None] = field(default_factory=asyncio.Queue)
    free: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Queue[None] = field(default_factory=asyncio.Queue)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append((request.method, request.raw_path, headers, await request.read()))
        self.started.put_nowait(None)
        if self.hold:
            try:
                await self.free.wait()
            except asyncio.CancelledError:
                self.left.put_nowait(None)
                raise
        if request.path.endswith("torn"):
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"half")
            assert request.transport is not None
            request.transport.abort()
            return response
        if request.path.endswith("away"):
            raise web.HTTPFound(
                "http://127.0.0.1:1/elsewhere", headers={"Set-Cookie": "a=b", "X-Secret": "1"}
            )
        return web.Response(body=self.answer, headers={"Retry-After": "7", "X-Secret": "1"})


@contextlib.asynccontextmanager
async def spied(spy: Spy) -> AsyncIterator[str]:
    """Serve, and yield the URL, below which is the path /s/mine/v1."""
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", spy.handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        spy.url = f"http://127.0.0.1:{runner.addresses[0][1]}/s/mine/v1"
        yield spy.url
    finally:
        await runner.cleanup()


HELPERS = '''
import http.client, json, os, socket, sys, threading, time, urllib.parse

def door(url):
    return urllib.parse.urlsplit(url).port

def raw(url, wire):
    """Send bytes; return all that the other side sends until it closes."""
    with socket.create_connection(("127.0.0.1", door(url))) as sock:
        sock.sendall(wire)
        sock.shutdown(socket.SHUT_WR) if wire.endswith(b"END") else None
        return b"".join(iter(lambda: sock.recv(65536), b""))

def ask(url, path, method="GET", body=None, headers={}):
    """Send a request; return status, headers and body."""
    talk = http.client.HTTPConnection("127.0.0.1", door(url), timeout=100)
    talk.request(method, urllib.parse.urlsplit(url).path + path, body, headers)
    answer = talk.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()
'''


async def run(
    sandbox: Sandbox, source: str, *arguments: str, timeout_s: float = 100.0
) -> ExecResult:
    """Run a program of rollweave's Python in a sandbox; `sys.argv[1:]` are the
    arguments.
    """
    return await sandbox.exec(
        [sys.executable, "-I", "-c", HELPERS + source, *arguments], timeout_s=timeout_s
    )


async def output_of(sandbox: Sandbox, source: str, *arguments: str) -> str:
    """Return the output of a program, which must succeed."""
    result = await run(sandbox, source, *arguments)
    assert result.rc == 0, result.stderr.decode()
    return result.stdout.decode().strip()
