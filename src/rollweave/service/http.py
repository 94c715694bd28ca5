"""The service's own HTTP API: `/v1`, `/health`, `/metrics`, `/openapi.json`. Decodes
requests, calls `service/service.py`, and encodes the answers.

Invariants: a body is decoded into the structs of `schema/service.py` or refused with
400 and a message that names field, rule and value; every answer is JSON, except metrics
and streams; no request causes a 500. `io/http/guard.py` checks every request first: if
the service has a token, only health checks work without it. Errors are `{"error":
{"type", "message"}}`. Invalid HTTP never gets here: aiohttp answers it with 400 in
plain text.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from aiohttp import web

from rollweave.io.http.bodies import body_of
from rollweave.io.http.exposition import Sample, exposition
from rollweave.schema.address import Hosts
from rollweave.schema.base import EngineId
from rollweave.schema.errors import ConfigError, DiskError
from rollweave.schema.packing import as_json
from rollweave.schema.service import EngineRequest
from rollweave.schema.text import decimal
from rollweave.service.engine_access import check_engine_host
from rollweave.service.errors import (
    ClosedError,
    ConflictError,
    FullError,
    GoneError,
    RefusedError,
    TooLargeError,
    UnknownError,
)
from rollweave.service.openapi import document
from rollweave.service.requests import decode_json, decode_requests
from rollweave.service.service import Service

T = TypeVar("T")

BODY_BYTES = 16 << 20
"""Maximum size of a request's body: thousands of rollouts with long payloads."""

WAIT_S = 60.0
"""Maximum seconds that one request may wait for an answer."""

PAGE_ROLLOUTS = 1000
"""Maximum number of rollouts in one answer."""

PAGE_COMPLETIONS = 1000
"""Maximum number of completions in one answer."""

HEARTBEAT_S = 15.0
"""Maximum seconds between two writes to a stream."""

RETRY_S = 1
"""Seconds after which a refused client may retry (Retry-After)."""

STATUS_OF_ERROR: Mapping[type[Exception], int] = {
    UnknownError: 404,
    ConflictError: 409,
    GoneError: 410,
    TooLargeError: 413,
    FullError: 429,
    ClosedError: 503,
    ConfigError: 400,
    DiskError: 507,
}

