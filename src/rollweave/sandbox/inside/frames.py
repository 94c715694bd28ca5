"""Frames between host and sandbox: two 4-byte little-endian lengths (header, body), a
JSON object, raw bytes. Needs Python 3.9 and its standard library alone.

A request is `{"id": int, "action": str, ...}`; its reply has the same id and `"ok":
true`, or `"ok": false`, an `error` and its `kind`: `timeout`, `refused` (the request
breaks a rule) or `failed`. The action `cancel` makes the call with the same id end
soon, and has no reply.

Invariants: a decoder returns exactly the frames that were packed, in order, regardless
of how the stream was split; it buffers at most one incomplete frame, which is within
the bounds; after a `FrameError` it returns nothing more.
"""

from __future__ import annotations

import json
import struct
from typing import Any

LENGTHS = struct.Struct("<II")

HEADER_BYTES = 4 << 20
"""Maximum size of a header in bytes, which a long command line fits easily."""

BODY_BYTES = 64 << 20
"""Maximum size of a body in bytes, enough for a file of a repository; images do not
travel in frames.
"""

KINDS = ("timeout", "refused", "failed")

Frame = tuple[dict[str, Any], bytes]

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class FrameError(ValueError):
    """The bytes are not a frame, or the frame exceeds the bounds."""


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """Return a frame.

    Raises FrameError for a header that is not JSON and for sizes beyond the bounds.
    """
    try:
        text = _encode(header).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"header must be JSON: {error}") from error
    _bound(len(text), len(body))
    return b"".join((LENGTHS.pack(len(text), len(body)), text, body))


class FrameDecoder:
    """Splits a stream of bytes into frames: `feed` it, then `take` until it returns
    None.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._broken = ""

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def take(self) -> Frame | None:
        """Return the next frame, or None until more is fed.

        Raises FrameError for invalid bytes, now and at every later call.
        """
        if self._broken:
            raise FrameError(self._broken)
        buffer = self._buffer
        if len(buffer) < LENGTHS.size:
            return None
        header_bytes, body_bytes = LENGTHS.unpack_from(buffer)
        try:
            _bound(header_bytes, body_bytes)
            start = LENGTHS.size + header_bytes
            if len(buffer) < start + body_bytes:
                return None
            header = _header(bytes(buffer[LENGTHS.size : start]))
        except FrameError as error:
            self._broken = str(error)
            raise
        body = bytes(buffer[start : start + body_bytes])
        del buffer[: start + body_bytes]
        return header, body


def _bound(header_bytes: int, body_bytes: int) -> None:
    if header_bytes > HEADER_BYTES:
        raise FrameError(f"header must have at most {HEADER_BYTES} bytes, got {header_bytes}")
    if body_bytes > BODY_BYTES:
        raise FrameError(f"body must have at most {BODY_BYTES} bytes, got {body_bytes}")


def _header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"header must be JSON: {error}") from error
    if not isinstance(header, dict):
        raise FrameError(f"header must be a JSON object, got {type(header).__name__}")
    number = header.get("id")
    if type(number) is not int:
        raise FrameError(f"header.id must be an integer, got {number!r:.100}")
    return header
