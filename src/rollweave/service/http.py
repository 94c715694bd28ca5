"""The service's own API: `/v1`, `/health`, `/metrics`, `/openapi.json`. Decodes, asks
`service/service.py`, encodes.

Invariants: a body is decoded into the nouns of `schema/service.py` or refused with 400,
which names field, rule and value; every answer is JSON, except metrics and streams; no
request gives 500. `io/http/guard.py` checks every request first: where there is a
token, only the paths by which programs ask whether the service is up do without it.
Errors are `{"error": {"type", "message"}}`. Invalid HTTP never gets here: aiohttp
answers it with 400 in plain text.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from rollweave.io.http.bodies import body_of
from rollweave.io.http.guard import Guard
from rollweave.io.http.listening import listening
from rollweave.schema.address import Hosts
from rollweave.schema.base import EngineId
from rollweave.schema.errors import ConfigError, DiskError
from rollweave.schema.packing import as_json
from rollweave.schema.service import EngineRequest
from rollweave.schema.text import decimal, decoding_failure
from rollweave.service.asked import asked_for
from rollweave.service.openapi import document
from rollweave.service.reach import must_admit
from rollweave.service.refusals import (
    ClosedError,
    ConflictError,
    FullError,
    GoneError,
    RefusedError,
    TooLargeError,
    UnknownError,
)
from rollweave.service.service import Service

T = TypeVar("T")

BODY_BYTES = 16 << 20
"""Of a request: thousands of rollouts with long payloads."""

WAIT_S = 60.0
"""Longest that an answer may be waited for, in one request."""

LISTED = 1000
"""Maximum number of rollouts in one answer."""

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
    TooLargeError: 413,
    FullError: 429,
    ClosedError: 503,
    ConfigError: 400,
    DiskError: 507,
}

KIND: Mapping[int, str] = {
    400: "invalid",
    401: "unauthorized",
    404: "unknown",
    403: "foreign",
    405: "method",
    408: "late",
    409: "conflict",
    410: "gone",
    413: "too_large",
    415: "media_type",
    417: "expectation",
    421: "foreign",
    429: "full",
    503: "closed",
    507: "disk",
}
"""`type` of an error."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build(service: Service, hosts: Hosts) -> web.Application:
    """Make the application, to which other APIs may be added. Serve it behind a guard.

    Engines may be at `hosts`.
    """
    app = web.Application(middlewares=[_errors])
    app.add_routes(_Routes(service, hosts).table())
    return app


