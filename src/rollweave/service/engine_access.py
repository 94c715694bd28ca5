"""The tokens of registered engines, which are kept outside the job database, and the
check of engine addresses.

Invariants: the tokens are in one file that only our user can read, never in
jobs.sqlite; a client of the service cannot make it connect to a host that
`serve.engine_hosts` does not admit, under any name.
"""

import asyncio
import socket
from pathlib import Path

import msgspec

from rollweave.io.disk import replace_file
from rollweave.schema.address import Hosts, host_of, ip_address
from rollweave.schema.errors import ConfigError

RESOLVE_S = 2.0
"""Maximum seconds to resolve the name of a new engine's host. Each later connection is
checked again.
"""

_Tokens = dict[str, str]


class EngineTokens:
    """The tokens of registered engines, by engine id.

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
        """Return an engine's token, or "" if it has none."""
        return self._tokens.get(engine_id, "")

    def put(self, engine_id: str, token: str) -> None:
        """Store an engine's token; an empty one removes the entry."""
        if token != self.get(engine_id):
            others = {name: value for name, value in self._tokens.items() if name != engine_id}
            self._write({**others, engine_id: token} if token else others)

    def remove(self, engine_id: str) -> None:
        self.put(engine_id, "")

    def _write(self, tokens: _Tokens) -> None:
        replace_file(self._path, msgspec.json.encode(tokens), mode=0o600)
        self._tokens = tokens


async def check_engine_host(hosts: Hosts, address: str) -> None:
    """Raise ConfigError if the service must not connect to the host in `address`.

    A name that cannot be resolved now passes: every connection is checked again.
    """
    host = host_of(address)
    if hosts.admits_name(host):
        return
    addresses = [host] if ip_address(host) else []
    if not addresses:
        try:
            async with asyncio.timeout(RESOLVE_S):
                entries = await asyncio.get_running_loop().getaddrinfo(
                    host, None, type=socket.SOCK_STREAM
                )
            addresses = sorted({str(entry[4][0]) for entry in entries})
        except (OSError, UnicodeError, TimeoutError):
            return
    if refused := [ip for ip in addresses if not hosts.admits_ip(ip)]:
        raise ConfigError(
            "address must be on a host that serve.engine_hosts admits, got "
            f"{host!r} at {', '.join(refused)}"
        )
