"""Stand-ins for Mooncake's transfer engine and NIXL's agent, with the calls that
carriers make. They read memory of this process that is registered.
"""

import ctypes
from typing import Any

registered: dict[int, int] = {}
"""Address → bytes, of all engines and agents."""

failing = {"call": ""}
"""The call that fails from now on."""


def register(address: int, nbytes: int, device: int = 0, _: str = "") -> int:
    assert (device, address in registered) == (0, False), "an address is registered once"
    registered[address] = nbytes
    return address


def read(into: int, origin: int, nbytes: int) -> None:
    assert registered[into] == registered[origin] == nbytes, "only registered memory is used"
    ctypes.memmove(into, origin, nbytes)


class TransferEngine:
    """Its calls return 0 for success."""

    def initialize(self, *arguments: str) -> int:
        return int(arguments != ("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))

    def get_rpc_port(self) -> int:
        return 12345

    def register_memory(self, address: int, nbytes: int) -> int:
        return -1 if failing["call"] == "register" else 0 * register(address, nbytes)

    def unregister_memory(self, address: int) -> None:
        del registered[address]

    def transfer_sync_read(self, peer: str, into: int, origin: int, nbytes: int) -> int:
        assert peer == "127.0.0.1:12345"
        return 1 if failing["call"] == "read" else read(into, origin, nbytes) or 0


class nixl_agent:
    transfers = 0

    def __init__(self, name: str, backends: list[str]) -> None:
        assert backends == ["UCX"]
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name == failing["call"]:
            raise RuntimeError("no more")
        return {
            "register_memory": lambda places, mem_type: register(*places[0]),
            "deregister_memory": registered.pop,
            "get_agent_metadata": self.name.encode,
            "add_remote_agent": bytes.decode,
            "get_xfer_descs": lambda places, mem_type: [
                place[:2] for place in places if not place[2]
            ],
            "initialize_xfer": self._prepared,
            "transfer": lambda transfer: read(*transfer) or "PROC",
            "check_xfer_state": self._state,
            "release_xfer_handle": self._released,
        }[name]

    def _prepared(self, kind: str, ours: Any, theirs: Any, peer: str) -> list[int]:
        assert (kind, ours[0][1], type(peer)) == ("READ", theirs[0][1], str)
        nixl_agent.transfers += 1
        return [ours[0][0], *theirs[0]]

    def _state(self, transfer: list[int]) -> str:
        """Return PROC twice, and then the last state."""
        transfer.append(0)
        state = {"stuck": "PROC", "broken": "ERR"}.get(failing["call"], "DONE")
        return state if len(transfer) > 5 else "PROC"

    def _released(self, transfer: list[int]) -> None:
        nixl_agent.transfers -= 1


def nixl_agent_config(*, backends: list[str]) -> list[str]:
    return backends
