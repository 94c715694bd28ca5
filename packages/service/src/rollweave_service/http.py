"""The service's own HTTP API: `/v1`, `/health`, `/ready`, `/metrics`, `/openapi.json`.
Its handlers call `service.py`.

Invariants: every answer is JSON, except metrics and streams. `io/http/guard.py` checks
every request first: if the service has a token, only health checks work without it.
Errors are `{"error": {"type", "message"}}`. Invalid HTTP never gets here: aiohttp
answers it with 400 in plain text.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from rollweave.io.http.exposition import Sample, exposition
from rollweave.schema.address import Hosts
from rollweave.schema.base import EngineId, Struct, as_json
from rollweave_service import rollouts
from rollweave_service.base import UnknownError
from rollweave_service.engines import check_engine_host
from rollweave_service.messages import (
    Batch,
    Completions,
    EngineRequest,
    EngineStatus,
    EngineStatuses,
    Handlers,
    Health,
    RolloutPage,
    RolloutRequest,
    RolloutStatus,
    RolloutStatuses,
)
from rollweave_service.routes import (
    TEMPORARY,
    Route,
    decode_requests,
    document,
    errors,
    json_response,
)
from rollweave_service.service import Service

PAGE = 1000
"""Maximum number of rollouts, or of completions, in one answer."""

STAGES = (
    *("queued", "init", "run_queued", "run", "eval_queued", "eval", "closing"),
    *("turns_waiting", "turns_running"),
)
"""Values of the label `stage` of the metric `rollouts`."""

HEARTBEAT_S = 15.0
"""Maximum seconds between two writes to a stream."""

After = Annotated[
    int,
    Meta(ge=0, le=2**53, description="`next` of the previous page; 0 for the first one."),
]
Limit = Annotated[int, Meta(ge=1, le=PAGE, description="Maximum number of entries in one answer.")]
Wait = Annotated[float, Meta(ge=0, le=60, description="Maximum seconds to wait for a result.")]
OfRollout = Annotated[str, Meta(description="Id of a rollout: only its completions are returned.")]


class ListQuery(Struct, frozen=True, kw_only=True):
    """Parameters of a list of rollouts."""

    after: After = 0
    limit: Limit = 100
    unfinished: bool = False


class StatusQuery(Struct, frozen=True, kw_only=True):
    """Parameters of a rollout's status."""

    wait: Wait = 0.0


class CompletionsQuery(Struct, frozen=True, kw_only=True):
    """Parameters of a list of completions."""

    after: After = 0
    limit: Limit = 100
    wait: Wait = 0.0
    rollout: OfRollout | None = None


class EventsQuery(Struct, frozen=True, kw_only=True):
    """Parameters of a stream of completions. The header is the same as `after`."""

    last_event_id: After | None = msgspec.field(default=None, name="Last-Event-ID")
    after: After | None = None
    rollout: OfRollout | None = None


class WithdrawQuery(Struct, frozen=True, kw_only=True):
    """Parameters of the withdrawal of an engine: after its turns are done, and also if
    it is the last one that serves.
    """

    drain: bool = True
    force: bool = False


def make_app(service: Service, hosts: Hosts, others: Sequence[Route] = ()) -> web.Application:
    """Make the application with the routes of this API, and of `others`. It must be
    served behind a guard. Engines may be registered at `hosts`.
    """
    app = web.Application(middlewares=[errors])
    app.add_routes([route.definition() for route in Api(service, hosts, others).routes])
    return app


