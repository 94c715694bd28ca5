"""Libraries that transfer bodies outside the socket: Mooncake's transfer engine and
NIXL. Each is imported when its carrier is constructed.

Both read a peer's memory, over RDMA if the machine has it. The sender of a body
registers its memory and sends a token with the address; the receiver registers its own
memory, reads, and acknowledges. Like everything else, the received bytes are verified
by their xxh3-64: Mooncake has been observed to report success without having read.
Tokens are addresses and names, never pickles.
"""

import importlib
import threading
import time
import uuid
from typing import Any

import msgspec
import numpy as np

from rollweave.io.extras import how_to_install
from rollweave.schema.base import Struct
from rollweave.schema.errors import ConfigError, WireError
from rollweave.weights.transport import FailureReason, FetchError

POLL_S = 0.0002
"""Seconds between two polls of a NIXL transfer, which has no blocking call: little
compared with the transfer of a piece.
"""

READ_S = 60.0
"""Maximum seconds for one body: the longest piece at a tenth of the slowest RDMA link.
"""


class _Token(Struct, frozen=True, kw_only=True):
    """Locates a body: the library finds the body's owner by `peer`, and `metadata` is
    what the library needs to know about the owner.
    """

    peer: str
    address: int
    nbytes: int
    metadata: bytes = b""


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Token)


class MooncakeCarrier:
    """`Carrier` by Mooncake's transfer engine.

    `host` is the address at which peers reach this process.
    """

    def __init__(self, host: str, *, protocol: str = "tcp") -> None:
        self._engine = _imported("mooncake.engine", extra="mooncake").TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, "") != 0:
            raise ConfigError(
                f"weights.transport: mooncake cannot be started on {host} with {protocol}"
            )
        self._peer = f"{host}:{self._engine.get_rpc_port()}"

    def register(self, body: memoryview) -> bytes:
        address = _address(body)
        self._register_memory(address, len(body))
        return _encode(_Token(peer=self._peer, address=address, nbytes=len(body)))

    def unregister(self, token: bytes) -> None:
        self._engine.unregister_memory(_decode(token, None).address)

    def read(self, token: bytes, into: memoryview) -> None:
        source = _decode(token, into)
        address = _address(into)
        self._register_memory(address, len(into))
        try:
            if (
                self._engine.transfer_sync_read(source.peer, address, source.address, source.nbytes)
                != 0
            ):
                raise FetchError(
                    "source", f"mooncake cannot read {source.nbytes} bytes from {source.peer}"
                )
        finally:
            self._engine.unregister_memory(address)

    def _register_memory(self, address: int, nbytes: int) -> None:
        if self._engine.register_memory(address, nbytes) != 0:
            raise FetchError("room", f"mooncake cannot register {nbytes} bytes of memory")


class NixlCarrier:
    """`Carrier` by NIXL, over UCX."""

    def __init__(self) -> None:
        api = _imported("nixl._api", extra="nixl")
        self._agent = api.nixl_agent(uuid.uuid4().hex, api.nixl_agent_config(backends=["UCX"]))
        self._lock = threading.Lock()  # the agent's calls must not overlap
        self._registered: dict[bytes, Any] = {}

    def register(self, body: memoryview) -> bytes:
        address = _address(body)
        handle = self._register_memory(address, len(body))
        metadata = self._call("room", "get_agent_metadata")
        token = _encode(
            _Token(peer=self._agent.name, address=address, nbytes=len(body), metadata=metadata)
        )
        self._registered[token] = handle
        return token

    def unregister(self, token: bytes) -> None:
        self._call("room", "deregister_memory", self._registered.pop(token))

    def read(self, token: bytes, into: memoryview) -> None:
        source = _decode(token, into)
        address = _address(into)
        handle = self._register_memory(address, len(into))
        try:
            peer = self._call("source", "add_remote_agent", source.metadata)
            ours = self._call("room", "get_xfer_descs", [(address, len(into), 0)], mem_type="cpu")
            theirs = self._call(
                "room", "get_xfer_descs", [(source.address, source.nbytes, 0)], mem_type="cpu"
            )
            transfer = self._call("source", "initialize_xfer", "READ", ours, theirs, peer)
            try:
                self._wait_for(transfer, source)
            finally:
                self._call("source", "release_xfer_handle", transfer)
        finally:
            self._call("room", "deregister_memory", handle)

    def _wait_for(self, transfer: Any, source: _Token) -> None:
        until, state = time.monotonic() + READ_S, self._call("source", "transfer", transfer)
        while state == "PROC":
            if time.monotonic() > until:
                raise FetchError(
                    "source", f"nixl has not read {source.nbytes} bytes within {READ_S:g} s"
                )
            time.sleep(POLL_S)
            state = self._call("source", "check_xfer_state", transfer)
        if state != "DONE":
            raise FetchError("source", f"nixl cannot read {source.nbytes} bytes: {state}")

    def _register_memory(self, address: int, nbytes: int) -> Any:
        return self._call("room", "register_memory", [(address, nbytes, 0, "")], mem_type="cpu")

    def _call(self, reason: FailureReason, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the agent. Raises FetchError with `reason`."""
        try:
            with self._lock:
                return getattr(self._agent, name)(*arguments, **options)
        except Exception as error:  # the binding has an exception type per status
            raise FetchError(reason, f"nixl: {name}: {error}") from error


def _imported(module: str, *, extra: str) -> Any:
    """Import the module. Raises ConfigError, which names the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"weights.transport = {extra!r} needs the extra: {how_to_install(extra)} ({error})"
        ) from error


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _decode(token: bytes, into: memoryview | None) -> _Token:
    """Decode a token. Raises WireError for bytes that are not a token, or whose body
    does not fit `into`.
    """
    try:
        decoded = _decoder.decode(token)
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError(f"a token of another transport: {error}") from error
    if into is not None and decoded.nbytes != len(into):
        raise WireError(f"a token for {decoded.nbytes} bytes, not for {len(into)}")
    return decoded
