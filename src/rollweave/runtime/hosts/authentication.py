"""The handshake between a host's agent and the controller: each proves to the other
that it knows the run's secret, which is never sent.

The frames that follow carry authentication codes with keys that only these two ends
know (`io/wire`). They are not encrypted, and neither are weights and KV between
hosts: the network between the hosts of a run must be private (`docs/SECURITY.md`).
"""

import asyncio
import hmac
import os
import socket

from rollweave.io.framing import receive_exactly
from rollweave.io.wire import Seal
from rollweave.schema.errors import HostError

GREETING = b"rollweave host 2\n"
NONCE_BYTES = 32
MAC_BYTES = 32
REFUSED = bytes(MAC_BYTES)
"""Answer of the controller to a wrong proof."""

HANDSHAKE_S = 5.0
"""Maximum seconds that a handshake takes."""


async def admit(sock: socket.socket, secret: bytes) -> Seal | None:
    """Complete the handshake with the agent that has connected, and return the seal of
    the connection; None if the agent does not know the secret.

    Raises OSError if the connection ends, and TimeoutError if the agent is silent.
    """
    loop, ours = asyncio.get_running_loop(), os.urandom(NONCE_BYTES)
    async with asyncio.timeout(HANDSHAKE_S):
        await loop.sock_sendall(sock, GREETING + ours)
        reply = await receive_exactly(sock, NONCE_BYTES + MAC_BYTES)
        theirs, proof = reply[:NONCE_BYTES], reply[NONCE_BYTES:]
        known = hmac.compare_digest(proof, _proof(secret, b"agent", ours, theirs))
        answer = _proof(secret, b"controller", ours, theirs) if known else REFUSED
        await loop.sock_sendall(sock, answer)
    to_agent, to_controller = _keys(secret, ours, theirs)
    return Seal(to_agent, to_controller) if known else None


async def introduce(sock: socket.socket, secret: bytes, *, where: str) -> Seal:
    """Complete the handshake with the controller at `where`, and return the seal of the
    connection.

    Raises `HostError` if the other end is no controller, or does not know the secret,
    and OSError and TimeoutError as `admit` does.
    """
    loop, ours = asyncio.get_running_loop(), os.urandom(NONCE_BYTES)
    async with asyncio.timeout(HANDSHAKE_S):
        greeting = await receive_exactly(sock, len(GREETING) + NONCE_BYTES)
        if not greeting.startswith(GREETING):
            raise HostError(f"{where} must be the controller of a run, got another server")
        theirs = greeting[len(GREETING) :]
        await loop.sock_sendall(sock, ours + _proof(secret, b"agent", theirs, ours))
        answer = await receive_exactly(sock, MAC_BYTES)
    if not hmac.compare_digest(answer, _proof(secret, b"controller", theirs, ours)):
        raise HostError(
            f"--secret-file or ROLLWEAVE_HOST_SECRET must hold the secret of the run at {where}, "
            "got another one"
        )
    to_agent, to_controller = _keys(secret, theirs, ours)
    return Seal(to_controller, to_agent)


def _keys(secret: bytes, controllers: bytes, agents: bytes) -> tuple[bytes, bytes]:
    """Return the keys of the frames to the agent and to the controller."""
    return (
        _proof(secret, b"frames to the agent", controllers, agents),
        _proof(secret, b"frames to the controller", controllers, agents),
    )


def _proof(secret: bytes, side: bytes, controllers: bytes, agents: bytes) -> bytes:
    return hmac.digest(secret, GREETING + side + controllers + agents, "sha256")
