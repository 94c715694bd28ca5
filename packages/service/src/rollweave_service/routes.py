"""The routes of a service's APIs. One row of a table is both what the server calls and
what the OpenAPI 3.1 document describes (`document`).

Invariants: a body, and the parameters of a query, are decoded into the structs that the
handler's signature names, or refused with a message that names field, rule and value; a
body that is too large is refused before it is decoded into objects; a batch is decoded
a few requests at a time, so that even the largest body does not block the event loop
for long; what a handler refuses is answered in the form of its API; no request causes a
500.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Final, TypeVar, cast, get_args, get_type_hints

import msgspec
from aiohttp import web
from msgspec import inspect

from rollweave.io.http.bodies import body_of
from rollweave.io.http.guard import OPEN
from rollweave.schema.base import as_json
from rollweave.schema.errors import ConfigError, DiskError
from rollweave.schema.text import decimal
from rollweave_service.base import RefusedError, TooLargeError
from rollweave_service.messages import Error, ErrorDetail, RolloutRequest

T = TypeVar("T")

MAX_VALUES: Final = 1_000_000
"""Approximate maximum number of JSON values in one body. Decoding that many takes some
tenths of a second.
"""

SCAN_BYTES: Final = 1 << 20
"""Number of bytes that are scanned between two yields to the event loop, which takes
milliseconds.
"""

REQUESTS_AT_ONCE: Final = 100
"""Number of requests that are decoded between two yields to the event loop."""

BODY_BYTES = 16 << 20
"""Maximum size of a request's body: thousands of rollouts with long payloads."""

JSON = "application/json"

RETRY_S = 1
"""Seconds after which a refused client may retry (Retry-After)."""

TEMPORARY = (429, 503, 507)
"""Statuses of temporary refusals: too many requests, the service is ending, the disk is
full.
"""

_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")

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

GUARDED = (401, 403, 421)
"""Statuses with which the guard may refuse any request (`io/http/guard.py`); with a
body, also 413 and 415. They have the form of the service's own API.
"""

Schemas = Mapping[Any, dict[str, Any]]
"""Type → its JSON schema."""


async def decode_requests(body: bytes, *, max_requests: int) -> tuple[list[RolloutRequest], bool]:
    """Return the requests in `body`, and whether they are a batch.

    Raises TooLargeError for more than `max_requests`, and ConfigError for an invalid
    request.
    """
    await _check_value_count(body)
    parts = decode_json(body, dict[str, msgspec.Raw])
    if "rollouts" not in parts:
        return [decode_json(body, RolloutRequest)], False
    elements = decode_json(parts.pop("rollouts"), list[msgspec.Raw], what="rollouts")
    if parts:
        raise ConfigError(
            f'the body must be {{"rollouts": [...]}} and nothing else, got also {min(parts)!r:.100}'
        )
    if len(elements) > max_requests:
        raise TooLargeError(
            f"rollouts must be at most {max_requests} requests, got {len(elements)}"
        )
    if not elements:
        raise ConfigError("rollouts must have at least one request, got none")
    requests = []
    for number, element in enumerate(elements):
        requests.append(decode_json(element, RolloutRequest, what=f"rollouts[{number}]"))
        if number % REQUESTS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return requests, True


async def _check_value_count(body: bytes) -> None:
    """Count the JSON values in `body`: each but the first follows a comma or
    bracket.
    """
    values = 0
    for start in range(0, len(body), SCAN_BYTES):
        values += sum(body.count(mark, start, start + SCAN_BYTES) for mark in (b",", b"[", b"{"))
        if values > MAX_VALUES:
            raise TooLargeError(f"the body must hold at most {MAX_VALUES} JSON values, got more")
        await asyncio.sleep(0)


def decode_json(body: bytes | msgspec.Raw, kind: type[T], *, what: str = "the body") -> T:
    """Decode one of `kind`. Raises ConfigError if it is not one: the message has the
    broken rule of its values, or says that `what` must be as the document describes.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        if isinstance(error.__cause__, ValueError):  # a rule of ours, which names the field
            raise ConfigError(f"{what}: {error}") from error
        rule = f"{what} must be JSON as described in /openapi.json"
        raise ConfigError(f"{rule}: {decoding_failure(bytes(body), error)}") from error


def decoding_failure(body: bytes, error: Exception) -> str:
    """Say why JSON could not be decoded.

    For half a surrogate pair, decoders only say that the body is malformed or too
    short.
    """
    is_syntax = any(words in str(error) for words in ("truncated", "surrogate"))
    if is_syntax and _ESCAPED_SURROGATE.search(body):
        return (
            "text must be valid UTF-8, without one half of a surrogate pair (\\ud800 to "
            f"\\udfff), and whole: {error}"
        )
    return str(error)


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error of the service."""
    if isinstance(error, RefusedError):
        return error.status
    return 507 if isinstance(error, DiskError) else 400


