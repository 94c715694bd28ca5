"""The service's API as an OpenAPI 3.1 document, from the nouns that its routes decode and encode."""

from typing import Any

import msgspec

from rollweave.schema.service import (
    Batch,
    Completion,
    EngineRequest,
    EngineStatus,
    RolloutRequest,
    RolloutStatus,
)

TEXT = {"type": "string"}
_REF = "#/components/schemas/{name}"
NOUNS = (RolloutRequest, Batch, RolloutStatus, Completion, EngineRequest, EngineStatus)


def document() -> dict[str, Any]:
    """Paths, bodies and answers of `/v1`."""
    _, components = msgspec.json.schema_components(NOUNS, ref_template=_REF)
    components = {
        **components,
        "Error": _fields({"error": _fields({"type": {"type": "string"}, "message": {"type": "string"}})}),
        "Health": {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}},
    }
    one = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    wait = _query("wait", 0.0, 60.0, "Seconds to wait for an answer.")
    after = _query("after", 0, 2**53, "Number of the last completion that is known.")
    limit = _query("limit", 1, 1000, "Completions of one answer.")
    drain = {"name": "drain", "in": "query", "schema": {"type": "string", "enum": ["true", "false"]}}
    completions = _fields({"completions": _list("Completion"), "next": {"type": "integer"}})
    body = {"oneOf": [_ref("RolloutRequest"), _ref("Batch")]}
    either = {"oneOf": [_ref("RolloutStatus"), _fields({"rollouts": _list("RolloutStatus")})]}
    handlers, engines = _fields({"handlers": {"type": "array", "items": TEXT}}), _fields({"engines": _list("EngineStatus")})
    many = (400, 404, 409, 413, 429, 503, 507)
    rollout, engine = _ref("RolloutStatus"), _ref("EngineRequest")
    paths = {
        "/v1/rollouts": {"post": _operation("submit", "Ask for rollouts", 202, either, body=body, errors=many)},
        "/v1/rollouts/{id}": {
            "get": _operation("status", "Status, and results", 200, rollout, parameters=[one, wait], errors=(400, 404, 410)),
            "delete": _operation("cancel", "Cancel", 202, rollout, parameters=[one], errors=(404,)),
        },
        "/v1/completions": {
            "get": _operation(
                "completions", "What is done (long poll)", 200, completions, parameters=[after, limit, wait], errors=(400,)
            )
        },
        "/v1/handlers": {"get": _operation("handlers", "What can be asked for", 200, handlers)},
        "/v1/engines": {
            "get": _operation("engines", "Engines", 200, engines),
            "post": _operation("register", "Register one", 202, _ref("EngineStatus"), body=engine, errors=(400, 413, 503, 507)),
        },
        "/v1/engines/{id}": {
            "delete": _operation("withdraw", "Do without it", 202, engines, parameters=[one, drain], errors=(400, 404, 507))
        },
        "/health": {"get": _operation("health", "Is it there?", 200, _ref("Health"))},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rollweave: rollouts as a service", "version": "1"},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def _operation(
    name: str,
    summary: str,
    status: int,
    answer: dict[str, Any],
    *,
    body: dict[str, Any] | None = None,
    parameters: list[dict[str, Any]] | None = None,
    errors: tuple[int, ...] = (),
) -> dict[str, Any]:
    responses = {str(status): _content(summary, answer)}
    responses |= {str(error): _content("Refused", _ref("Error")) for error in (*errors, 401)}
    made: dict[str, Any] = {"summary": summary, "operationId": name, "responses": responses, "parameters": parameters or []}
    if body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return made


def _content(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


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
