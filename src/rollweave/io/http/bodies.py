"""Read the body of a request within bounds on its size as sent, its inflated size, and
the time.

Invariants: at most `most` bytes are buffered, both of the body as sent and of the
inflated body; a body is inflated on a thread, not on the event loop; nothing is read
before the guard and the handler have admitted the request.
"""

import asyncio
import zlib
from typing import Final

from aiohttp import web

from rollweave.io.http.expectation import go_ahead

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
