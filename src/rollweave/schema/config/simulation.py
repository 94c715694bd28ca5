"""The section `[sim]`: simulated hardware; and the files beside a configuration: the
serving engines of `rollweave simulate --serving`, from which a run may borrow
(`[loans]`), and the hosts of `rollweave train --dry-run --hosts`, before they have
joined. `schema/config/loading.py` reads them.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rollweave.schema.config.values import Count, Positive, PositiveInt, Section
from rollweave.schema.errors import FieldError, FieldErrors
from rollweave.schema.hosts import Device, Resources

Sharing = Literal[
    "cooperative",
    "ttft",
    "tpot",
    "spatial",
    "preemption",
    "partition",
    "multiplexing",
    "autoscaling",
    "serverless",
    "spot",
]
"""Ways in which serving and rollouts share an engine: ours (rollweave_sim.serving), and
ROSE's baselines (rollweave_papers.sharing), whose last two have engines that come and
go without serving.
"""

WITHOUT_USERS: tuple[Sharing, ...] = ("serverless", "spot")
"""Ways of `Sharing` in which engines have no users."""


class SimConfig(Section):
    """The simulated engines, environments and trainer of `rollweave simulate`
    (packages/sim).
    """

    model: str = Field(description="Model shape, by name (rollweave_sim/hardware.py).")
    gpu: str = Field(
        "h800",
        description="GPU of engines and trainer, by name (rollweave_sim/hardware.py), or a .json "
        "file with measured step times of an engine; an h800 trains where this one does not. A "
        "pool has the GPU that its `resource` names, if it names one.",
    )
    link: str = Field(
        "rdma",
        description="Link over which weights reach the engines and the relays of other sites, by "
        "name (rollweave_sim/hardware.py).",
    )


class ServingFile(Section):
    """Simulated serving engines beside a run, and their users' requests (ROSE §3.2)."""

    engines: PositiveInt = Field(
        description="Number of serving engines, each with as many GPUs as the first of the run's "
        "own has; all of them lend."
    )
    model: str | None = Field(
        None,
        description="Shape of the model that is served (rollweave_sim/hardware.py); must be given "
        "for engines with users.",
    )
    prefill: Count = Field(
        0,
        description="Number of these that compute prompts for the others, which sample; 0: each "
        "does both.",
    )
    rate: Positive | None = Field(
        None, le=100_000, description="Mean number of requests per second, drawn with bursts."
    )
    trace: str | None = Field(
        None,
        description="CSV file of requests instead, with the columns TIMESTAMP, ContextTokens and "
        "GeneratedTokens, as the public Azure traces have. With sharing spot: of the columns "
        "TIMESTAMP and Engines, the number of them from that second on; drawn if unset.",
    )
    ttft_s: Positive = Field(0.5, description="Promised seconds to the first token.")
    tpot_s: Positive = Field(0.15, description="Promised seconds of each further token.")
    lease_s: Positive = Field(
        10.0, description="Seconds for which rollouts keep the KV of a finished turn (ROSE App. C)."
    )
    sharing: Sharing = Field(
        "cooperative",
        description="How serving and rollouts share an engine (ROSE §6). "
        "cooperative: rollouts compute while serving meets both of its limits; ttft, tpot: "
        "while it meets that one; spatial: both compute step by step in turn; preemption: the "
        "same, and lent engines forget finished turns; partition: and each has half of the "
        "memory for KV; multiplexing: the one whose next token is due first computes, rollouts "
        "by four times the limit of serving; autoscaling: an engine holds one model at a time, "
        "and loads rollouts once it had no requests for a minute. Engines without users that come "
        "and go: serverless, each for 15 minutes; spot, as they are available.",
    )

    @property
    def has_users(self) -> bool:
        """True if the engines serve users."""
        return self.sharing not in WITHOUT_USERS

    @model_validator(mode="after")
    def _rules(self) -> Self:
        rules = self._of_users() if self.has_users else self._without_users()
        if errors := [*rules]:
            raise FieldErrors(errors)
        return self

    def _of_users(self) -> Iterator[FieldError]:
        if self.model is None:
            yield FieldError("model", f"be given unless sharing is {_or(WITHOUT_USERS)}", "none")
        if (self.rate is None) == (self.trace is None):
            got = "neither" if self.rate is None else "both"
            yield FieldError("rate", "be given, or a trace in its place", got)
        if self.prefill >= self.engines:
            yield FieldError("prefill", f"be less than the {self.engines} engines", self.prefill)

    def _without_users(self) -> Iterator[FieldError]:
        names = ["model", "prefill", "rate", *(["trace"] if self.sharing == "serverless" else [])]
        for name in names:
            if value := getattr(self, name):
                rule = f"be left out with sharing {self.sharing}, whose engines have no users"
                yield FieldError(name, rule, value)


def _or(names: tuple[str, ...]) -> str:
    return " or ".join(names)


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
