"""The hosts of a run by number: how processes are started there, and the addresses on
which they listen; and the CPU cores, memory and GPUs of this host.

The driver's program (nvidia-smi) lists the GPUs: an agent does not need torch, which
takes seconds and memory to import.
"""

import functools
import ipaddress
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rollweave.io.child import Spawn, child_of
from rollweave.io.machine import cores, memory_bytes
from rollweave.schema.errors import HostError
from rollweave.schema.hosts import Device, Program, Programs, Resources, Share

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
    if program is Program.TRAINER:
        # its threads follow the idle cores: none may spin on a core of others
        variables["OMP_WAIT_POLICY"] = "PASSIVE"
    if share.devices is not None:
        variables |= {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, share.devices)),
            # CUDA counts GPUs as the driver's program lists them
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }
    return variables


LIST_S = 20.0
"""Maximum seconds for the driver's program."""

QUERY = ("--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")


def resources(labels: Mapping[str, float] | None = None) -> Resources:
    """Return the resources of this host that CUDA_VISIBLE_DEVICES leaves visible.

    Raises `HostError` if the driver's program fails.
    """
    return Resources(
        cpus=cores(), memory_bytes=memory_bytes()[0], devices=devices(), labels=dict(labels or {})
    )


def gpus_for(device: str) -> tuple[int, ...]:
    """Return the indices of the GPUs of this host that processes with this
    `model.device` may use.

    Raises `HostError` if the driver's program fails.
    """
    return () if device == "cpu" else tuple(gpu.index for gpu in devices())


def devices() -> tuple[Device, ...]:
    """Return the visible GPUs. Raises `HostError`."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        done = subprocess.run(
            [program, *QUERY], capture_output=True, text=True, timeout=LIST_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise HostError(f"the GPUs of this host must be listed by {program}, got {error}") from None
    return visible(parse(done.stdout), os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse(listing: str) -> list[tuple[str, Device]]:
    """Return the GPUs of a listing, each with its unique id. Raises `HostError`."""
    devices: list[tuple[str, Device]] = []
    for line in listing.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4 or not fields[0].isdecimal() or not fields[3].isdecimal():
            raise HostError(f"a line of the GPUs' listing must have four fields, got {line!r}")
        index, unique, kind, mebibytes = fields
        devices.append(
            (unique, Device(index=int(index), kind=kind, memory_bytes=int(mebibytes) << 20))
        )
    return devices


def visible(devices: list[tuple[str, Device]], setting: str | None) -> tuple[Device, ...]:
    """Return the GPUs that this value of CUDA_VISIBLE_DEVICES leaves, in its order."""
    if setting is None:
        return tuple(device for _, device in devices)
    chosen: list[Device] = []
    for name in filter(None, (part.strip() for part in setting.split(","))):
        matching = [
            device
            for unique, device in devices
            if name == str(device.index) or (not name.isdecimal() and unique.startswith(name))
        ]
        if not matching:
            break  # CUDA ignores what follows a device that does not exist
        chosen.append(matching[0])
    return tuple(chosen)
