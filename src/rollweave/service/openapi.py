"""The service's API as an OpenAPI 3.1 document, made of the structs that its routes
decode and encode.
"""

from typing import Any

import msgspec

from rollweave.schema.prorl import Address, JobId, Process
from rollweave.schema.service import (
    Batch,
    Completion,
    EngineRequest,
    EngineStatus,
    RolloutRequest,
    RolloutStatus,
)

TEXT = {"type": "string"}
INTEGER = {"type": "integer"}
ANYTHING = {"type": "object"}
_REF = "#/components/schemas/{name}"
STRUCTS = (
    RolloutRequest,
    Batch,
    RolloutStatus,
    Completion,
    EngineRequest,
    EngineStatus,
    Process,
    Address,
    JobId,
)

GUARDED = (401, 403, 421)
"""Statuses with which the guard may refuse any request (`io/http/guard.py`); with a
body, also 415.
"""

COMMON = (429, 503, 507)
"""Statuses of temporary refusals of a request with a body: too many requests, the
service is ending, the disk is full.
"""


def document() -> dict[str, Any]:
    """Describe every path that the service answers, with its bodies and answers."""
    _, components = msgspec.json.schema_components(STRUCTS, ref_template=_REF)
    components = {
        **components,
        "Error": _fields({"error": _fields({"type": TEXT, "message": TEXT})}),
        "Detail": _fields({"detail": TEXT}),
        "Health": _fields(
            {"status": {"type": "string", "enum": ["ok", "no engine", "closing"]}, "reason": TEXT}
        ),
        "Done": _fields({"status": TEXT}),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rollweave: rollouts as a service", "version": "1"},
        "paths": {**_rollouts(), **_engines(), **_service(), **_prorl()},
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _rollouts() -> dict[str, Any]:
    wait = _query("wait", 0.0, 60.0, "Maximum seconds to wait for a result.")
    after = _query("after", 0, 2**53, "Number of the last completion that the client knows.")
    limit = _query("limit", 1, 1000, "Maximum number of entries in one answer.")
    of_one = {
        "name": "rollout",
        "in": "query",
        "schema": TEXT,
        "description": "Id of a rollout; only its completions are returned.",
    }
    since = _query("after", 0, 2**53, "`next` of the previous page.")
    last = {
        "name": "Last-Event-ID",
        "in": "header",
        "schema": INTEGER,
        "description": "Same as `after`.",
    }
    completions = _fields({"completions": _list("Completion"), "next": INTEGER})
    body = {"oneOf": [_ref("RolloutRequest"), _ref("Batch")]}
    either = {"oneOf": [_ref("RolloutStatus"), _fields({"rollouts": _list("RolloutStatus")})]}
    rollout, page = (
        _ref("RolloutStatus"),
        _fields({"rollouts": _list("RolloutStatus"), "next": INTEGER}),
    )
    events = _operation(
        "events",
        "Stream completions as server-sent events",
        200,
        parameters=[last, after, of_one],
        errors=(400, 404),
    )
    events["responses"]["200"] = _content(
        "One completion in each event", TEXT, kind="text/event-stream"
    )
    many = (400, 404, 409, 413, *COMMON)
    return {
        "/v1/rollouts": {
            "get": _operation(
                "list",
                "List rollouts, without results",
                200,
                page,
                parameters=[since, limit, _flag("unfinished")],
                errors=(400,),
            ),
            "post": _operation("submit", "Submit rollouts", 202, either, body=body, errors=many),
        },
        "/v1/rollouts/{id}": {
            "get": _operation(
                "status",
                "Get a rollout's status and results",
                200,
                rollout,
                parameters=[ONE, wait],
                errors=(400, 404, 410),
            ),
            "delete": _operation(
                "cancel", "Cancel a rollout", 202, rollout, parameters=[ONE], errors=(404,)
            ),
        },
        "/v1/completions": {
            "get": _operation(
                "completions",
                "List completions (long poll)",
                200,
                completions,
                parameters=[after, limit, wait, of_one],
                errors=(400, 404),
            )
        },
        "/v1/events": {"get": events},
        "/v1/handlers": {
            "get": _operation(
                "handlers",
                "List the task domains for which rollouts can be requested",
                200,
                _fields({"handlers": {"type": "array", "items": TEXT}}),
            )
        },
    }


def _engines() -> dict[str, Any]:
    engines, body = _fields({"engines": _list("EngineStatus")}), _ref("EngineRequest")
    refused = (400, 413, *COMMON[1:])
    more = [ONE, _flag("drain"), _flag("force")]
    return {
        "/v1/engines": {
            "get": _operation("engines", "List engines", 200, engines),
            "post": _operation(
                "register",
                "Register an engine",
                202,
                _ref("EngineStatus"),
                body=body,
                errors=refused,
            ),
        },
        "/v1/engines/{id}": {
            "delete": _operation(
                "withdraw",
                "Withdraw an engine",
                202,
                engines,
                parameters=more,
                errors=(400, 404, 409, 507),
            )
        },
    }


def _service() -> dict[str, Any]:
    metrics = _operation("metrics", "Get counts for Prometheus", 200)
    metrics["responses"]["200"] = _content("Prometheus' text format", TEXT, kind="text/plain")
    ready = _operation("ready", "Check whether rollouts can begin now", 200, _ref("Health"))
    ready["responses"]["503"] = _content("Rollouts have to wait", _ref("Health"))
    health = _operation("health", "Check whether the service is alive", 200, _ref("Health"))
    for probe in (health, ready):  # probes send no token
        probe["security"] = [{}]
        del probe["responses"]["401"]
    return {
        "/health": {"get": health},
        "/ready": {"get": ready},
        "/metrics": {"get": metrics},
        "/openapi.json": {"get": _operation("openapi", "Get this document", 200, ANYTHING)},
    }


def _prorl() -> dict[str, Any]:
    """Describe ProRL's contract, whose errors are `{"detail"}`; 503 while it is
    stopped.
    """
    done = _ref("Done")
    posts = {
        "/start": _operation("prorl_start", "Accept jobs from now on", 200, done, errors=(400,)),
        "/stop": _operation(
            "prorl_stop", "Cancel all jobs and accept no more", 200, done, errors=(400,)
        ),
        "/add_llm_server": _operation(
            "prorl_add",
            "Register an engine",
            200,
            done,
            body=_ref("Address"),
            errors=(400, *COMMON[1:]),
        ),
        "/clear_llm_server": _operation(
            "prorl_clear", "Withdraw all registered engines", 200, done, errors=(507,)
        ),
        "/cancel": _operation(
            "prorl_cancel", "Cancel a job", 200, done, body=_ref("JobId"), errors=(400, 404)
        ),
        "/process": _operation(
            "prorl_process",
            "Run a job and wait for its result",
            200,
            ANYTHING,
            body=_ref("Process"),
            errors=(400, *COMMON[1:]),
        ),
    }
    paths: dict[str, Any] = {path: {"post": operation} for path, operation in posts.items()}
    paths["/status"] = {"get": _operation("prorl_status", "Count jobs by stage", 200, ANYTHING)}
    for path in paths.values():
        for operation in path.values():
            operation["tags"] = ["ProRL"]
            for status, response in operation["responses"].items():
                if status not in ("200", *map(str, GUARDED), "413", "415"):
                    response["content"] = _content("", _ref("Detail"))["content"]
    return paths


ONE = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _flag(name: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": {"type": "string", "enum": ["true", "false"]}}


def _operation(
    name: str,
    summary: str,
    status: int,
    answer: dict[str, Any] = ANYTHING,
    *,
    body: dict[str, Any] | None = None,
    parameters: list[dict[str, Any]] | None = None,
    errors: tuple[int, ...] = (),
) -> dict[str, Any]:
    responses = {str(status): _content(summary, answer)}
    responses |= {
        str(error): _content("Refused", _ref("Error"))
        for error in (*errors, *GUARDED, *((415,) if body else ()))
    }
    operation: dict[str, Any] = {
        "summary": summary,
        "operationId": name,
        "responses": responses,
        "parameters": parameters or [],
    }
    if body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    return operation


def _content(
    description: str, schema: dict[str, Any], *, kind: str = "application/json"
) -> dict[str, Any]:
    return {"description": description, "content": {kind: {"schema": schema}}}


def _fields(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": _REF.format(name=name)}


def _list(name: str) -> dict[str, Any]:
    return {"type": "array", "items": _ref(name)}


def _query(name: str, least: float, most: float, description: str) -> dict[str, Any]:
    kind = "number" if isinstance(least, float) else "integer"
    schema = {"type": kind, "minimum": least, "maximum": most}
    return {"name": name, "in": "query", "schema": schema, "description": description}
