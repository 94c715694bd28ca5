"""The header `Expect`: which values are accepted, and when `100 Continue` is sent.

Invariants: a request is refused for its `Expect` only after the guard has admitted it,
and the error repeats nothing of the header; `100 Continue` is sent when the body is
about to be read, so never to a client that the guard or the handler refuses.
"""

from typing import Any, Final

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from rollweave.io.http.guard import Handler, Refused

_EXPECTATIONS: Final = web.RequestKey("expect", list)
"""Key of a request's values of `Expect`."""


def withhold(server: web.Server) -> None:
    """Keep `Expect` from the application, which would answer the header before its
    middlewares run. Must be called before the first connection.
    """
    make = server.request_factory

    def make_request(message: Any, *rest: Any) -> web.BaseRequest:
        # The headers of an invalid message are an empty dict.
        expectations = message.headers.getall("Expect") if "Expect" in message.headers else []
        if expectations:
            others = CIMultiDict(
                (name, text) for name, text in message.headers.items() if name.lower() != "expect"
            )
            message = message._replace(headers=CIMultiDictProxy(others))
        request = make(message, *rest)
        request[_EXPECTATIONS] = expectations
        return request

    server.request_factory = make_request


@web.middleware
async def check_expectation(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse any expectation but `100-continue` (417).

    The guard's middleware must come before it.
    """
    if any(text.strip().lower() != "100-continue" for text in _expected(request)):
        raise Refused(417, "Expect must be absent or 100-continue")
    return await handler(request)


async def go_ahead(request: web.Request) -> None:
    """Send `100 Continue` if the client waits for it."""
    if _expected(request) and not request.content.is_eof():
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the response has not started


def _expected(request: web.Request) -> list[str]:
    """Return the values of `Expect`; none for HTTP/1.0, which has no such header."""
    return request.get(_EXPECTATIONS, []) if request.version >= (1, 1) else []
