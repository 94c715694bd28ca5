"""Addresses of HTTP servers: scheme, host and port, and nothing else; and the hosts to
which our servers may connect.

Invariants: one parser reads all addresses from users and clients; its errors repeat no
more of an address than scheme, host and port, because the rest may hold a password.
"""

import ipaddress
import re
import urllib.parse
from collections.abc import Iterable
from typing import Self

from rollweave.schema.base import Struct
from rollweave.schema.errors import FieldError

DEFAULT_PORTS = {"http": 80, "https": 443}

NAME = re.compile(r"(?!-)(?:[a-z0-9_-]{1,63}\.)*(?!\d+\.?$|0x[0-9a-f]*\.?$)[a-z0-9_-]{1,63}\.?")
"""Pattern of a host's name, in lower case.

A name whose last part is a number is refused: some read it as an IP address.
"""

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

METADATA = tuple(
    ipaddress.ip_network(text)
    for text in (
        "169.254.0.0/16",
        "fd00:ec2::/32",
        "fd20:ce::254",
        "100.100.100.200",
        "168.63.129.16",
    )
)
"""Addresses at which clouds offer a machine its credentials: link-local addresses and
AWS, Google, Alibaba and Azure in this order.
"""

_NETLOC = re.compile(
    r"(?:\[(?P<ip>[0-9a-f:.]+)\]|(?P<name>[^\[\]:@/?#\s]+))(?::(?P<port>[0-9]{1,5}))?"
)


def parse_address(text: str, *, field: str = "address") -> str:
    """Return the normal form of an address: `http://host:port`, in lower case, without
    a default port or a trailing slash.

    Raises FieldError if it is invalid, or has user info, a path, a query or a fragment.
    """
    rule, shown = "be http://host:port or https://host:port", _shown(text)
    try:
        if not text.isascii() or not text.isprintable() or " " in text or "%" in text:
            raise ValueError("it has other characters")
        parts = urllib.parse.urlsplit(text)
        host, port = (parts.hostname or "").lower(), parts.port
        address = ip_address(host)
    except ValueError:
        raise FieldError(field, rule, shown) from None
    if (
        parts.scheme not in DEFAULT_PORTS
        or port == 0
        or not (address or NAME.fullmatch(host))
        or len(host) > 253
    ):
        raise FieldError(field, rule, shown)
    more = {
        "user info": "@" in parts.netloc,
        "a path": parts.path not in ("", "/"),
        "a query": "?" in text,
        "a fragment": "#" in text,
    }
    if wrong := [name for name, there in more.items() if there]:
        raise FieldError(field, f"{rule}, without {' and '.join(wrong)}", f"one of {shown}")
    name = f"[{address}]" if isinstance(address, ipaddress.IPv6Address) else str(address or host)
    return f"{parts.scheme}://{name}" + (
        f":{port}" if port not in (None, DEFAULT_PORTS[parts.scheme]) else ""
    )


def parse_url(text: str, *, field: str = "url") -> str:
    """Return a URL with its scheme, host and port in normal form; path and query stay
    as they are.

    Raises FieldError if it is invalid, or has user info or a fragment.
    """
    try:
        parts = urllib.parse.urlsplit(text)
    except ValueError:
        raise FieldError(field, "be an http or https URL", _shown(text)) from None
    address = parse_address(f"{parts.scheme}://{parts.netloc}", field=field)
    rest = f"{parts.path}?{parts.query}" if parts.query else parts.path
    if "#" in text or not (rest.isascii() and rest.isprintable()) or " " in rest:
        rule = "be an http or https URL in printable ASCII, without a fragment"
        raise FieldError(field, rule, f"one of {_shown(text)}")
    return address + rest


def host_of(address: str) -> str:
    """Return the host of an address, without brackets."""
    return urllib.parse.urlsplit(address).hostname or ""


def ip_address(host: str) -> IpAddress | None:
    """Parse `host` as an IP address, with an IPv4-mapped IPv6 address as IPv4; None for
    a name.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def split_host(text: str) -> tuple[str, int | None]:
    """Split `host` or `host:port`, as in a Host header, into the host in lower case and
    the port (None without a port).

    An IPv6 address must be in brackets, and is returned without them. Raises
    ValueError.
    """
    match = _NETLOC.fullmatch(text.lower())
    if match is None:
        raise ValueError("it must be a host, or a host and a port")
    port = int(match["port"]) if match["port"] else None
    name = match["name"] or str(ip_address(str(ipaddress.IPv6Address(match["ip"]))))
    return name, port


def check_names(entries: Iterable[str], *, field: str) -> None:
    """Raise FieldError unless each entry is a host's name or an IP address, perhaps
    with a port ("gpu-7:8000").
    """
    for entry in entries:
        try:
            host, port = (entry, None) if ip_address(entry) else split_host(entry)
            right = (
                (ip_address(host) or NAME.fullmatch(host))
                and "%" not in host
                and port != 0
                and (port or 0) < 1 << 16
            )
        except ValueError:
            right = False
        if not right:
            rule = "be names of hosts and addresses, each alone or with a port"
            raise FieldError(field, rule, f"{entry!a:.100}")


def _shown(text: str) -> str:
    """Return what an error may show of an invalid address: nothing before an `@`,
    nothing after the host and its port.
    """
    scheme, colons, rest = text.partition("://")
    rest = re.split(r"[/?#\\]", rest if colons else scheme)[0].rpartition("@")[2]
    return f"{(scheme + colons if colons and scheme.isalpha() else '') + rest!a:.100}"


class Hosts(Struct, frozen=True):
    """The hosts to which connections are allowed, by name and by IP address."""

    names: frozenset[str]
    networks: tuple[IpNetwork, ...]

    @classmethod
    def parse(cls, entries: Iterable[str], *, field: str) -> Self:
        """Parse entries, each a host's name, an IP address or a network (10.0.0.0/8).

        Raises FieldError.
        """
        names, networks = set(), []
        for entry in entries:
            try:
                if "%" in entry:
                    raise ValueError("a scope is of no use to others")
                networks.append(ipaddress.ip_network(entry))
            except ValueError as error:
                if "/" in entry or ip_address(entry) or not NAME.fullmatch(entry.lower()):
                    rule = "be names of hosts, addresses, and networks as 10.0.0.0/8"
                    raise FieldError(field, rule, f"{entry!a:.100}") from error
                names.add(entry.lower())
        return cls(frozenset(names), tuple(networks))

    def admits_name(self, host: str) -> bool:
        """Return whether connections to the host are allowed, whatever address its name
        has.
        """
        return host.lower().rstrip(".") in self.names

    def admits_ip(self, text: str) -> bool:
        """Return whether connections to this IP address are allowed.

        One of `METADATA` must be an entry itself, not in a network.
        """
        address = ip_address(text.partition("%")[0])
        if address is None:
            return False
        around = [network for network in self.networks if address in network]
        return (
            any(network.num_addresses == 1 for network in around)
            if any(address in network for network in METADATA)
            else bool(around)
        )
