"""Decode the body of an HTTP request into one rollout request or a batch of them.

Invariants: a body that is too large is refused before it is decoded into objects; a
batch is decoded a few requests at a time, so that even the largest body does not block
the event loop for long.
"""

import asyncio
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
