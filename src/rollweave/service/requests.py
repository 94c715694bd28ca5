"""Decode the body of an HTTP request into one rollout request or a batch of them.

Invariants: a body that is too large is refused before it is decoded into objects; a
batch is decoded a few requests at a time, so that even the largest body does not block
the event loop for long.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Final, TypeVar

import msgspec

from rollweave.schema.errors import ConfigError
from rollweave.schema.service import RolloutRequest
from rollweave.schema.text import decoding_failure
from rollweave.service.errors import TooLargeError

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

_BATCH_START = re.compile(r'\s*\{\s*"rollouts"\s*:\s*\[\s*')
_SEPARATOR = re.compile(r"\s*(?:,\s*|(\])\s*\}\s*\Z)")
_scan = json.JSONDecoder().raw_decode


async def decode_requests(body: bytes, *, max_requests: int) -> tuple[list[RolloutRequest], bool]:
    """Return the requests in `body`, and whether they are a batch.

    Raises TooLargeError for more than `max_requests`, and ConfigError for an invalid
    request.
    """
    await _check_value_count(body)
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"the body must be UTF-8: {error}") from error
    start = _BATCH_START.match(text)
    if start is None:
        return [decode_json(body, RolloutRequest, what="the body")], False
    requests: list[RolloutRequest] = []
    async for element in _elements(text, start.end()):
        if len(requests) == max_requests:
            raise TooLargeError(f"rollouts must be at most {max_requests} requests, got more")
        requests.append(
            decode_json(element.encode(), RolloutRequest, what=f"rollouts[{len(requests)}]")
        )
        if len(requests) % REQUESTS_AT_ONCE == 0:
            await asyncio.sleep(0)
    if not requests:
        raise ConfigError("rollouts must have at least one request, got none")
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


async def _elements(text: str, position: int) -> AsyncIterator[str]:
    """Yield the JSON text of each element of the array whose first element starts at
    `position`. The array must end the object that is `text`.
    """
    if text.startswith("]", position) and text[position + 1 :].strip() == "}":
        return
    while True:
        try:
            _, end = _scan(text, position)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"the body must be JSON as described in /openapi.json: {error}"
            ) from error
        yield text[position:end]
        separator = _SEPARATOR.match(text, end)
        if separator is None:
            raise ConfigError(
                f'the body must be {{"rollouts": [...]}} and nothing else, got '
                f"another form at character {end}"
            )
        if separator[1]:
            return
        position = separator.end()


def decode_json(
    body: bytes, kind: type[T], *, what: str, rule: str = "JSON as described in /openapi.json"
) -> T:
    """Decode one of `kind`. Raises ConfigError if it is not one: the message has the
    broken rule of its values, or says that `what` must be `rule`.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        if isinstance(error.__cause__, ValueError):  # a rule of ours, which names the field
            raise ConfigError(f"{what}: {error}") from error
        raise ConfigError(f"{what} must be {rule}: {decoding_failure(body, error)}") from error
