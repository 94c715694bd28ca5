"""The resources of this host: CPU cores, memory and GPUs.

The driver's program (nvidia-smi) lists the GPUs: an agent does not need torch, which
takes seconds and memory to import.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping

from rollweave.io.machine import cores, memory_bytes
from rollweave.schema.errors import HostError
from rollweave.schema.hosts import Device, Resources

LIST_S = 20.0
"""Maximum seconds for the driver's program."""

QUERY = ("--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits")


def resources(labels: Mapping[str, float] | None = None) -> Resources:
    """Return the resources of this host that CUDA_VISIBLE_DEVICES leaves visible.

    Raises `HostError` if the driver's program fails.
    """
    return Resources(
        cpus=cores(),
        memory_bytes=memory_bytes()[0],
        devices=devices(),
        labels=dict(labels or {}),
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
