"""The server of the page: static files and JSON, on this machine's loopback alone.

Invariants: nothing is answered without the token, except one line with status 403; the
guard refuses pages of other sites (`io/http/guard`); files are read on threads, one at
a time for each run, so that a slow disk delays only answers about its own runs; a file
system that hangs delays no answer beyond `READ_S`, and does not delay the end of the
server.
"""

import asyncio
import contextlib
import hmac
import math
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from importlib import resources
from typing import Any, TypeVar

from aiohttp import web

from rollweave.io.http.guard import Guard, Handler
from rollweave.io.http.listening import listening
from rollweave.schema.base import as_json
from rollweave.schema.text import decimal
from rollweave_ui.attempts import ORDERS, PAGE, Query
from rollweave_ui.files import UnknownRunError
from rollweave_ui.runs import Runs, prometheus_text

T = TypeVar("T")

HOST = "127.0.0.1"
"""The address to listen on: never another."""

READ_S = 10.0
"""Maximum seconds for which an answer waits for files."""

MAX_READERS = 32
"""Maximum number of threads that read files, including hanging threads."""

MAX_BINS = 1000
"""Maximum number of parts of a window of lanes."""

FILES = {
    "/": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
}
"""The static files by path, with their media types."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

WRONG_TOKEN = (
    "the address must have the token of this server, as `rollweave ui` printed it "
    "(http://127.0.0.1:PORT/?token=…)"
)


class _WrongInputError(Exception):
    """A parameter breaks a rule; the message is one line."""


@contextlib.asynccontextmanager
async def serving(runs: Runs, *, token: str, port: int) -> AsyncIterator[str]:
    """Serve the page while the context is open; yield its address without the token.

    Raises ConfigError if the port is taken.
    """
    app = web.Application(middlewares=[_headers, _errors, _admit(token)])
    app.add_routes(_Routes(runs).table())
    guard = Guard(token=None)
    async with listening(app, HOST, port, guard=guard, shutdown_s=1.0, names="--port") as address:
        yield address


def _admit(token: str) -> Any:
    """Return the middleware that admits requests with the token: in the address, in a
    cookie, or as a bearer.

    A page's address loses the token as soon as the browser has its cookie.
    """

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        assert request.transport is not None, "it is connected"
        cookie = f"rollweave-ui-{request.transport.get_extra_info('sockname')[1]}"
        given = request.query.get("token")
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        candidates = (given, request.cookies.get(cookie), bearer)
        known = [candidate for candidate in candidates if candidate and _equal(candidate, token)]
        if not known or (given is not None and not _equal(given, token)):
            return web.Response(status=403, text=WRONG_TOKEN + "\n")
        if given is None or request.path != "/":
            return await handler(request)
        response = web.Response(status=303, headers={"Location": "/"})
        response.set_cookie(cookie, token, httponly=True, samesite="Strict", path="/")
        return response

    return admit


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode())


@web.middleware
async def _headers(request: web.Request, handler: Handler) -> web.StreamResponse:
    response = await handler(request)
    response.headers.update(HEADERS)
    return response


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors into one line of JSON."""
    try:
        return await handler(request)
    except UnknownRunError as error:
        return _json({"error": str(error)}, status=404)
    except _WrongInputError as error:
        return _json({"error": str(error)}, status=400)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _json({"error": error.reason}, status=error.status)


class _Readers:
    """Threads that read files. The interpreter does not wait for them when it ends."""

    def __init__(self) -> None:
        self._count = 0

    async def read(self, function: Callable[[], T]) -> T:
        """Return what `function` returns, or raise its exception. Raises
        HTTPServiceUnavailable if the call takes too long.
        """
        if self._count >= MAX_READERS:
            raise _unavailable(f"{MAX_READERS} other requests wait for files")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def finish(result: T | None, error: BaseException | None) -> None:
            self._count -= 1
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def work() -> None:
            result: T | None = None
            error: BaseException | None = None
            try:
                result = function()
            except Exception as problem:
                error = problem
            with contextlib.suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(finish, result, error)

        self._count += 1
        threading.Thread(target=work, name="reader", daemon=True).start()
        try:
            async with asyncio.timeout(READ_S):
                return await done
        except TimeoutError:
            raise _unavailable(f"files were not read within {READ_S:g} s") from None