def json_response(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return an answer with `value` as JSON."""
    return web.Response(body=as_json(value), status=status, content_type=JSON, headers=headers)


def error_response(
    status: int, message: str, *, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return an error in the form of the service's own API."""
    more = {"Retry-After": str(RETRY_S)} if status in TEMPORARY else {}
    kind = TYPE_OF_STATUS.get(status, "refused")
    body = Error(error=ErrorDetail(type=kind, message=message))
    return json_response(body, status=status, headers={**more, **(headers or {})})


def _refused(error: Exception) -> web.Response:
    return error_response(status_of(error), str(error))


@dataclass(frozen=True)
class Route:
    """A method and path, and the method of an API that handles it.

    The handler's parameters are parts of the path, `query` (a struct whose fields are
    the parameters), `body` (a struct), or `request`; it returns the struct of the
    answer. A handler that decodes the body or encodes the answer itself has the structs
    here, in `body` and `answer`; `kind` is the answer's type of content.

    The first paragraph of the handler's docstring is the summary. `errors` are the
    statuses with which the API refuses the request, in the form that `refused` gives
    them, with the struct `refusal`.
    """

    method: str
    path: str
    handler: Callable[..., Awaitable[Any]]
    status: int = 200
    errors: tuple[int, ...] = ()
    body: Any = None
    answer: Any = None
    kind: str = JSON
    refusal: type = Error
    refused: Callable[[Exception], web.Response] = _refused
    tag: str = ""

    @property
    def summary(self) -> str:
        """The purpose of the route, in one line."""
        paragraph = (self.handler.__doc__ or "").partition("\n\n")[0]
        return " ".join(paragraph.split()).removesuffix(".")

    @property
    def hints(self) -> dict[str, Any]:
        """The types of the handler's parameters, and of its answer (`return`)."""
        return get_type_hints(self.handler, include_extras=True)

    def definition(self) -> web.RouteDef:
        """Return the route of aiohttp."""
        make = {"GET": web.get, "POST": web.post, "DELETE": web.delete}[self.method]
        hints = self.hints

        async def handle(request: web.Request) -> web.StreamResponse:
            arguments: dict[str, Any] = dict(request.match_info)
            try:
                if "request" in hints:
                    arguments["request"] = request
                if "query" in hints:
                    arguments["query"] = _parameters(hints["query"], request)
                if "body" in hints:
                    body = await body_of(request, most=BODY_BYTES)
                    kind = hints["body"]
                    arguments["body"] = body if kind is bytes else decode_json(body, kind)
                answer = await self.handler(**arguments)
            except (RefusedError, ConfigError, DiskError) as error:
                return self.refused(error)
            if isinstance(answer, web.StreamResponse):
                return answer
            return json_response(answer, status=self.status)

        return make(self.path, handle)


def is_header(name: str) -> bool:
    """Return whether a parameter is a header: its name has capitals."""
    return name[0].isupper()


def _parameters(kind: type[T], request: web.Request) -> T:
    """Return the parameters of a request. Raises ConfigError for an invalid one."""
    values = {}
    for field in inspect.type_info(kind).fields:  # type: ignore[attr-defined]
        name = field.encode_name
        text = request.headers.get(name) or None if is_header(name) else request.query.get(name)
        if text is not None:
            values[field.name] = _parsed(name, field.type, text)
    return kind(**values)


def _parsed(name: str, kind: inspect.Type, text: str) -> Any:
    match kind:
        case inspect.Metadata(type=inner):
            return _parsed(name, inner, text)
        case inspect.UnionType(types=(inner, _)):  # the other is null
            return _parsed(name, inner, text)
        case inspect.BoolType():
            if text not in ("true", "false"):
                raise ConfigError(f"{name} must be true or false, got {text!r:.40}")
            return text == "true"
        case inspect.IntType(ge=least, le=most) | inspect.FloatType(ge=least, le=most):
            value = decimal(text)
            if value is None or not cast(float, least) <= value <= cast(float, most):
                raise ConfigError(
                    f"{name} must be a number from {least:g} to {most:g}, got {text!r:.40}"
                )
            return int(value) if isinstance(kind, inspect.IntType) else value
        case _:
            return text


@web.middleware
async def errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer what is refused before a handler is called in the form of the service's
    own API.
    """
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        kept = ("Allow", "WWW-Authenticate")
        headers = {name: error.headers[name] for name in kept if name in error.headers}
        return error_response(error.status, _rule(request, error), headers=headers)


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
        "parameters": _described_parameters(route),
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


def _described_parameters(route: Route) -> list[dict[str, Any]]:
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
