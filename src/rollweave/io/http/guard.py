"""The guard in front of every HTTP listener: it decides which requests reach a handler.

Invariants: a web page in a browser reaches no handler, whether it connects openly (a
foreign `Origin`), by a name that it has pointed at this host (a foreign `Host`), or by
a request that needs no preflight (any body but JSON); where the server has a token, no
handler but those of `OPEN` is reached without it; a request is refused before its body
is read.
"""

import contextlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
import stat
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware

from rollweave.schema.address import IpNetwork, ip_address, split_host
from rollweave.schema.errors import ConfigError

OPEN = frozenset({"/health", "/ping", "/ready"})
"""Paths that require no token, for programs that start and monitor servers: the
existence of a server is no secret.
"""

TOKEN_BYTES = 32
"""Number of random bytes in a generated token."""

JSON = "application/json"
TYPES = ([JSON], ["application/msgpack"])
"""Types of bodies, which no page of another site can send without a preflight."""

OWN_SITE = ("same-origin", "none")
"""Values of Sec-Fetch-Site in a browser's requests that do not come from another site's
page.
"""


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refused(web.HTTPException):
    """The guard refuses a request with `status`; `reason` is the rule that it
    breaks.
    """

    def __init__(self, status: int, rule: str) -> None:
        self.status_code = status
        super().__init__(
            reason=rule, headers={"WWW-Authenticate": "Bearer"} if status == 401 else None
        )


class Guard:
    """Admits requests that carry `token`, or all requests if `token` is None. Clients
    may call the server by its address or one of `hosts`.

    Each of `hosts` is a name, or a name and a port ("gpu-7" or "gpu-7:8000"). Clients
    call a server on the loopback by localhost or a loopback address, with the server's
    port. They call a server on another address by any IP address, since no foreign name
    server can forge one, or by the name of this machine.

    Clients at addresses in `networks` need no token.
    """

    def __init__(
        self, *, token: str | None, hosts: Iterable[str] = (), networks: Iterable[IpNetwork] = ()
    ) -> None:
        self._token, self._networks = token, tuple(networks)
        self._hosts = frozenset(host.lower() for host in hosts)
        self._machine = socket.gethostname().lower()

    def middleware(self) -> Middleware:
        """Check a request before its handler runs.

        This must be the innermost aiohttp middleware, so that the application's own
        middlewares write the errors.
        """

        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            local = (
                request.transport.get_extra_info("sockname")
                if request.transport is not None
                else None
            )
            headers = {name: request.headers.getall(name, []) for name in _READ}
            refusal = self.objection(
                request.path,
                headers,
                local=local[:2] if local else ("", 0),
                client=request.remote or "",
                has_body=request.body_exists,
                target=request.raw_path,
            )
            if refusal is not None:
                raise Refused(*refusal)
            return await handler(request)

        return check

    def objection(
        self,
        path: str,
        headers: Mapping[str, Sequence[str]],
        *,
        local: tuple[str, int],
        has_body: bool,
        target: str = "/",
        client: str = "",
    ) -> tuple[int, str] | None:
        """Return the HTTP status and the broken rule if the request is refused.
        `headers` has all values of the headers in `_READ`; `local` is the server's end
        of the connection, `client` the address of the other end, and `target` the
        target in the request's first line.
        """
        (host, *more), origins = headers["Host"] or [""], headers["Origin"]
        if more or not self._is_called(host.lower(), local):
            return 421, f"Host must be one of {', '.join(self.names(local))}, got {host!a:.100}"
        if not target.startswith("/") and target != "*" and _authority(target) != host.lower():
            return (
                421,
                "the request's target must be a path, or an address with the host of Host, got "
                f"{target!a:.100}",
            )
        if any(origin not in (f"http://{host}", f"https://{host}") for origin in origins):
            return (
                403,
                "Origin must be absent, or that of this server: no other site's page may ask, "
                f"got {origins[0]!a:.100}",
            )
        if any(site not in OWN_SITE for site in headers["Sec-Fetch-Site"]):
            return 403, "the request must not come from another site's page"
        if (
            self._token is not None
            and path not in OPEN
            and not self._is_near(client)
            and not self._is_known(headers["Authorization"], headers.get("X-Api-Key", ()))
        ):
            return 401, "the request must carry this server's token (Authorization: Bearer TOKEN)"
        kinds = headers["Content-Type"]
        if has_body and [kind.partition(";")[0].strip().lower() for kind in kinds] not in TYPES:
            return 415, f"Content-Type must be {JSON}, got {kinds[0] if kinds else ''!a:.100}"
        return None

    def names(self, local: tuple[str, int]) -> list[str]:
        """Return the names by which clients may call the server, whose end of the
        connection is `local`.
        """
        address, port = local
        loopback = [f"{name}:{port}" for name in ("localhost", "127.0.0.1", "[::1]")]
        return [
            *loopback,
            *([] if _is_loopback(address) else [self._machine, "an IP address"]),
            *sorted(self._hosts),
        ]

    def _is_called(self, host: str, local: tuple[str, int]) -> bool:
        try:
            name, port = split_host(host)
        except ValueError:
            return False
        port = 80 if port is None else port
        written = f"[{name}]" if ":" in name else name
        if not self._hosts.isdisjoint((name, written, f"{written}:{port}")):
            return True
        if name == "localhost" or _is_loopback(name):
            return port == local[1]
        return not _is_loopback(local[0]) and (
            name == self._machine or ip_address(name) is not None
        )

    def _is_near(self, client: str) -> bool:
        address = ip_address(client)
        return address is not None and any(address in network for network in self._networks)

    def _is_known(self, headers: Sequence[str], keys: Sequence[str]) -> bool:
        expected = (self._token or "").encode()
        token = sent_token(headers, keys).encode(errors="surrogateescape")
        return bool(token) and hmac.compare_digest(token, expected)


