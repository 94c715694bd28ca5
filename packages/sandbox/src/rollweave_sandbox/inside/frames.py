"""Frames between host and sandbox: two 4-byte little-endian lengths (header, body), a
JSON object, raw bytes; and the calls of actions that they carry, with their checked
arguments, deadlines and cancellation. Needs Python 3.9 and its standard library alone.

A request is `{"id": int, "action": str, ...}`; its reply has the same id and `"ok":
true`, or `"ok": false`, an `error` and its `kind`: `timeout`, `refused` (the request
breaks a rule) or `failed`. The action `cancel` makes the call with the same id end
soon, and has no reply.

Invariants: a decoder returns exactly the frames that were packed, in order, regardless
of how the stream was split; it buffers at most one incomplete frame, which is within
the bounds; after a `FrameError` it returns nothing more.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
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

Result = tuple[dict[str, Any], bytes]
"""The fields of a reply, and its body."""

DEFAULT_LIMIT = 1 << 20
"""Default number of bytes of output that are kept."""


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


class Refused(Exception):
    """The call breaks a rule, and nothing was done."""


class Failed(Exception):
    """The tool could not do the requested action."""


class Stop:
    """Cancels the call of a thread that polls file descriptors: `fd` is readable after
    `set`. Belongs to one worker thread.
    """

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)

    def set(self) -> None:
        # the pipe is full after thousands of calls
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"x")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 65536)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._write)


class Call:
    """One request. The getters raise Refused with field, rule and value."""

    def __init__(self, header: dict[str, Any], body: bytes, stop: Stop) -> None:
        self.id: int = header["id"]
        self.body = body
        self.stop = stop
        self._args = header

    def text(self, field: str, default: str | None = None) -> str:
        value = self._args.get(field, default)
        if not isinstance(value, str) or "\0" in value:
            raise Refused(f"{field} must be a string without NUL, got {value!r:.100}")
        return value

    def absent(self, field: str) -> bool:
        return self._args.get(field) is None

    def optional(self, field: str) -> str | None:
        return None if self.absent(field) else self.text(field)

    def number(self, field: str, default: float) -> float:
        """Return a number from 0 to 1e9."""
        value = self._args.get(field, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e9:
            raise Refused(f"{field} must be a number from 0 to 1e+09, got {value!r:.100}")
        return float(value)

    def integer(
        self, field: str, default: int | None = None, *, least: int = 0, most: int = 1 << 40
    ) -> int:
        value = self._args.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise Refused(f"{field} must be an integer from {least} to {most}, got {value!r:.100}")
        return value

    def flag(self, field: str) -> bool:
        value = self._args.get(field, False)
        if not isinstance(value, bool):
            raise Refused(f"{field} must be true or false, got {value!r:.100}")
        return value

    def texts(self, field: str) -> list[str]:
        value = self._args.get(field)
        if not isinstance(value, list) or not all(
            isinstance(item, str) and "\0" not in item for item in value
        ):
            raise Refused(f"{field} must be a list of strings without NUL, got {value!r:.100}")
        return value

    def mapping(self, field: str) -> dict[str, str] | None:
        value = self._args.get(field)
        if value is None:
            return None
        if not isinstance(value, dict) or not all(
            isinstance(v, str) and "\0" not in k + v for k, v in value.items()
        ):
            raise Refused(f"{field} must map strings to strings, without NUL, got {value!r:.100}")
        if any("=" in name or not name for name in value):
            raise Refused(f"{field} must have names without '=', got {sorted(value)!r:.100}")
        return value

    def deadline(self) -> Deadline:
        return Deadline(self.number("timeout_s", 60.0))


class Deadline:
    """A moment on the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self._began = time.monotonic()
        self._end = self._began + seconds

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def left_ms(self) -> float:
        """Milliseconds left, at least 0, for `poll`."""
        return max(0.0, (self._end - time.monotonic()) * 1000.0)

    @property
    def past(self) -> bool:
        return time.monotonic() >= self._end
