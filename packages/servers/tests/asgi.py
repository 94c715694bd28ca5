"""The guards of inference servers, which are ASGI applications, before servers of
aiohttp.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Send = Callable[[dict[str, Any]], Awaitable[None]]


async def relayed(guard: Any, request: web.Request, app: Any) -> web.StreamResponse:
    """Send what a guard before `app` answers to a request, part by part."""
    response = web.StreamResponse()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            response.set_status(message["status"])
            await response.prepare(request)
        else:
            await response.write(message["body"])

    await _called(guard, request, app, send)
    await response.write_eof()
    return response


async def guarded(
    guard: Any, request: web.Request, app: Any, /, **more: Any
) -> tuple[web.Response | None, dict[str, Any]]:
    """Return what a guard before `app` answers to a request (None if nothing was sent),
    and the scope that it was called with, to which `more` was added.
    """
    status, parts = 0, list[bytes]()

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    scope = await _called(guard, request, app, send, **more)
    return web.Response(status=status, body=b"".join(parts)) if status else None, scope


async def _called(
    guard: Any, request: web.Request, app: Any, send: Send, /, **more: Any
) -> dict[str, Any]:
    """Call a guard with a request, and return the scope of the call."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": await request.read()}

    headers = [(key.lower(), value) for key, value in request.raw_headers]
    scope = {"type": "http", "path": request.path, "app": app, "headers": headers, **more}
    await guard(scope, receive, send)
    return scope
