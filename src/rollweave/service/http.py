"""The service's own API: `/v1`, `/health`, `/metrics`, `/openapi.json`. Decodes, asks `service/service.py`, encodes.

Invariants: a body is decoded into the nouns of `schema/service.py` or refused with 400, which names field, rule and value;
every answer is JSON (but metrics and streams); no request of anybody's gives 500. With a token every path but `/health` wants
it. Errors are `{"error": {"type", "message"}}`. What is no HTTP never comes here: aiohttp answers it with 400 in plain text.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from rollweave.backends.listening import listening
from rollweave.schema.base import EngineId
from rollweave.schema.errors import ConfigError, DiskError
from rollweave.schema.service import Batch, EngineRequest, RolloutRequest
from rollweave.service.openapi import document
from rollweave.service.refusals import ClosedError, ConflictError, FullError, GoneError, RefusedError, UnknownError
from rollweave.service.service import Service

T = TypeVar("T")

BODY_BYTES = 16 << 20
"""Of a request: thousands of rollouts with long payloads."""

WAIT_S = 60.0
"""Longest that an answer may be waited for, in one request."""

COMPLETIONS = 1000
"""Of one answer, at most."""

HEARTBEAT_S = 15.0
"""Between two signs of life of a stream."""

RETRY_S = 1
"""Seconds after which somebody who was refused may ask again."""

STATUS: Mapping[type[Exception], int] = {
    UnknownError: 404,
    ConflictError: 409,
    GoneError: 410,
    FullError: 429,
    ClosedError: 503,
    ConfigError: 400,
    DiskError: 507,
}

KIND: Mapping[int, str] = {
    400: "invalid",
    401: "unauthorized",
    404: "unknown",
    405: "method",
    409: "conflict",
    410: "gone",
    413: "too_large",
    429: "full",
    503: "closed",
    507: "disk",
}
"""`type` of an error."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build(service: Service, *, token: str | None) -> web.Application:
    """The application; other doors may be added to it."""
    app = web.Application(client_max_size=BODY_BYTES, middlewares=[_errors, _authorized(token)])
    app.add_routes(_Routes(service).table())
    return app


