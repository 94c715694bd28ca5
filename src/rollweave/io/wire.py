"""Frames on a byte stream: a 4-byte little-endian length, then that many bytes of
msgpack.

Invariants: a decoder delivers exactly the payloads that were framed, in order, however
the bytes were cut on the way; it holds at most one unfinished frame, which is within
its bound; after a `WireError` it delivers nothing more. No sockets here.
"""

import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from rollweave.schema.errors import WireError
from rollweave.schema.packing import packed

T = TypeVar("T")

LENGTH = struct.Struct("<I")

FRAME_BYTES = 1 << 30
"""Bytes of the largest payload: far beyond any training batch, far below what a length
of garbage asks for.
"""


def encode(noun: object) -> bytes:
    """Return the payload of a noun.

    A member of a union carries its class name (`TaggedStruct`).
    """
    return packed(noun)


def decoder_of(kind: Any) -> Callable[[bytes], Any]:
    """A function from a payload to a noun of type (or union) `kind`.

    It raises WireError for anything else.
    """
    decode = msgspec.msgpack.Decoder(kind).decode

    def of(payload: bytes) -> Any:
        try:
            return decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise WireError(f"payload of {len(payload)} bytes: {error}") from error

    return of


def frame(payload: bytes) -> tuple[bytes, bytes]:
    """Length and payload, unjoined, so that a large payload is not copied.

    Raises WireError beyond the bound.
    """
    if len(payload) > FRAME_BYTES:
        raise WireError(f"frame must have at most {FRAME_BYTES} bytes, got {len(payload)}")
    return LENGTH.pack(len(payload)), payload


class FrameDecoder:
    """Cuts a stream of bytes into payloads of at most `limit` bytes."""

    def __init__(self, limit: int = FRAME_BYTES) -> None:
        self._limit = limit
        self._buffer = bytearray()
        self._broken = ""

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """The payloads that `data` completes.

        Raises WireError for a length over the limit, now and at every later call.
        """
        if self._broken:
            raise WireError(self._broken)
        buffer, position = self._buffer, 0
        buffer += data
        found: list[bytes] = []
        while len(buffer) - position >= LENGTH.size:
            (length,) = LENGTH.unpack_from(buffer, position)
            if length > self._limit:
                self._broken = f"frame must have at most {self._limit} bytes, got {length}"
                if found:
                    break
                raise WireError(self._broken)
            end = position + LENGTH.size + length
            if len(buffer) < end:
                break
            found.append(bytes(memoryview(buffer)[position + LENGTH.size : end]))
            position = end
        if position:
            del buffer[:position]
        return found


class Decoder(Generic[T]):
    """`FrameDecoder` and `decoder_of` in one: a stream of bytes into nouns of one type
    or union.
    """

    def __init__(self, kind: Any, limit: int = FRAME_BYTES) -> None:
        self._frames = FrameDecoder(limit)
        self._decode: Callable[[bytes], T] = decoder_of(kind)

    def feed(self, data: bytes | bytearray | memoryview) -> list[T]:
        """The nouns that `data` completes.

        Raises WireError for what is no frame, or no noun, of ours.
        """
        return [self._decode(payload) for payload in self._frames.feed(data)]
