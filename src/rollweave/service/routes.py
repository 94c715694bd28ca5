"""The routes of a service's APIs. One row of a table is both what the server calls and
what the OpenAPI document describes (`service/openapi.py`).

Invariants: a body, and the parameters of a query, are decoded into the structs that the
handler's signature names, or refused with a message that names field, rule and value;
what a handler refuses is answered in the form of its API; no request causes a 500.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast, get_type_hints

from aiohttp import web
from msgspec import inspect

from rollweave.io.http.bodies import body_of
from rollweave.schema.errors import ConfigError, DiskError
from rollweave.schema.packing import as_json
from rollweave.schema.service import Error, ErrorDetail
from rollweave.schema.text import decimal
from rollweave.service.errors import RefusedError
from rollweave.service.requests import decode_json

T = TypeVar("T")

BODY_BYTES = 16 << 20
"""Maximum size of a request's body: thousands of rollouts with long payloads."""

JSON = "application/json"

RETRY_S = 1
"""Seconds after which a refused client may retry (Retry-After)."""

TEMPORARY = (429, 503, 507)
"""Statuses of temporary refusals: too many requests, the service is ending, the disk is
full.
"""

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
