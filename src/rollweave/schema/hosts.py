"""Hosts as the core knows them, their devices, and the messages between the controller
and the agent of a host (`runtime/hosts`).

An agent opens one connection for its own messages, which begins with `JoinHost`, and
one for each process that it starts, which begins with `AttachProcess` and then carries
the process's own frames.
"""

from collections.abc import Mapping

import msgspec

from rollweave.schema.base import Struct, TaggedStruct

ALIVE_S = 0.5
"""Seconds between two signs of life of an agent and its controller, in each
direction.
"""


class HostSlot(Struct, frozen=True, kw_only=True):
    """A host of the world, by its number in this run.

    `devices` are the indices of its GPUs, `pools` the pools that it belongs to. `slots`
    is the number of processes on its CPUs that it offers to a pool, for pools that it
    offers a limited amount of. Hosts of the same `machine` share its memory: on one
    machine, several of its addresses may stand for hosts.
    """

    number: int
    name: str = ""
    machine: str = ""
    cpus: int = 1
    devices: tuple[int, ...] = ()
    pools: tuple[str, ...] = ()
    slots: dict[str, int] = msgspec.field(default_factory=dict)


class RankSlot(Struct, frozen=True, kw_only=True):
    """The place of a rank of the trainer: `devices` of host number `host`, or the CPU
    there.
    """

    host: int = 0
    devices: tuple[int, ...] = ()


class Device(Struct, frozen=True, kw_only=True):
    """One GPU. `index` is its number on its host, as in CUDA_VISIBLE_DEVICES."""

    index: int
    kind: str
    """Name that the driver gives it, for example "NVIDIA H200"."""
    memory_bytes: int


class Resources(Struct, frozen=True, kw_only=True):
    """The resources of a host.

    `labels` are those that the user names, as in Ray, with their amounts; an infinite
    one is not limited.
    """

    cpus: int
    memory_bytes: int
    devices: tuple[Device, ...] = ()
    labels: Mapping[str, float] = msgspec.field(default_factory=dict)


class JoinHost(TaggedStruct, frozen=True, kw_only=True):
    """Offer a host to the controller. Answered by `HostAccepted` or `HostRefused`.

    `package` is the version of Rollweave there; `address` is the IP address at which
    other hosts reach this one.
    """

    name: str
    address: str
    package: str
    resources: Resources


class AttachProcess(TaggedStruct, frozen=True, kw_only=True):
    """Assign this connection to the process number `process` of host `host`."""

    host: str
    process: int
    key: bytes
    """The key of the `StartProcess` that this answers. It distinguishes connections of
    this membership from those of earlier ones.
    """


class ProcessStarted(TaggedStruct, frozen=True, kw_only=True):
    process: int
    pid: int


class ProcessLogged(TaggedStruct, frozen=True, kw_only=True):
    """Bytes that the process has written to its standard output or error."""

    process: int
    data: bytes


class ProcessEnded(TaggedStruct, frozen=True, kw_only=True):
    """The process is reaped, or could not be started for the reason in `error`."""

    process: int
    status: int = 0
    error: str = ""


class HostAlive(TaggedStruct, frozen=True, kw_only=True):
    """Sent every `ALIVE_S` seconds by both sides, so that silence is noticed."""


class HostReady(TaggedStruct, frozen=True, kw_only=True):
    """Answers `HostAccepted`. With an `error` the host cannot serve the run, and
    leaves.
    """

    error: str = ""


AgentMessage = (
    JoinHost | HostReady | AttachProcess | ProcessStarted | ProcessLogged | ProcessEnded | HostAlive
)


class UserModule(Struct, frozen=True, kw_only=True):
    """A top-level module that the value of a setting names."""

    setting: str
    value: str
    module: str


class HostAccepted(TaggedStruct, frozen=True, kw_only=True):
    """The host belongs to the run until its connection ends, or until it has received
    nothing from the controller for `lease_s`. Its agent then ends all processes there.

    `mark` is the content of the file `mark_path` in the run's directory, which every
    host must see. `env` is added to the environment of all processes. The user's files
    follow in messages `ArchivePart`, as an archive of `archive_bytes` with the SHA-256
    digest `digest`; the directory with them is the processes' working directory, where
    `modules` must be importable. Answered by `HostReady`.
    """

    lease_s: float
    mark_path: str
    mark: str
    env: dict[str, str] = msgspec.field(default_factory=dict)
    archive_bytes: int = 0
    digest: bytes = b""
    modules: tuple[UserModule, ...] = ()


class ArchivePart(TaggedStruct, frozen=True, kw_only=True):
    """The next part of the archive that `HostAccepted` announced."""

    data: bytes


class HostRefused(TaggedStruct, frozen=True, kw_only=True):
    error: str


class StartProcess(TaggedStruct, frozen=True, kw_only=True):
    """Start `python -m module` with `arguments`, and with `env` added to the agent's
    environment.

    Answered by a connection that begins with `AttachProcess` and by `ProcessStarted`,
    and finally by `ProcessEnded`.
    """

    process: int
    key: bytes
    module: str
    env: dict[str, str]
    arguments: tuple[str, ...] = ()


class KillProcess(TaggedStruct, frozen=True, kw_only=True):
    """Kill the process. `ProcessEnded` follows."""

    process: int


class ReleaseHost(TaggedStruct, frozen=True, kw_only=True):
    """The run is over: end all processes, and do not join again."""


ControllerMessage = (
    HostAccepted | ArchivePart | HostRefused | StartProcess | KillProcess | ReleaseHost | HostAlive
)


class AgentSpec(Struct, frozen=True, kw_only=True):
    """An agent that a launcher starts; see `runtime/hosts/agent.HostAgent`.

    It offers `labels`, and `cpus` cores and the GPUs `devices`; None stands for all
    that it sees.
    """

    name: str
    address: str
    controller: tuple[str, int]
    secret: bytes
    join_s: float
    cpus: int | None = None
    devices: tuple[int, ...] | None = None
    labels: dict[str, float] = msgspec.field(default_factory=dict)


class ConnectRay(TaggedStruct, frozen=True, kw_only=True):
    """Connect to the Ray cluster at `address`; "auto" is the cluster of this machine's
    node. Answered by `RayConnected` or `RayFailed`.
    """

    address: str


class StartAgents(TaggedStruct, frozen=True, kw_only=True):
    """Start an agent on every node of the cluster, and keep one there; or, with
    `hosts`, on so many nodes. These include, for each of the `labels`, a node that has
    it.
    """

    controller: tuple[str, int]
    secret: bytes
    join_s: float
    hosts: int | None = None
    labels: tuple[str, ...] = ()


class StopAgents(TaggedStruct, frozen=True, kw_only=True):
    """End all agents, and leave the cluster."""


RayCommand = ConnectRay | StartAgents | StopAgents


class RayConnected(TaggedStruct, frozen=True, kw_only=True):
    """`address` is that of this machine's node, `hosts` the number of nodes that can
    have an agent.
    """

    address: str
    hosts: int


class RayFailed(TaggedStruct, frozen=True, kw_only=True):
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


RayReport = RayConnected | RayFailed | AgentPending | AgentEnded
