"""Frames on a byte stream: a 4-byte little-endian length, then a msgpack payload of
this length in bytes, and between machines a seal: a message authentication code (MAC),
HMAC-SHA256 over the frame's number and its payload, with one key for each direction.

Invariants: a decoder returns exactly the payloads that were framed, in order,
regardless of how the stream was split; it buffers at most one incomplete frame, whose
size is bounded; after a `WireError` it returns nothing more. A sealed payload is
delivered only if the peer has sent it with this number in this direction of this
connection, so a frame that was altered, repeated, left out or put in another place ends
the connection with a `WireError`; nothing is encrypted. Connections within one machine
have no seal. This module uses no sockets.
"""

import hmac
import struct
from collections.abc import Callable
from typing import Any, Self

import msgspec

from rollweave.schema.base import packed
from rollweave.schema.errors import WireError

LENGTH = struct.Struct("<I")

FRAME_BYTES = 1 << 30
"""Maximum size of a payload in bytes: far more than a training batch, far less than an
invalid length usually claims.
"""

CODE_BYTES = 32
"""Bytes of a code, at the end of each frame."""

KEY_BYTES = 32

STATE = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}sQQ")
"""Both keys, and the numbers of the next frames, in the form in which another process
receives them.
"""

_NUMBER = struct.Struct("<Q")


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
    """Return length, payload and `code` (`io/wire`) as separate pieces, so that a
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


class Seal:
    """One end of a sealed connection: the keys, and the numbers of the next frames.

    `code` and `opened` may be called from different threads.
    """

    def __init__(
        self, sending: bytes, receiving: bytes, *, sent: int = 0, received: int = 0
    ) -> None:
        """`sending` and `receiving` are keys; `sent` and `received` count the frames so
        far.
        """
        self._keys = (sending, receiving)
        self._sending = hmac.new(sending, digestmod="sha256")
        self._receiving = hmac.new(receiving, digestmod="sha256")
        self._sent, self._received = sent, received

    @classmethod
    def from_state(cls, state: bytes) -> Self:
        """Return the seal whose method `state` returned `state`."""
        sending, receiving, sent, received = STATE.unpack(state)
        return cls(sending, receiving, sent=sent, received=received)

    def state(self) -> bytes:
        """Return `STATE.size` bytes with which another process continues the
        connection.
        """
        return STATE.pack(*self._keys, self._sent, self._received)

    def code(self, payload: bytes) -> bytes:
        """Return the code of the next frame that is sent."""
        number, self._sent = self._sent, self._sent + 1
        return _code(self._sending, number, payload)

    def opened(self, sealed: bytes) -> bytes:
        """Return the payload of the next frame that is received. Raises WireError."""
        number, self._received = self._received, self._received + 1
        payload = sealed[:-CODE_BYTES]
        if not hmac.compare_digest(sealed[-CODE_BYTES:], _code(self._receiving, number, payload)):
            raise WireError(
                f"frame {number} has a wrong authentication code: it was altered, repeated or left "
                "out on the way"
            )
        return payload


def _code(keyed: "hmac.HMAC", number: int, payload: bytes) -> bytes:
    code = keyed.copy()
    code.update(_NUMBER.pack(number))
    code.update(payload)
    return code.digest()
