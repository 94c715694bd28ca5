"""The hosts of a run by number: how processes are started there, and the addresses on
which they listen.
"""

import functools
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass, field

from rollweave.io.child import Spawn, child_of
from rollweave.schema.hosts import Program, Programs, Share

LOOPBACK = ipaddress.IPv4Address("127.0.0.1")

FIRST_ADDRESS = ipaddress.IPv4Address("127.0.0.2")
"""Address of host 0 if one machine stands for several hosts; the others have the
following addresses.

Processes see each loopback address as a separate host, and so does `tc`.
"""

Starting = Callable[[Program, Share], Spawn]
"""Returns what starts processes of a program, each with this share of the host."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host: how to start a process there, and its address. `is_here` is true for
    this machine.
    """

    name: str
    address: str
    starting: Starting
    is_here: bool = False


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


def hosts_here(count: int, programs: Programs | None = None) -> Hosts:
    """Return this machine as `count` hosts with a relay each, or as one host
    without.
    """
    starting = functools.partial(start_here, programs or Programs())
    names = {number: f"host {number}" for number in range(count)} or {0: "this host"}
    addresses = {number: FIRST_ADDRESS + number for number in range(count)} or {0: LOOPBACK}
    return Hosts(
        by_number={
            number: Host(name=name, address=str(addresses[number]), starting=starting, is_here=True)
            for number, name in names.items()
        }
    )


def start_here(programs: Programs, program: Program, share: Share) -> Spawn:
    """Return what starts processes of a program on this machine."""
    return child_of(programs.module(program), env=environment(program, share))


def environment(program: Program, share: Share) -> dict[str, str]:
    """Return the environment variables by which a process keeps to its share of the
    host. Roles are the user's own code, and tokenize as they like.
    """
    variables = {"OMP_NUM_THREADS": str(share.threads)}
    if program is not Program.ROLE:
        variables |= {"MKL_NUM_THREADS": str(share.threads), "TOKENIZERS_PARALLELISM": "false"}
    if share.devices is not None:
        variables |= {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, share.devices)),
            # CUDA counts GPUs as the driver's program lists them
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }
    return variables