class Api:
    """The service's own API, whose document describes the routes of `others`, too."""

    def __init__(self, service: Service, hosts: Hosts, others: Sequence[Route]) -> None:
        self._service, self._hosts = service, hosts
        self._rollouts, self._engines = service.rollouts, service.engines
        self.routes = (*self._table(), *others)

    def _table(self) -> tuple[Route, ...]:
        rollout, engine, events = "/v1/rollouts/{id}", "/v1/engines/{id}", "text/event-stream"
        refusals = (400, 404, 409, 413, *TEMPORARY)
        requests = RolloutRequest | Batch
        return (
            Route("POST", "/v1/rollouts", self.submit, 202, errors=refusals, body=requests),
            Route("GET", "/v1/rollouts", self.list_rollouts, errors=(400,)),
            Route("GET", rollout, self.status, errors=(400, 404, 410)),
            Route("DELETE", rollout, self.cancel, 202, errors=(404,)),
            Route("GET", "/v1/completions", self.completions, errors=(400, 404)),
            Route("GET", "/v1/events", self.events, errors=(400, 404), answer=str, kind=events),
            Route("GET", "/v1/handlers", self.handlers),
            Route("GET", "/v1/engines", self.engines),
            Route("POST", "/v1/engines", self.register, 202, errors=(400, *TEMPORARY)),
            Route("DELETE", engine, self.withdraw, 202, errors=(400, 404, 409, 507)),
            Route("GET", "/health", self.health),
            Route("GET", "/ready", self.ready, errors=(503,), answer=Health, refusal=Health),
            Route("GET", "/metrics", self.metrics, answer=str, kind="text/plain"),
            Route("GET", "/openapi.json", self.openapi),
        )

    # Rollouts.

    async def submit(self, body: bytes) -> RolloutStatus | RolloutStatuses:
        """Submit rollouts."""
        requests, is_batch = await decode_requests(body, max_requests=rollouts.QUEUE)
        statuses = await self._rollouts.submit(requests)
        return RolloutStatuses(rollouts=tuple(statuses)) if is_batch else statuses[0]

    async def list_rollouts(self, query: ListQuery) -> RolloutPage:
        """List rollouts, without results."""
        return await self._rollouts.page(
            query.after, limit=query.limit, unfinished=query.unfinished
        )

    async def status(self, id: str, query: StatusQuery) -> RolloutStatus:
        """Get a rollout's status and results."""
        return await self._rollouts.wait(id, query.wait)

    async def cancel(self, id: str) -> RolloutStatus:
        """Cancel a rollout."""
        return self._rollouts.cancel(id)

    async def completions(self, query: CompletionsQuery) -> Completions:
        """List completions (long poll)."""
        return await self._rollouts.completions(
            query.after, limit=query.limit, seconds=query.wait, rollout=query.rollout
        )

    async def events(self, request: web.Request, query: EventsQuery) -> web.StreamResponse:
        """Stream completions as server-sent events.

        They begin after `Last-Event-ID`, or now. With `rollout`, they are that
        rollout's completions from the first one, until all its members are done.
        """
        rollout = query.rollout
        after = query.after if query.last_event_id is None else query.last_event_id
        if after is None:
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
                page = await self._rollouts.completions(
                    after, limit=PAGE, seconds=HEARTBEAT_S, rollout=rollout
                )
                if (
                    not page.completions
                    and rollout is not None
                    and self._rollouts.status(rollout, results=False).state == "done"
                ):
                    break
            except UnknownError:  # its results are no longer kept
                break
            lines = [
                b"id: %d\ndata: %s\n\n" % (one.number, as_json(one)) for one in page.completions
            ]
            try:
                await response.write(b"".join(lines) or b": alive\n\n")
            except ConnectionResetError:
                break
            after = page.next
        return response

    async def handlers(self) -> Handlers:
        """List the task domains for which rollouts can be requested."""
        return Handlers(handlers=tuple(self._rollouts.environments()))

    # Engines.

    async def engines(self) -> EngineStatuses:
        """List engines."""
        return EngineStatuses(engines=tuple(self._engines.statuses()))

    async def register(self, body: EngineRequest) -> EngineStatus:
        """Register an engine."""
        await check_engine_host(self._hosts, body.address)
        return self._engines.register(body)

    async def withdraw(self, id: str, query: WithdrawQuery) -> EngineStatuses:
        """Withdraw an engine."""
        self._engines.withdraw(EngineId(id), drain=query.drain, force=query.force)
        return await self.engines()

    # The service.

    async def health(self) -> Health:
        """Check whether the service is alive.

        While no engine serves, requests are accepted and wait.
        """
        return self._service.health()

    async def ready(self) -> web.Response:
        """Check whether rollouts can begin now."""
        health = self._service.health()
        return json_response(health, status=200 if health.status == "ok" else 503)

    async def metrics(self) -> web.Response:
        """Get counts for Prometheus."""
        health = self._service.health()
        samples = [Sample("gauge", "engines", health.engines)]
        samples += [
            Sample("gauge", "rollouts", getattr(health, stage), {"stage": stage})
            for stage in STAGES
        ]
        samples += [
            Sample("counter", f"{name}_total", getattr(health, name))
            for name in ("submitted", "output_tokens")
        ]
        samples += [
            Sample("counter", "delivered_total", count, {"stop_reason": reason})
            for reason, count in self._service.world.state.counters.delivered.items()
        ]
        samples += [
            Sample("gauge", "engine_running", one.running, {"engine": str(one.id)})
            for one in self._engines.statuses()
        ]
        return web.Response(text=exposition(samples), content_type="text/plain")

    async def openapi(self) -> dict[str, Any]:
        """Get this document."""
        return document(self.routes)
