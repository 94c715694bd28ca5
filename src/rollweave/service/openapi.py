"""The OpenAPI 3.1 document of a service's APIs, made of the table of their routes and
the structs that their handlers take and return.
"""

import re
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, get_args

import msgspec

from rollweave.io.http.guard import OPEN
from rollweave.schema.service import Error
from rollweave.service.routes import JSON, Route, is_header

GUARDED = (401, 403, 421)
"""Statuses with which the guard may refuse any request (`io/http/guard.py`); with a
body, also 413 and 415. They have the form of the service's own API.
"""

Schemas = Mapping[Any, dict[str, Any]]
"""Type → its JSON schema."""


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Describe every route, with its parameters, its body and its answers."""
    kinds = [Error, *(kind for route in routes for kind in _structs(route).values())]
    structs = dict.fromkeys(part for kind in kinds for part in _parts(kind))
    described, components = msgspec.json.schema_components(
        structs, ref_template="#/components/schemas/{name}"
    )
    schemas = dict(zip(structs, described, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rollweave: rollouts as a service", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _structs(route: Route) -> dict[str, Any]:
    """Return the types of the route's answer, its refusals and its body, if any."""
    structs = {"answer": route.answer or route.hints["return"], "refusal": route.refusal}
    body = route.body or route.hints.get("body")
    return {**structs, "body": body} if body is not None else structs


def _parts(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def _content(description: str, kind: Any, schemas: Schemas, *, of: str = JSON) -> dict[str, Any]:
    described = [schemas[part] for part in _parts(kind)]
    schema = {"oneOf": described} if len(described) > 1 else described[0]
    return {"description": description, "content": {of: {"schema": schema}}}


def _operation(route: Route, schemas: Schemas) -> dict[str, Any]:
    structs, name = _structs(route), route.handler.__name__
    by_guard = (*GUARDED, *((413, 415) if "body" in structs else ()))
    refusals = {**dict.fromkeys(route.errors, route.refusal), **dict.fromkeys(by_guard, Error)}
    answer = _content(route.summary, structs["answer"], schemas, of=route.kind)
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.tag.lower()}_{name}" if route.tag else name,
        "tags": [route.tag] if route.tag else [],
        "parameters": _parameters(route),
        "responses": {
            str(route.status): answer,
            **{
                str(status): _content("Refused", kind, schemas) for status, kind in refusals.items()
            },
        },
    }
    if "body" in structs:
        content = _content("", structs["body"], schemas)["content"]
        operation["requestBody"] = {"required": True, "content": content}
    if route.path in OPEN:  # probes send no token
        operation["security"] = [{}]
        del operation["responses"]["401"]
    return operation


def _parameters(route: Route) -> list[dict[str, Any]]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", route.path)
    ]
    query = route.hints.get("query")
    if query is not None:
        (schema,) = msgspec.json.schema(query)["$defs"].values()
        parameters += [
            {"name": name, "in": "header" if is_header(name) else "query", "schema": described}
            for name, described in schema["properties"].items()
        ]
    return parameters