def sent_token(headers: Sequence[str], keys: Sequence[str]) -> str:
    """Return the token that a client sends, given the values of its headers
    `Authorization` and `X-Api-Key`: as a bearer token, or without a scheme as
    Anthropic's clients send it. Return "" for no token, for several tokens, and for
    another scheme.
    """
    scheme, _, token = headers[0].partition(" ") if headers else ("bearer", "", "")
    values = headers if token else keys
    if len(values) != 1 or scheme.lower() != "bearer":
        return ""
    return (token or keys[0]).strip()


_READ = ("Host", "Origin", "Sec-Fetch-Site", "Authorization", "X-Api-Key", "Content-Type")


def _authority(target: str) -> str:
    """Return host and port of a request's target in lower case if the target is a
    complete address, else "".
    """
    return re.split(r"[/?#\\]", target.partition("://")[2])[0].lower()


def _is_loopback(name: str) -> bool:
    address = ip_address(name)
    return address is not None and address.is_loopback


# Clients that need no token.

SHORTEST_PREFIX = {4: 8, 6: 32}
"""Minimum length of a network's prefix, by the version of its addresses: the largest
private network has 10.0.0.0/8, and a provider a /32.
"""


def networks_of(texts: Iterable[str], *, named: str) -> tuple[IpNetwork, ...]:
    """Return the networks that these texts denote, for example 10.0.0.0/8 or an
    address. `named` is the option that has them. Raises ConfigError for a text that
    denotes none, and for a network of half the internet.
    """
    networks = []
    for text in texts:
        try:
            network = ipaddress.ip_network(text)
        except ValueError as error:
            raise ConfigError(f"{named} must be an address or a network: {error}") from None
        if network.prefixlen < SHORTEST_PREFIX[network.version]:
            raise ConfigError(
                f"{named} must be a network whose prefix has at least "
                f"{SHORTEST_PREFIX[network.version]} bits, since its clients need no token, "
                f"got {text}"
            )
        networks.append(network)
    return tuple(networks)


# Tokens.


def is_loopback_host(host: str) -> bool:
    """Return whether only this host can reach a server that listens at `host`."""
    return host == "localhost" or _is_loopback(host)


def given_token(variable: str | None, *, no_token: bool, host: str, named: str) -> str | None:
    """Return the token in the environment's `variable`; None without a variable, and
    with `no_token`.

    `named` is the setting that names the variable. Raises ConfigError for an invalid
    token, and for `no_token` where other hosts can connect to `host`.
    """
    if no_token and variable is not None:
        raise ConfigError(f"--no-token must not be given together with {named}")
    if no_token and not is_loopback_host(host):
        raise ConfigError(
            "--no-token must be left out where others than this host can connect, "
            f"got the address {host!r}"
        )
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise ConfigError(
            f"{named} must name a variable of the environment that is not empty, got {variable!r}"
        )
    if not (token.isprintable() and token.strip() == token):
        raise ConfigError(
            f"{named} must name a variable without a line's end or outer spaces, got {variable!r}"
        )
    return token


def server_token(variable: str) -> str:
    """Return the token that the environment holds. Raises ConfigError."""
    token = os.environ.get(variable, "").strip()
    if not token or not (token.isascii() and token.isprintable()):
        # no FieldError: the variable is no field of a section
        raise ConfigError(f"{variable} must be set in the environment, to printable ASCII")
    return token


def optional_token(variable: str) -> str:
    """Return the token that the environment holds, or "" without one. Raises
    ConfigError.
    """
    return server_token(variable) if os.environ.get(variable) else ""


def kept_token(path: Path) -> str:
    """Return the token in the file `path`. A missing file is created with a new token,
    readable by its owner alone (mode 600).

    Raises ConfigError for a file that others may read or that holds no token, and if a
    missing file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            _write_new(path, secrets.token_urlsafe(TOKEN_BYTES))
    except OSError as error:
        raise ConfigError(
            f"{path} must be a file that a token can be kept in: {error.strerror or error}"
        ) from error
    return read_token(path)


def read_token(path: Path) -> str:
    """Return the token in the file `path`. Raises ConfigError for a file that is
    missing, that others may read, or that holds no token.
    """
    try:
        with path.open("rb") as file:
            status, content = os.fstat(file.fileno()), file.read(4096)
    except OSError as error:
        raise ConfigError(
            f"{path} must be a file with the server's token: {error.strerror or error}"
        ) from error
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(
            f"{path} must be a file that its owner alone may read (chmod 600), got mode {mode:o}"
        )
    token = content.decode("ascii", errors="replace").strip()
    if len(token) < 16 or not token.isprintable() or not token.isascii():
        raise ConfigError(
            f"{path} must hold a token of 16 printable characters or more; delete "
            "the file to get a new one"
        )
    return token


def _write_new(path: Path, token: str) -> None:
    """Create the file atomically; if another process was quicker, keep the other
    process's token.
    """
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(token + "\n")
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
    finally:
        new.unlink()
