"""Messages between a run, or the program of a role, and the process of Ray's driver
(`driver_process`), which keeps agents on the nodes of a cluster, or deploys serverless
functions.
"""

from rollweave.schema.base import TaggedStruct
from rollweave.schema.hosts import Programs
from rollweave.schema.roles import DeployedFunction, DeployedRole


class ConnectRay(TaggedStruct, frozen=True, kw_only=True):
    """Connect to the Ray cluster at `address`; "auto" is the cluster of this machine's
    node. Answered by `RayConnected` or `DriverFailed`.
    """

    address: str


class StartAgents(TaggedStruct, frozen=True, kw_only=True):
    """Start an agent on every node of the cluster, and restart an agent that ends; or,
    with `hosts`, on this number of nodes. For each of the `labels`, the nodes include a
    node that has it.
    """

    controller: tuple[str, int]
    secret: bytes
    join_s: float
    hosts: int | None = None
    labels: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    programs: Programs = Programs()


class DeployFunctions(TaggedStruct, frozen=True, kw_only=True):
    """Deploy functions on the Ray cluster at `address`, or on a cluster of this machine
    alone. Answered by `FunctionsDeployed`, or by `DriverFailed`, after which no
    function is left on the cluster.

    `owner` distinguishes the applications of runs and programs, and `secret` is part of
    their URLs. `archive` has the user's modules (`runtime/hosts/user_files`), with its
    `digest`. Each instance reserves `cpus`.
    """

    address: str | None
    owner: str
    secret: str
    functions: tuple[DeployedFunction | DeployedRole, ...]
    archive: bytes
    digest: bytes
    cpus: float


class StopDriver(TaggedStruct, frozen=True, kw_only=True):
    """End all agents, remove all functions, leave the cluster, and exit."""


DriverCommand = ConnectRay | StartAgents | DeployFunctions | StopDriver
"""Messages to the driver."""


class RayConnected(TaggedStruct, frozen=True, kw_only=True):
    """`address` is the address of this machine's node, `hosts` the number of nodes that
    can have an agent.
    """

    address: str
    hosts: int


class FunctionsDeployed(TaggedStruct, frozen=True, kw_only=True):
    """The URL of each function, by its name."""

    urls: dict[str, str]


class DriverFailed(TaggedStruct, frozen=True, kw_only=True):
    """The first command has failed."""

    error: str


class AgentPending(TaggedStruct, frozen=True, kw_only=True):
    """Ray has not started the agent of this node, because others use its resources."""

    host: str
    reason: str


class AgentEnded(TaggedStruct, frozen=True, kw_only=True):
    """The agent of this node could not be started, or ended with an error. It is
    started again.
    """

    host: str
    error: str


DriverAnswer = RayConnected | FunctionsDeployed | DriverFailed
"""The first message of the driver."""

AgentReport = AgentPending | AgentEnded

DriverReport = DriverAnswer | AgentReport
"""Messages of the driver."""
