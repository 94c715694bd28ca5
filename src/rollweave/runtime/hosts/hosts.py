"""The hosts of a run by number: how processes are started there, and the addresses on
which they listen.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollweave.io.child import Spawn, spawn

LOOPBACK = ipaddress.IPv4Address("127.0.0.1")

FIRST_ADDRESS = ipaddress.IPv4Address("127.0.0.2")
"""Address of host 0 if one machine stands for several hosts; the others have the
following addresses.

Processes see each loopback address as a separate host, and so does `tc`.
"""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host: how to start a process there, and its address."""

    name: str
    address: str
    spawn: Spawn = spawn

    @property
    def is_here(self) -> bool:
        """True if it is this machine."""
        return self.spawn is spawn

    def environment(self, devices: Sequence[int]) -> Mapping[str, str]:
        """Return variables that make only these GPUs visible to a process."""
        if not devices:
            return {}
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
            # CUDA counts GPUs as the driver's program lists them
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }


@dataclass(kw_only=True)
class Hosts:
    """All hosts of a run. A number is never used again for another host."""

    by_number: dict[int, Host] = field(default_factory=dict)

    def share_memory(self, one: int, other: int) -> bool:
        """Return whether processes of these hosts can map the same memory."""
        hosts = [self.by_number.get(number) for number in (one, other)]
        return one == other or all(host is not None and host.is_here for host in hosts)

    def host(self, number: int) -> Host:
        """Return a host. Raises OSError if it is lost."""
        try:
            return self.by_number[number]
        except KeyError:
            raise OSError(f"host {number} is lost") from None


def hosts_here(count: int) -> Hosts:
    """Return this machine as `count` hosts with a relay each, or as one host
    without.
    """
    if not count:
        return Hosts(by_number={0: Host(name="this host", address=str(LOOPBACK))})
    return Hosts(
        by_number={
            number: Host(name=f"host {number}", address=str(FIRST_ADDRESS + number))
            for number in range(count)
        }
    )
