"""A message authentication code (MAC) after every frame of a connection: HMAC-SHA256
over the frame's number and its payload, with one key for each direction.

Invariants: a payload is delivered only if the peer has sent it with this number in this
direction of this connection, so a frame that was altered, repeated, left out or put in
another place ends the connection with a `WireError`; nothing is encrypted. Connections
within one machine have no seal.
"""

import hmac
import struct
from typing import Self

from rollweave.schema.errors import WireError

CODE_BYTES = 32
"""Bytes of a code, at the end of each frame."""

KEY_BYTES = 32

STATE = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}sQQ")
"""Both keys, and the numbers of the next frames, in the form in which another process
receives them.
"""

_NUMBER = struct.Struct("<Q")


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