TYPE_OF_STATUS: Mapping[int, str] = {
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
"""HTTP status → `type` of an error."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(service: Service, hosts: Hosts) -> web.Application:
    """Make the application, to which other APIs may be added. It must be served behind
    a guard.

    Engines may be registered at `hosts`.
    """
    app = web.Application(middlewares=[_errors])
    app.add_routes(_Routes(service, hosts).table())
    return app


class _Routes:
    def __init__(self, service: Service, hosts: Hosts) -> None:
        self._service, self._hosts = service, hosts
        self._rollouts, self._engines = service.rollouts, service.engines

    def table(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/rollouts", self.submit),
            web.get("/v1/rollouts", self.list_rollouts),
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
        requests, is_batch = await decode_requests(
            await body_of(request, most=BODY_BYTES), max_requests=self._rollouts.queue
        )
        statuses = await self._rollouts.submit(requests)
        return json_response({"rollouts": statuses} if is_batch else statuses[0], status=202)

    async def list_rollouts(self, request: web.Request) -> web.Response:
        after = int(_number(request, "after", default=0, most=2**53))
        limit = int(_number(request, "limit", default=100, least=1, most=PAGE_ROLLOUTS))
        unfinished = _flag(request, "unfinished", default=False)
        statuses, last = await self._rollouts.page(after, limit=limit, unfinished=unfinished)
        return json_response({"rollouts": statuses, "next": last})

    async def status(self, request: web.Request) -> web.Response:
        seconds = _number(request, "wait", default=0.0, most=WAIT_S)
        return json_response(await self._rollouts.wait(request.match_info["id"], seconds))

    async def cancel(self, request: web.Request) -> web.Response:
        return json_response(self._rollouts.cancel(request.match_info["id"]), status=202)

    async def completions(self, request: web.Request) -> web.Response:
        after = int(_number(request, "after", default=0, most=2**53))
        limit = int(_number(request, "limit", default=100, least=1, most=PAGE_COMPLETIONS))
        seconds = _number(request, "wait", default=0.0, most=WAIT_S)
        completions = await self._rollouts.completions(
            after, limit=limit, seconds=seconds, rollout=request.query.get("rollout")
        )
        last = completions[-1].number if completions else after
        return json_response({"completions": completions, "next": last})

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Stream completions as server-sent events, from `Last-Event-ID` on, or from
        now.

        With `rollout`, stream that rollout's completions from the first one, until all
        its members are done.
        """
        last_id = request.headers.get("Last-Event-ID", request.query.get("after", ""))
        rollout = request.query.get("rollout")
        if last_id:
            after = _integer("Last-Event-ID", last_id)
        else:
            after = self._rollouts.last_completion() if rollout is None else 0
        if rollout is not None:
            # refuse an unknown rollout before the stream begins
            self._rollouts.status(rollout, results=False)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        await response.prepare(request)
        while not self._rollouts.ended:
            try:
                completions = await self._rollouts.completions(
                    after, limit=PAGE_COMPLETIONS, seconds=HEARTBEAT_S, rollout=rollout
                )
                if (
                    not completions
                    and rollout is not None
                    and self._rollouts.status(rollout, results=False).state == "done"
                ):
                    break
            except UnknownError:  # its results are no longer kept
                break
            lines = [b"id: %d\ndata: %s\n\n" % (one.number, as_json(one)) for one in completions]
            try:
                await response.write(b"".join(lines) or b": alive\n\n")
            except ConnectionResetError:
                break
            after = completions[-1].number if completions else after
        return response

    async def handlers(self, request: web.Request) -> web.Response:
        del request
        return json_response({"handlers": self._rollouts.handlers()})

    # Engines.

    async def engines(self, request: web.Request) -> web.Response:
        del request
        return json_response({"engines": self._engines.statuses()})

    async def register(self, request: web.Request) -> web.Response:
        registration = decode_body(await body_of(request, most=BODY_BYTES), EngineRequest)
        await check_engine_host(self._hosts, registration.address)
        return json_response(self._engines.register(registration), status=202)

    async def withdraw(self, request: web.Request) -> web.Response:
        drain, force = _flag(request, "drain", default=True), _flag(request, "force", default=False)
        self._engines.withdraw(EngineId(request.match_info["id"]), drain=drain, force=force)
        return json_response({"engines": self._engines.statuses()}, status=202)

    # The service.

    async def health(self, request: web.Request) -> web.Response:
        """Answer that the service is alive, with its status.

        While no engine serves, requests are accepted and wait.
        """
        del request
        return json_response(self._health())

    async def ready(self, request: web.Request) -> web.Response:
        """Answer 200 if rollouts that are submitted now would begin, else 503."""
        del request
        return json_response(self._health(), status=200 if self._service.health == "ok" else 503)

    def _health(self) -> dict[str, Any]:
        return {
            "status": self._service.health,
            "reason": self._engines.waits_for(),
            **self._service.counts(),
        }

    async def metrics(self, request: web.Request) -> web.Response:
        """Answer in Prometheus' text format."""
        del request
        counts = dict(self._service.counts())
        samples = [Sample("gauge", "engines", counts.pop("engines"))]
        totals = [
            Sample("counter", f"{name}_total", counts.pop(name))
            for name in ("submitted", "output_tokens")
        ]
        samples += [
            Sample("gauge", "rollouts", count, {"stage": stage}) for stage, count in counts.items()
        ]
        samples += totals
        samples += [
            Sample("counter", "delivered_total", count, {"stop_reason": reason})
            for reason, count in self._service.delivered_by_reason().items()
        ]
        samples += [
            Sample("gauge", "engine_running", one.running, {"engine": str(one.id)})
            for one in self._engines.statuses()
        ]
        return web.Response(text=exposition(samples), content_type="text/plain")

    async def openapi(self, request: web.Request) -> web.Response:
        del request
        return json_response(document())


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn errors into JSON answers with their status."""
    try:
        return await handler(request)
    except (RefusedError, ConfigError, DiskError) as error:
        status = next(code for kind, code in STATUS_OF_ERROR.items() if isinstance(error, kind))
        return _error_response(status, str(error))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _error_response(
            error.status,
            _rule(request, error),
            headers={
                name: error.headers[name]
                for name in ("Allow", "WWW-Authenticate")
                if name in error.headers
            },
        )


def _rule(request: web.Request, error: web.HTTPException) -> str:
    """Return the rule that a request broke before it reached a handler of ours."""
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


def _error_response(
    status: int, message: str, *, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return an error in the form of this API."""
    more = {"Retry-After": str(RETRY_S)} if status in (429, 503, 507) else {}
    body = {"error": {"type": TYPE_OF_STATUS.get(status, "refused"), "message": message}}
    return json_response(body, status=status, headers={**more, **(headers or {})})


def json_response(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return an answer with `value` as JSON."""
    body = as_json(value)
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def decode_body(
    body: bytes, kind: type[T], *, rule: str = "JSON as described in /openapi.json"
) -> T:
    """Decode a body as one of `kind`. Raises ConfigError if it is not one; the message
    says that it must be `rule`.
    """
    return decode_json(body, kind, what="the body", rule=rule)


def _number(
    request: web.Request, name: str, *, default: float, least: float = 0.0, most: float
) -> float:
    text = request.query.get(name)
    if text is None:
        return default
    value = decimal(text)
    if value is None or not least <= value <= most:
        raise ConfigError(f"{name} must be a number from {least:g} to {most:g}, got {text!r:.40}")
    return value


def _flag(request: web.Request, name: str, *, default: bool) -> bool:
    text = request.query.get(name, "true" if default else "false")
    if text not in ("true", "false"):
        raise ConfigError(f"{name} must be true or false, got {text!r:.40}")
    return text == "true"


def _integer(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 15:
        raise ConfigError(f"{name} must be a whole number, got {text!r:.40}")
    return int(text)
