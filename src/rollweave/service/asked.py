"""Decode the body of an HTTP request into one request for a rollout, or a batch of
them.

Invariants: a body that is too large is refused before objects are made of it; a batch
is decoded a few requests at a time, so that even the largest body does not block the
event loop for long.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Final

import msgspec

from rollweave.schema.errors import ConfigError
from rollweave.schema.service import RolloutRequest
from rollweave.schema.text import decoding_failure
from rollweave.service.refusals import TooLargeError

VALUES: Final = 1_000_000
"""Approximate maximum number of JSON values in one body, which take some tenths of a
second to decode.
"""

STRIDE: Final = 1 << 20
"""Number of bytes that are scanned at once, which takes milliseconds."""

FEW: Final = 100
"""Number of requests of a batch that are decoded at once."""

_BATCH = re.compile(r'\s*\{\s*"rollouts"\s*:\s*\[\s*')
_BETWEEN = re.compile(r"\s*(?:,\s*|(\])\s*\}\s*\Z)")
_scan = json.JSONDecoder().raw_decode


async def asked_for(body: bytes, *, most: int) -> tuple[list[RolloutRequest], bool]:
    """Return the requests, and whether they came as a batch.

    Raises TooLargeError for more than `most` of them, and ConfigError for an invalid
    request.
    """
    await _bounded(body)
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the body must be UTF-8: {error}") from error
    begun = _BATCH.match(text)
    if begun is None:
        return [_decoded(body, "the body")], False
    found: list[RolloutRequest] = []
    async for part in _parts(text, begun.end()):
        if len(found) == most:
            raise TooLargeError(f"rollouts must be at most {most} requests (serve.queue), got more")
        found.append(_decoded(part.encode(), f"rollouts[{len(found)}]"))
        if len(found) % FEW == 0:
            await asyncio.sleep(0)
    if not found:
        raise ConfigError("rollouts must have at least one request, got none")
    return found, True


async def _bounded(body: bytes) -> None:
    """Count the JSON values: each but the first follows a comma or a bracket."""
    values = 0
    for start in range(0, len(body), STRIDE):
        values += sum(body.count(mark, start, start + STRIDE) for mark in (b",", b"[", b"{"))
        if values > VALUES:
            raise TooLargeError(f"the body must hold at most {VALUES} JSON values, got more")
        await asyncio.sleep(0)


async def _parts(text: str, at: int) -> AsyncIterator[str]:
    """Yield the JSON of each element of the array that begins before `at` and ends the
    JSON `text`.
    """
    if text.startswith("]", at) and text[at + 1 :].strip() == "}":
        return
    while True:
        try:
            _, end = _scan(text, at)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the body must be JSON as /openapi.json says: {error}") from error
        yield text[at:end]
        between = _BETWEEN.match(text, end)
        if between is None:
            raise ConfigError(
                f'the body must be {{"rollouts": [...]}} and nothing else, got '
                f"another form at character {end}"
            )
        if between[1]:
            return
        at = between.end()


def _decoded(part: bytes, what: str) -> RolloutRequest:
    try:
        return msgspec.json.decode(part, type=RolloutRequest)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{what} must be JSON as /openapi.json says: {decoding_failure(part, error)}"
        ) from error