class _Routes:
    def __init__(self, service: Service) -> None:
        self._service = service

    def table(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/rollouts", self.submit),
            web.get("/v1/rollouts/{id}", self.status),
            web.delete("/v1/rollouts/{id}", self.cancel),
            web.get("/v1/completions", self.completions),
            web.get("/v1/events", self.events),
            web.get("/v1/handlers", self.handlers),
            web.get("/v1/engines", self.engines),
            web.post("/v1/engines", self.register),
            web.delete("/v1/engines/{id}", self.withdraw),
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
            web.get("/openapi.json", self.openapi),
        ]

    # Rollouts.

    async def submit(self, request: web.Request) -> web.Response:
        body = await request.read()
        asked = decode(body, object)  # which of both, the keys say
        several = isinstance(asked, dict) and "rollouts" in asked
        requests = decode(body, Batch).rollouts if several else (decode(body, RolloutRequest),)
        found = await self._service.submit(requests)
        return json_answer({"rollouts": found} if several else found[0], status=202)

    async def status(self, request: web.Request) -> web.Response:
        seconds = _number(request, "wait", default=0.0, most=WAIT_S)
        return json_answer(await self._service.wait(request.match_info["id"], seconds))

    async def cancel(self, request: web.Request) -> web.Response:
        return json_answer(self._service.cancel(request.match_info["id"]), status=202)

    async def completions(self, request: web.Request) -> web.Response:
        after = int(_number(request, "after", default=0, most=2**53))
        limit = int(_number(request, "limit", default=100, least=1, most=COMPLETIONS))
        seconds = _number(request, "wait", default=0.0, most=WAIT_S)
        found = await self._service.completed(after, limit=limit, seconds=seconds)
        return json_answer({"completions": found, "next": found[-1].number if found else after})

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events: a completion each, from `Last-Event-ID` on, or from now."""
        said = request.headers.get("Last-Event-ID", request.query.get("after", ""))
        after = _whole("Last-Event-ID", said) if said else self._service.last_completion()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        while not self._service.ended:
            found = await self._service.completed(after, limit=COMPLETIONS, seconds=HEARTBEAT_S)
            lines = [b"id: %d\ndata: %s\n\n" % (one.number, msgspec.json.encode(one)) for one in found]
            try:
                await response.write(b"".join(lines) or b": alive\n\n")
            except ConnectionResetError:
                break
            after = found[-1].number if found else after
        return response

    async def handlers(self, request: web.Request) -> web.Response:
        del request
        return json_answer({"handlers": self._service.handlers()})

    # Engines.

    async def engines(self, request: web.Request) -> web.Response:
        del request
        return json_answer({"engines": self._service.engines()})

    async def register(self, request: web.Request) -> web.Response:
        return json_answer(self._service.register(decode(await request.read(), EngineRequest)), status=202)

    async def withdraw(self, request: web.Request) -> web.Response:
        drain = request.query.get("drain", "true")
        if drain not in ("true", "false"):
            raise ConfigError(f"drain must be true or false, got {drain!r:.40}")
        self._service.withdraw(EngineId(request.match_info["id"]), drain=drain == "true")
        return json_answer({"engines": self._service.engines()}, status=202)

    # The service.

    async def health(self, request: web.Request) -> web.Response:
        del request
        return json_answer({"status": "closing" if self._service.closed else "ok", **self._service.counts()})

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus' text format."""
        del request
        counts, lines = dict(self._service.counts()), []
        lines += ["# TYPE rollweave_engines gauge", f"rollweave_engines {counts.pop('engines')}"]
        totals = {"submitted": counts.pop("submitted"), "output_tokens": counts.pop("output_tokens")}
        lines += ["# TYPE rollweave_rollouts gauge"]
        lines += [f'rollweave_rollouts{{stage="{stage}"}} {count}' for stage, count in counts.items()]
        for name, total in totals.items():
            lines += [f"# TYPE rollweave_{name}_total counter", f"rollweave_{name}_total {total}"]
        lines += ["# TYPE rollweave_delivered_total counter"]
        delivered = self._service.delivered_by_reason()
        lines += [f'rollweave_delivered_total{{stop_reason="{reason}"}} {count}' for reason, count in delivered.items()]
        lines += ["# TYPE rollweave_engine_running gauge"]
        lines += [f'rollweave_engine_running{{engine="{one.id}"}} {one.running}' for one in self._service.engines()]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")

    async def openapi(self, request: web.Request) -> web.Response:
        del request
        return json_answer(document())


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What was refused, as JSON with its status."""
    try:
        return await handler(request)
    except (RefusedError, ConfigError, DiskError) as error:
        return problem(status_of(error), str(error))
    except web.RequestPayloadError as error:  # neither compressed nor cut into chunks as its headers say
        return problem(400, f"the body must be whole: {error}")
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return problem(
            error.status, _rule(request, error), headers={"Allow": allow} if (allow := error.headers.get("Allow")) else {}
        )


def _rule(request: web.Request, error: web.HTTPException) -> str:
    """What a request must be that was refused before one of our handlers saw it."""
    match error.status:
        case 404:
            return f"the path must be one that /openapi.json names, got {request.path!r:.100}"
        case 405:
            return f"the method must be {error.headers.get('Allow')} for {request.path!r:.100}, got {request.method:.20}"
        case 413:
            return f"the body must have at most {BODY_BYTES} bytes, got more"
        case _:
            return error.reason


def _authorized(token: str | None) -> Middleware:
    wanted = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        said = request.headers.get("Authorization", "").encode(errors="replace")
        if token is not None and request.path != "/health" and not hmac.compare_digest(said, wanted):
            return problem(401, "the request must carry the service's token", headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return check


def problem(status: int, message: str, *, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error as this API says it."""
    more = {"Retry-After": str(RETRY_S)} if status in (429, 503, 507) else {}
    body = {"error": {"type": KIND.get(status, "refused"), "message": message}}
    return json_answer(body, status=status, headers={**more, **(headers or {})})


def status_of(error: Exception) -> int:
    """Of one of the errors in `STATUS`."""
    return next(status for kind, status in STATUS.items() if isinstance(error, kind))


def json_answer(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """`value` as JSON."""
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def decode(body: bytes, kind: type[T], *, rule: str = "JSON as /openapi.json says") -> T:
    """Raises ConfigError for a body that is not one of `kind`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the body must be {rule}: {error}") from error


def _number(request: web.Request, name: str, *, default: float, least: float = 0.0, most: float) -> float:
    said = request.query.get(name)
    if said is None:
        return default
    try:
        value = float(said)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise ConfigError(f"{name} must be a number from {least:g} to {most:g}, got {said!r:.40}")
    return value


def _whole(name: str, said: str) -> int:
    if not said.isascii() or not said.isdecimal() or len(said) > 15:
        raise ConfigError(f"{name} must be a whole number, got {said!r:.40}")
    return int(said)


def _busy(message: str) -> bytes:
    """A whole answer, to be sent where no request is read."""
    body = msgspec.json.encode({"error": {"type": "busy", "message": message}})
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nRetry-After: {RETRY_S}\r\nConnection: close"
    return b"HTTP/1.1 503 Service Unavailable\r\n" + head.encode() + b"\r\n\r\n" + body


async def serve(
    app: web.Application, host: str, port: int, *, most: int, stopped: asyncio.Event, ready: Callable[[str], None]
) -> None:
    """Listen until `stopped`, with at most so many connections; `ready` gets the address. Raises OSError: the port is taken."""
    refusal = _busy(f"at most {most} connections may be open")
    async with listening(app, host, port, shutdown_s=5.0, most=most, refusal=refusal) as address:
        ready(address)
        await stopped.wait()