def _unavailable(reason: str) -> web.HTTPServiceUnavailable:
    return web.HTTPServiceUnavailable(reason=f"{reason}: a file system may hang")


class _Routes:
    def __init__(self, runs: Runs) -> None:
        self._runs, self._read = runs, _Readers().read

    def table(self) -> list[web.RouteDef]:
        return [
            *(web.get(path, self.page) for path in FILES),
            web.get("/api/runs", self.runs),
            web.get("/api/run", self.run),
            web.get("/api/lanes", self.lanes),
            web.get("/api/attempts", self.attempts),
            web.get("/api/attempt", self.attempt),
            web.get("/metrics", self.metrics),
        ]

    async def page(self, request: web.Request) -> web.Response:
        name, kind = FILES[request.path]
        content = resources.files("rollweave_ui.page").joinpath(name).read_bytes()
        return web.Response(body=content, content_type=kind, charset="utf-8")

    async def runs(self, request: web.Request) -> web.Response:
        del request
        return _json(await self._read(self._runs.overview))

    async def run(self, request: web.Request) -> web.Response:
        name = request.query.get("run", "")
        return _json(await self._read(lambda: self._runs.get(name).overview()))

    async def lanes(self, request: web.Request) -> web.Response:
        query = request.query
        name = query.get("run", "")
        start, end = _number(query, "from"), _number(query, "to")
        bins = int(_number(query, "bins", least=1, most=MAX_BINS) or 300)
        return _json(await self._read(lambda: self._runs.get(name).lanes(start, end, bins)))

    async def attempts(self, request: web.Request) -> web.Response:
        query = request.query
        order = query.get("order", "newest")
        if order not in ORDERS:
            raise _WrongInputError(f"order must be one of {', '.join(ORDERS)}, got {order!r:.40}")
        version = _number(query, "version")
        conditions = Query(
            domain=query.get("domain", ""),
            stop=query.get("stop", ""),
            purpose=query.get("purpose", ""),
            text=query.get("text", ""),
            least=_number(query, "least"),
            most=_number(query, "most"),
            version=int(version) if version is not None else None,
        )
        offset = int(_number(query, "offset", least=0) or 0)
        limit = int(_number(query, "limit", least=1, most=PAGE) or PAGE)
        name = query.get("run", "")
        return _json(
            await self._read(
                lambda: self._runs.get(name).attempts(
                    conditions, order=order, offset=offset, limit=limit
                )
            )
        )

    async def attempt(self, request: web.Request) -> web.Response:
        query = request.query
        name, number = query.get("run", ""), _number(query, "attempt", least=0)
        attempt = int(number) if number is not None else None
        return _json(
            await self._read(lambda: self._runs.get(name).attempt(query.get("id", ""), attempt))
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """Answer in Prometheus' text format."""
        del request
        text = await self._read(lambda: prometheus_text(self._runs.figures()))
        return web.Response(text=text, content_type="text/plain")


def _number(
    query: Mapping[str, str], name: str, *, least: float = -math.inf, most: float = math.inf
) -> float | None:
    """Return a parameter as a number; None if it is absent or empty."""
    text = query.get(name, "")
    if not text:
        return None
    value = decimal(text)
    if value is None or not least <= value <= most:
        bounds = f" from {least:g} to {most:g}" if math.isfinite(least) else ""
        raise _WrongInputError(f"{name} must be a number{bounds}, got {text!r:.40}")
    return value


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=as_json(value), status=status, content_type="application/json")
