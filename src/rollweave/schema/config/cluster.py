"""The sections `[cluster]`, `[pools]` and `[workers]`: the hosts of a run."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from rollweave.schema.config.values import (
    Count,
    PositiveInt,
    Section,
    Variable,
    matching,
)
from rollweave.schema.errors import FieldError

ENDPOINT = r"(\[[0-9a-fA-F:.]+\]|[^\[\]:@/?#\s]+):[0-9]{1,5}"
"""Pattern of an address and a port."""

Endpoint = Annotated[str, matching(ENDPOINT, "be an address and a port, HOST:PORT")]
Launcher = Annotated[
    str, matching(f"manual|local|ray(:{ENDPOINT})?", "be manual, local, ray, or ray:HOST:PORT")
]


class ClusterConfig(Section):
    """The hosts of a run. Without this section, it uses this machine alone.

    Every host runs an agent, which joins the controller; the controller's own machine
    takes part only if an agent is there, too.
    """

    launcher: Launcher = Field(
        "manual",
        description="How agents are started: manual, by the user (`rollweave host`); ray, by Ray, "
        "on the nodes of the cluster of the node that runs here, or, with ray:HOST:PORT, of the "
        "cluster with this address, of which this machine is a node; local, by the controller on "
        "this machine, to try a configuration.",
    )
    address: Endpoint | None = Field(
        None,
        description="Address of this machine, and port, on which the controller listens for "
        "hosts; port 0 is any free one. Unset: the loopback address with launcher local, the "
        "address of this node with launcher ray.",
    )
    hosts: PositiveInt | None = Field(
        None,
        description="Number of hosts that must have joined before the run begins; others may join "
        "later. With launcher ray, also the maximum number of nodes that the run takes; unset: "
        "all nodes, and the run begins with those that Ray has at the start.",
    )
    env: tuple[Variable, ...] = Field(
        (),
        description="Environment variables of the controller that processes on all hosts get, too; "
        "for example HF_TOKEN.",
    )
    files: tuple[str, ...] = Field(
        (),
        description="Files and folders below the working directory that every host gets, beside "
        "the modules and files that the tasks name.",
    )

    @property
    def on_ray(self) -> bool:
        """True if Ray starts the agents."""
        return self.launcher.startswith("ray")

    @property
    def ray(self) -> str:
        """The address of the Ray cluster; "auto" for that of the node here."""
        return self.launcher.partition(":")[2] or "auto"

    @property
    def host(self) -> str:
        """The address without the port; "" if it is unset."""
        return (self.address or "").rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port; 0 if it is unset."""
        return 0 if self.address is None else int(self.address.rpartition(":")[2])

    @model_validator(mode="after")
    def _launcher_has_what_it_needs(self) -> Self:
        if self.hosts is None and not self.on_ray:
            raise FieldError("hosts", f"be given with launcher {self.launcher}", "none")
        if self.address is None and self.launcher == "manual":
            raise FieldError("address", "be given with launcher manual", "none")
        if self.port >= 1 << 16:
            raise FieldError("address", f"have a port below {1 << 16}", self.address)
        return self


class PoolConfig(Section):
    """A class of hosts with the same resource (RollArt §5.2)."""

    resource: str = Field(
        min_length=1,
        description="Resource of all hosts of this pool: one that the agent names "
        "(`--resource`), or whole words of the name of the GPUs. If it has an amount, that "
        "limits the processes on a host's CPUs.",
    )
    fallback: tuple[str, ...] = Field(
        (), description="Pools that are used where this one has no free devices, in this order."
    )
    site: str = Field(
        "",
        description="Name of the cluster or data center of these hosts, if the link to the others "
        "is slow: each version of the weights crosses the link between two sites once.",
    )


class WorkersConfig(Section):
    """Rollout workers: processes that run environments, handlers and rewards (RollArt
    §6.1).
    """

    count: Count = Field(
        0, description="Number of worker processes; 0: all of this runs in the controller."
    )
    minimum: Count | None = Field(
        None,
        description="Number of workers that are always there; up to `count` start when attempts "
        "wait for a place, and end when they have not been needed for a minute, or for as long as "
        "a start takes if that is more. All `count`, always, if unset.",
    )
    pool: str | None = Field(
        None, description="Pool of hosts on which the workers run; any host if unset."
    )

    @property
    def elastic(self) -> bool:
        """True if the number of workers changes."""
        return self.minimum is not None and self.minimum < self.count

    @property
    def first(self) -> int:
        """The number of workers with which a world begins."""
        return self.count if self.minimum is None else self.minimum

    @model_validator(mode="after")
    def _minimum_is_at_most_count(self) -> Self:
        if self.minimum is not None and self.minimum > self.count:
            rule = f"be at most workers.count ({self.count})"
            raise FieldError("minimum", rule, self.minimum)
        return self
