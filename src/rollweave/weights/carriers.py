"""Libraries that carry bodies beside the socket: Mooncake's transfer engine and NIXL.
Each is imported when it is made.

Both read a peer's memory: over RDMA where the machine has it. Who gives a body away
registers its memory and sends where it is; who takes it registers its own, reads, and
says so. What has come is verified by its xxh3-64 like everything else: Mooncake has
been seen to say that it read what it had not. Tokens are addresses and names, never
pickles.
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
from rollweave.weights.protocol import FailureReason, FetchError

POLL_S = 0.0002
"""Between two looks at a transfer of NIXL's, which has no call that waits: little
beside what a piece takes.
"""

READ_S = 60.0
"""Seconds that one body may take: the longest piece at a tenth of the slowest RDMA
link.
"""


class _Token(Struct, frozen=True, kw_only=True):
    """Where a body is: `peer` is how the library finds its owner, `about` what it has
    to know of it.
    """

    peer: str
    address: int
    nbytes: int
    about: bytes = b""


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Token)


class MooncakeCarrier:
    """`Carrier` by Mooncake's transfer engine.

    `host` is the address that peers reach us at.
    """

    def __init__(self, host: str, *, protocol: str = "tcp") -> None:
        self._engine = _imported("mooncake.engine", extra="mooncake").TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, "") != 0:
            raise ConfigError(
                f"weights.transport: mooncake cannot be started on {host} with {protocol}"
            )
        self._peer = f"{host}:{self._engine.get_rpc_port()}"

    def offer(self, body: memoryview) -> bytes:
        address = _address(body)
        self._register(address, len(body))
        return _encode(_Token(peer=self._peer, address=address, nbytes=len(body)))

    def withdraw(self, token: bytes) -> None:
        self._engine.unregister_memory(_decode(token, None).address)

    def fetch(self, token: bytes, into: memoryview) -> None:
        where = _decode(token, into)
        address = _address(into)
        self._register(address, len(into))
        try:
            if (
                self._engine.transfer_sync_read(where.peer, address, where.address, where.nbytes)
                != 0
            ):
                raise FetchError(
                    "source", f"mooncake cannot read {where.nbytes} bytes from {where.peer}"
                )
        finally:
            self._engine.unregister_memory(address)

    def _register(self, address: int, nbytes: int) -> None:
        if self._engine.register_memory(address, nbytes) != 0:
            raise FetchError("room", f"mooncake cannot register {nbytes} bytes of memory")


class NixlCarrier:
    """`Carrier` by NIXL, over UCX."""

    def __init__(self) -> None:
        api = _imported("nixl._api", extra="nixl")
        self._agent = api.nixl_agent(uuid.uuid4().hex, api.nixl_agent_config(backends=["UCX"]))
        self._alone = threading.Lock()  # an agent's calls must not overlap; its transfers may
        self._registered: dict[bytes, Any] = {}

    def offer(self, body: memoryview) -> bytes:
        address = _address(body)
        handle = self._register(address, len(body))
        about = self._call("room", "get_agent_metadata")
        token = _encode(
            _Token(peer=self._agent.name, address=address, nbytes=len(body), about=about)
        )
        self._registered[token] = handle
        return token

    def withdraw(self, token: bytes) -> None:
        self._call("room", "deregister_memory", self._registered.pop(token))

    def fetch(self, token: bytes, into: memoryview) -> None:
        where = _decode(token, into)
        address = _address(into)
        handle = self._register(address, len(into))
        try:
            peer = self._call("source", "add_remote_agent", where.about)
            ours = self._call("room", "get_xfer_descs", [(address, len(into), 0)], mem_type="cpu")
            theirs = self._call(
                "room", "get_xfer_descs", [(where.address, where.nbytes, 0)], mem_type="cpu"
            )
            transfer = self._call("source", "initialize_xfer", "READ", ours, theirs, peer)
            try:
                self._finish(transfer, where)
            finally:
                self._call("source", "release_xfer_handle", transfer)
        finally:
            self._call("room", "deregister_memory", handle)

    def _finish(self, transfer: Any, where: _Token) -> None:
        until, state = time.monotonic() + READ_S, self._call("source", "transfer", transfer)
        while state == "PROC":
            if time.monotonic() > until:
                raise FetchError(
                    "source", f"nixl has not read {where.nbytes} bytes within {READ_S:g} s"
                )
            time.sleep(POLL_S)
            state = self._call("source", "check_xfer_state", transfer)
        if state != "DONE":
            raise FetchError("source", f"nixl cannot read {where.nbytes} bytes: {state}")

    def _register(self, address: int, nbytes: int) -> Any:
        return self._call("room", "register_memory", [(address, nbytes, 0, "")], mem_type="cpu")

    def _call(self, reason: FailureReason, name: str, *arguments: Any, **options: Any) -> Any:
        """One call of the agent. Raises TakeError of that reason."""
        try:
            with self._alone:
                return getattr(self._agent, name)(*arguments, **options)
        except Exception as error:  # the binding's own, one for each status
            raise FetchError(reason, f"nixl: {name}: {error}") from error


def _imported(module: str, *, extra: str) -> Any:
    """Raises ConfigError, which names the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"weights.transport = {extra!r} needs the extra: {how_to_install(extra)} ({error})"
        ) from error


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _decode(token: bytes, into: memoryview | None) -> _Token:
    """Raises WireError for what is no token, or not one for `into`."""
    try:
        found = _decoder.decode(token)
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError(f"a token of another transport: {error}") from error
    if into is not None and found.nbytes != len(into):
        raise WireError(f"a token for {found.nbytes} bytes, not for {len(into)}")
    return found
