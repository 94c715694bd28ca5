"""The file that describes hosts for `rollweave train --dry-run --hosts`, before they
have joined. `schema/config/loading.py` reads it.
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from rollweave.schema.config.values import Positive, PositiveInt, Section
from rollweave.schema.errors import FieldError
from rollweave.schema.hosts import Device, Resources

GIB = 1 << 30

Amount = Annotated[float, Field(gt=0, strict=True)]
"""An amount of a resource, which may be infinite; NaN is not above 0."""

MAX_HOSTS, MAX_GPUS = 10_000, 1_000
"""Maximum number of equal hosts, and of equal GPUs on a host."""


class GpuDescription(Section):
    """Equal GPUs of one host."""

    kind: str = Field(
        min_length=1, description="Name that the driver gives them, such as NVIDIA H200."
    )
    count: Annotated[PositiveInt, Field(le=MAX_GPUS)] = Field(
        1, description="Number of these GPUs."
    )
    memory_gib: Positive = Field(description="Memory of one of them, in GiB.")


class HostDescription(Section):
    """One host, or several equal ones."""

    name: str = Field(
        min_length=1, description="Name of the host; with count, -0, -1 and so on follow it."
    )
    count: Annotated[PositiveInt, Field(le=MAX_HOSTS)] = Field(
        1, description="Number of such hosts."
    )
    cpus: PositiveInt = Field(description="Number of its CPU cores.")
    memory_gib: Positive = Field(description="Its main memory, in GiB.")
    gpus: tuple[GpuDescription, ...] = Field((), description="Its GPUs, in order.")
    resources: dict[str, Amount] = Field(
        default_factory=dict,
        description="What its agent names with --resource; inf is a resource without an amount.",
    )

    @property
    def names(self) -> list[str]:
        """The names of these hosts."""
        if self.count == 1:
            return [self.name]
        return [f"{self.name}-{number}" for number in range(self.count)]

    def described(self) -> Resources:
        """Return the resources of one of these hosts."""
        kinds = [gpus for gpus in self.gpus for _ in range(gpus.count)]
        return Resources(
            cpus=self.cpus,
            memory_bytes=int(self.memory_gib * GIB),
            devices=tuple(
                Device(index=index, kind=gpus.kind, memory_bytes=int(gpus.memory_gib * GIB))
                for index, gpus in enumerate(kinds)
            ),
            labels=self.resources,
        )


class HostsFile(Section):
    hosts: Annotated[tuple[HostDescription, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names: set[str] = set()
        for name in (name for host in self.hosts for name in host.names):
            if name in names:
                raise FieldError("hosts", "have distinct names", f"{name!r} a second time")
            names.add(name)
        return self

    def by_name(self) -> dict[str, Resources]:
        """Return the resources of every host."""
        return {name: host.described() for host in self.hosts for name in host.names}