class _Routes:
    def __init__(self, service: Service, hosts: Hosts) -> None:
        self._service, self._hosts = service, hosts

    def table(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/rollouts", self.submit),
            web.get("/v1/rollouts", self.listed),
            web.get("/v1/rollouts/{id}", self.status),
            web.delete("/v1/rollouts/{id}", self.cancel),
            web.get("/v1/completions", self.completions),
            web.get("/v1/events", self.events),
            web.get("/v1/handlers", self.handlers),
            web.get("/v1/engines", self.engines),
            web.post("/v1/engines", self.register),
            web.delete("/v1/engines/{id}", self.withdraw),
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/metrics", self.metrics),
            web.get("/openapi.json", self.openapi),
        ]

    # Rollouts.

    async def submit(self, request: web.Request) -> web.Response:
        requests, several = await asked_for(
            await body_of(request, most=BODY_BYTES), most=self._service.queue
        )
        found = await self._service.submit(requests)
        return json_answer({"rollouts": found} if several else found[0], status=202)

    async def listed(self, request: web.Request) -> web.Response:
        after = int(_number(request, "after", default=0, most=2**53))
        limit = int(_number(request, "limit", default=100, least=1, most=LISTED))
        unfinished = _flag(request, "unfinished", default=False)
        found, last = await self._service.listed(after, limit=limit, unfinished=unfinished)
        return json_answer({"rollouts": found, "next": last})

    async def status(self, request: web.Request) -> web.Response:
        seconds = _number(request, "wait", default=0.0, most=WAIT_S)
        return json_answer(await self._service.wait(request.match_info["id"], seconds))

    async def cancel(self, request: web.Request) -> web.Response:
        return json_answer(self._service.cancel(request.match_info["id"]), status=202)

    async def completions(self, request: web.Request) -> web.Response:
        after = int(_number(request, "after", default=0, most=2**53))
        limit = int(_number(request, "limit", default=100, least=1, most=COMPLETIONS))
        seconds = _number(request, "wait", default=0.0, most=WAIT_S)
        rollout = request.query.get("rollout")
        found = await self._service.completed(after, limit=limit, seconds=seconds, rollout=rollout)
        return json_answer({"completions": found, "next": found[-1].number if found else after})

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Stream completions as server-sent events, from `Last-Event-ID` on, or from
        now.

        With `rollout`, stream that rollout's completions from the first one, until all
        its members are done.
        """
        said, rollout = (
            request.headers.get("Last-Event-ID", request.query.get("after", "")),
            request.query.get("rollout"),
        )
        after = (
            _whole("Last-Event-ID", said)
            if said
            else self._service.last_completion()
            if rollout is None
            else 0
        )
        if rollout is not None:
            # refuse an unknown rollout before the stream begins
            self._service.status(rollout, results=False)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        await response.prepare(request)
        while not self._service.ended:
            try:
                found = await self._service.completed(
                    after, limit=COMPLETIONS, seconds=HEARTBEAT_S, rollout=rollout
                )
                if (
                    not found
                    and rollout is not None
                    and self._service.status(rollout, results=False).state == "done"
                ):
                    break
            except UnknownError:  # its results are no longer kept
                break
            lines = [b"id: %d\ndata: %s\n\n" % (one.number, as_json(one)) for one in found]
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
        asked = decode(await body_of(request, most=BODY_BYTES), EngineRequest)
        await must_admit(self._hosts, asked.address)
        return json_answer(self._service.register(asked), status=202)

    async def withdraw(self, request: web.Request) -> web.Response:
        drain, force = _flag(request, "drain", default=True), _flag(request, "force", default=False)
        self._service.withdraw(EngineId(request.match_info["id"]), drain=drain, force=force)
        return json_answer({"engines": self._service.engines()}, status=202)

    # The service.

    async def health(self, request: web.Request) -> web.Response:
        """Answer that the service is alive, with its status.

        Without an engine that serves, requests are accepted and wait.
        """
        del request
        return json_answer(self._health())

    async def ready(self, request: web.Request) -> web.Response:
        """Answer 200 if rollouts that are submitted now would begin, else 503."""
        del request
        return json_answer(self._health(), status=200 if self._service.health == "ok" else 503)

    def _health(self) -> dict[str, Any]:
        return {
            "status": self._service.health,
            "reason": self._service.waits_for(),
            **self._service.counts(),
        }

    async def metrics(self, request: web.Request) -> web.Response:
        """Prometheus' text format."""
        del request
        counts, lines = dict(self._service.counts()), []
        lines += ["# TYPE rollweave_engines gauge", f"rollweave_engines {counts.pop('engines')}"]
        totals = {
            "submitted": counts.pop("submitted"),
            "output_tokens": counts.pop("output_tokens"),
        }
        lines += ["# TYPE rollweave_rollouts gauge"]
        lines += [
            f'rollweave_rollouts{{stage="{stage}"}} {count}' for stage, count in counts.items()
        ]
        for name, total in totals.items():
            lines += [f"# TYPE rollweave_{name}_total counter", f"rollweave_{name}_total {total}"]
        lines += ["# TYPE rollweave_delivered_total counter"]
        delivered = self._service.delivered_by_reason()
        lines += [
            f'rollweave_delivered_total{{stop_reason="{reason}"}} {count}'
            for reason, count in delivered.items()
        ]
        lines += ["# TYPE rollweave_engine_running gauge"]
        lines += [
            f'rollweave_engine_running{{engine="{one.id}"}} {one.running}'
            for one in self._service.engines()
        ]
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
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return problem(
            error.status,
            _rule(request, error),
            headers={
                name: error.headers[name]
                for name in ("Allow", "WWW-Authenticate")
                if name in error.headers
            },
        )


def _rule(request: web.Request, error: web.HTTPException) -> str:
    """What a request must be that was refused before one of our handlers saw it."""
    match error.status:
        case 404:
            return f"the path must be one that /openapi.json names, got {request.path!r:.100}"
        case 405:
            return (
                f"the method must be {error.headers.get('Allow')} for {request.path!r:.100}, got "
                f"{request.method:.20}"
            )
        case _:
            return error.reason


def problem(status: int, message: str, *, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error as this API says it."""
    more = {"Retry-After": str(RETRY_S)} if status in (429, 503, 507) else {}
    body = {"error": {"type": KIND.get(status, "refused"), "message": message}}
    return json_answer(body, status=status, headers={**more, **(headers or {})})


def status_of(error: Exception) -> int:
    """Of one of the errors in `STATUS`."""
    return next(status for kind, status in STATUS.items() if isinstance(error, kind))


def json_answer(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """`value` as JSON."""
    body = as_json(value)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def decode(body: bytes, kind: type[T], *, rule: str = "JSON as /openapi.json says") -> T:
    """Raises ConfigError for a body that is not one of `kind`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the body must be {rule}: {decoding_failure(body, error)}") from error


def _number(
    request: web.Request, name: str, *, default: float, least: float = 0.0, most: float
) -> float:
    said = request.query.get(name)
    if said is None:
        return default
    value = decimal(said)
    if value is None or not least <= value <= most:
        raise ConfigError(f"{name} must be a number from {least:g} to {most:g}, got {said!r:.40}")
    return value


def _flag(request: web.Request, name: str, *, default: bool) -> bool:
    said = request.query.get(name, "true" if default else "false")
    if said not in ("true", "false"):
        raise ConfigError(f"{name} must be true or false, got {said!r:.40}")
    return said == "true"


def _whole(name: str, said: str) -> int:
    if not said.isascii() or not said.isdecimal() or len(said) > 15:
        raise ConfigError(f"{name} must be a whole number, got {said!r:.40}")
    return int(said)


async def serve(
    app: web.Application,
    host: str,
    port: int,
    *,
    guard: Guard,
    stopped: asyncio.Event,
    ready: Callable[[str], None],
) -> None:
    """Listen until `stopped`; `ready` gets the address.

    Raises OSError: the port is taken.
    """
    async with listening(app, host, port, guard=guard, shutdown_s=5.0) as address:
        ready(address)
        await stopped.wait()
