"""The hosts of a run, as far as they are known before it starts: this machine, the
hosts of a cluster, or hosts that the user describes.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from rollweave.core.mechanisms.membership.bindings import one_machine
from rollweave.core.policy.binding import empty_pools, unserved
from rollweave.io.machine import cores, gpu_memory, memory_bytes
from rollweave.runtime.hosts.cluster import slot_of
from rollweave.runtime.hosts.hosts import devices as gpus
from rollweave.runtime.hosts.hosts import hosts_here
from rollweave.runtime.preflight.checks import Check, fail, warn
from rollweave.schema.base import Struct
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import FieldError, HostError
from rollweave.schema.hosts import Device, HostSlot, Resources

HERE = "this host"
"""Name of the machine of a run without a cluster."""


class PlannedHost(Struct, frozen=True, kw_only=True):
    """A host, whose GPUs have the indices of `slot`, and the memory that a run may use,
    0 if unknown. Hosts of one `machine` share its resources.
    """

    slot: HostSlot
    name: str
    machine: str
    resources: Resources


class Site(Struct, frozen=True, kw_only=True):
    """The hosts of a run: the `described` hosts, or the existing ones if none are."""

    described: Mapping[str, Resources] | None = None

    @property
    def is_here(self) -> bool:
        """True if the run would start from this machine, which therefore has its files,
        and reaches its servers. A run that is planned for described hosts needs no more
        than the model's shape here.
        """
        return self.described is None

    def hosts(self, config: RunConfig) -> list[PlannedHost] | None:
        """Return the hosts; None for those of a cluster, which have not joined.

        A run without a cluster has one host. Raises FieldError if another number is
        described, and if a GPU of this machine does not work.
        """
        if self.described is None:
            return _this_machine(config) if config.cluster is None else None
        if config.cluster is not None:
            return [
                PlannedHost(
                    slot=slot_of(config.pools, number, name, host),
                    name=name,
                    machine=name,
                    resources=host,
                )
                for number, (name, host) in enumerate(self.described.items())
            ]
        if len(self.described) != 1:
            rule = "describe one host without [cluster]"
            raise FieldError("--hosts", rule, len(self.described))
        ((name, host),) = self.described.items()
        return _one_machine(config, name, host)

    def check_pools(self, config: RunConfig) -> Iterator[Check]:
        """Refuse pools without hosts, unless their fallbacks have some."""
        if self.described is None or config.cluster is None:
            return
        empty = empty_pools(config.pools, self.described.values())
        needed = unserved(config, empty)
        for pool in empty:
            yield (fail if pool in needed else warn)(pool.field, pool.describe())


def _this_machine(config: RunConfig) -> list[PlannedHost]:
    try:
        devices = _gpus_here(config.model.device)
    except (RuntimeError, AssertionError, HostError) as error:
        got = f"{config.model.device} ({error})"
        raise FieldError("model.device", "be a CUDA device that works", got) from error
    _, available = memory_bytes()
    resources = Resources(cpus=cores(), memory_bytes=available, devices=devices)
    return _one_machine(config, HERE, resources)


def _one_machine(config: RunConfig, machine: str, resources: Resources) -> list[PlannedHost]:
    """Return the hosts for which a machine with these resources stands."""
    relays = config.weights.relays
    names = hosts_here(relays).by_number
    if config.model.device == "cpu":
        resources = msgspec.structs.replace(resources, devices=())
    indices = [device.index for device in resources.devices]
    return [
        PlannedHost(
            slot=slot,
            name=names[slot.number].name if relays else machine,
            machine=machine,
            resources=resources,
        )
        for slot in one_machine(relays, config.pools, indices)
    ]


def _gpus_here(device: str) -> tuple[Device, ...]:
    """Return the GPUs of this machine that a run with this `model.device` uses, each
    with its free memory.
    """
    if device == "cpu":
        return ()
    # without the driver's program, all processes use the first GPU
    listed = gpus() or ((Device(index=0, kind="", memory_bytes=0),) if device == "cuda" else ())
    try:
        return tuple(
            msgspec.structs.replace(gpu, memory_bytes=gpu_memory(f"cuda:{place}")[1])
            for place, gpu in enumerate(listed)
        )
    except (RuntimeError, AssertionError):
        if device == "auto":
            return ()  # torch sees none of them
        raise


def with_device(config: RunConfig, hosts: Sequence[PlannedHost] | None) -> RunConfig:
    """Return the configuration with the device that `auto` stands for on these hosts:
    the CPU if they are not known.
    """
    if config.model.device != "auto":
        return config
    device = "cuda" if any(host.resources.devices for host in hosts or ()) else "cpu"
    model = config.model.model_copy(update={"device": device})
    return config.model_copy(update={"model": model})
