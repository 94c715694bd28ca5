"""Read the body of a request within bounds on its size as sent, its inflated size, and
the time; and the header `Expect`, by which a client announces a body.

Invariants: at most `most` bytes are buffered, both of the body as sent and of the
inflated body; a body is inflated on a thread, not on the event loop; nothing is read
before the guard and the handler have admitted the request. A request is refused for its
`Expect` only after the guard has admitted it, and the error repeats nothing of the
header; `100 Continue` is sent when the body is about to be read, so never to a client
that the guard or the handler refuses.
"""

import asyncio
import zlib
from typing import Any, Final

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from rollweave.io.http.guard import Handler, Refused

BODY_S: Final = 60.0
"""Seconds within which a client must send the body of its request."""

RATIO: Final = 100
"""Maximum ratio of inflated to sent bytes, where the inflated body exceeds
`FREE_BYTES`.
"""

FREE_BYTES: Final = 1 << 20
"""Inflated size up to which any ratio is accepted: a megabyte costs next to nothing."""

_WINDOW: Final = {
    "gzip": 16 + zlib.MAX_WBITS,
    "x-gzip": 16 + zlib.MAX_WBITS,
    "deflate": zlib.MAX_WBITS,
}

_EXPECTATIONS: Final = web.RequestKey("expect", list)
"""Key of a request's values of `Expect`."""


class BodyError(web.HTTPException):
    """A body is refused with `status`; `reason` is the rule that it breaks."""

    def __init__(self, status: int, rule: str) -> None:
        self.status_code = status
        super().__init__(reason=rule)


async def body_of(request: web.Request, *, most: int, seconds: float = BODY_S) -> bytes:
    """Return the whole body, inflated.

    Raises BodyError: 413 for more than `most` bytes, 408 for a late body, 415, 400.
    """
    coding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if coding != "identity" and coding not in _WINDOW:
        raise BodyError(415, f"Content-Encoding must be gzip, deflate or none, got {coding!a:.40}")
    if (request.content_length or 0) > most:
        raise _too_large(most)
    parts, size = [], 0
    await go_ahead(request)
    try:
        async with asyncio.timeout(seconds):
            async for part in request.content.iter_any():
                size += len(part)
                if size > most:
                    raise _too_large(most)
                parts.append(part)
    except TimeoutError:
        raise BodyError(
            408, f"the body must arrive within {seconds:g} s, got {size} bytes of it"
        ) from None
    except web.RequestPayloadError as error:
        raise BodyError(
            400, f"the body must be whole and cut as its headers say: {_line(error)}"
        ) from error
    sent = b"".join(parts)
    if coding == "identity" or not sent:
        return sent
    return await asyncio.to_thread(_inflated, sent, coding, most)


def _inflated(sent: bytes, coding: str, most: int) -> bytes:
    bound = min(most, max(FREE_BYTES, RATIO * len(sent)))
    decoder = zlib.decompressobj(_WINDOW[coding])
    try:
        inflated = decoder.decompress(sent, bound + 1)
    except zlib.error as error:
        raise BodyError(
            400, f"the body must be {coding}, as Content-Encoding says: {_line(error)}"
        ) from error
    if len(inflated) > most:
        raise _too_large(most)
    if len(inflated) > bound:
        raise BodyError(
            413, f"the body must inflate to at most {RATIO} times what was sent, got more"
        )
    if not decoder.eof or decoder.unused_data:
        raise BodyError(
            400, f"the body must be {coding}, whole and alone, as Content-Encoding says"
        )
    return inflated


def _too_large(most: int) -> BodyError:
    return BodyError(413, f"the body must have at most {most} bytes, got more")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


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
