"""The tokens of registered engines, which are kept outside the database, and the check
of engines' addresses.

Invariants: engines' tokens are in one file that only our user can read, never in
jobs.sqlite; a client of the service cannot make it connect to a host that
`serve.engine_hosts` does not admit, by any name.
"""

import asyncio
import socket
from pathlib import Path

import msgspec

from rollweave.io.disk import replace_file
from rollweave.schema.address import Hosts, host_of, ip_address
from rollweave.schema.errors import ConfigError

RESOLVE_S = 2.0
"""Maximum seconds to resolve a new engine's name; later, addresses are checked on each
connection.
"""

_Tokens = dict[str, str]


class EngineTokens:
    """Tokens of registered engines, by the engine's id.

    Changes raise DiskError if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        """Read the file. Raises ConfigError if it is damaged."""
        self._path = path
        try:
            self._tokens = (
                msgspec.json.decode(path.read_bytes(), type=_Tokens) if path.exists() else {}
            )
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"{path} must hold the tokens of registered engines: {type(error).__name__}"
            ) from error

    def get(self, engine_id: str) -> str:
        """Return an engine's token, empty if it has none."""
        return self._tokens.get(engine_id, "")

    def put(self, engine_id: str, token: str) -> None:
        """Keep an engine's token; an empty one removes it."""
        if token != self.get(engine_id):
            kept = {name: one for name, one in self._tokens.items() if name != engine_id}
            self._write({**kept, engine_id: token} if token else kept)

    def remove(self, engine_id: str) -> None:
        self.put(engine_id, "")

    def _write(self, tokens: _Tokens) -> None:
        replace_file(self._path, msgspec.json.encode(tokens), mode=0o600)
        self._tokens = tokens


async def must_admit(hosts: Hosts, address: str) -> None:
    """Raise ConfigError for an engine's address to which the service may not connect,
    if its name can be resolved now.
    """
    host = host_of(address)
    if hosts.admits_name(host):
        return
    found = [host] if ip_address(host) else []
    if not found:
        try:
            async with asyncio.timeout(RESOLVE_S):
                entries = await asyncio.get_running_loop().getaddrinfo(
                    host, None, type=socket.SOCK_STREAM
                )
            found = sorted({str(entry[4][0]) for entry in entries})
        except (OSError, UnicodeError, TimeoutError):
            return  # it is checked on each connection
    if wrong := [one for one in found if not hosts.admits_ip(one)]:
        raise ConfigError(
            "address must be of a host that serve.engine_hosts admits, got "
            f"{host!r} at {', '.join(wrong)}"
        )
