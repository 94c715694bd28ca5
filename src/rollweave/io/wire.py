"""Frames on a byte stream: a 4-byte little-endian length, then a msgpack payload of
this length in bytes.

Invariants: a decoder returns exactly the payloads that were framed, in order,
regardless of how the stream was split; it buffers at most one incomplete frame, whose
size is bounded; after a `WireError` it returns nothing more. This module uses no
sockets.
"""

import struct
from collections.abc import Callable
from typing import Any

import msgspec

from rollweave.schema.errors import WireError
from rollweave.schema.packing import packed

LENGTH = struct.Struct("<I")

FRAME_BYTES = 1 << 30
"""Maximum size of a payload in bytes: far more than a training batch, far less than an
invalid length usually claims.
"""


def encode(value: object) -> bytes:
    """Return the payload of a struct.

    A member of a union carries its class name (`TaggedStruct`).
    """
    return packed(value)


def decoder_of(kind: Any) -> Callable[[bytes], Any]:
    """Return a function that decodes a payload to a struct of type (or union) `kind`.

    It raises WireError for any other payload.
    """
    decode = msgspec.msgpack.Decoder(kind).decode

    def of(payload: bytes) -> Any:
        try:
            return decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise WireError(f"payload of {len(payload)} bytes: {error}") from error

    return of


def frame(payload: bytes, code: bytes = b"") -> tuple[bytes, ...]:
    """Return length, payload and `code` (`io/sealing`) as separate pieces, so that a
    large payload is not copied.

    Raises WireError for a payload beyond the bound.
    """
    if len(payload) > FRAME_BYTES:
        raise WireError(f"frame must have at most {FRAME_BYTES} bytes, got {len(payload)}")
    head = LENGTH.pack(len(payload) + len(code))
    return (head, payload, code) if code else (head, payload)


class FrameDecoder:
    """Splits a stream of bytes into payloads of at most `limit` bytes."""

    def __init__(self, limit: int = FRAME_BYTES) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._broken = ""

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Return the payloads that `data` completes.

        Raises WireError for a length over the limit, now and at every later call.
        """
        if self._broken:
            raise WireError(self._broken)
        buffer, position = self._buffer, 0
        buffer += data
        payloads: list[bytes] = []
        while len(buffer) - position >= LENGTH.size:
            (length,) = LENGTH.unpack_from(buffer, position)
            if length > self._limit:
                self._broken = f"frame must have at most {self._limit} bytes, got {length}"
                if payloads:
                    break
                raise WireError(self._broken)
            end = position + LENGTH.size + length
            if len(buffer) < end:
                break
            payloads.append(bytes(memoryview(buffer)[position + LENGTH.size : end]))
            position = end
        if position:
            del buffer[:position]
        return payloads
