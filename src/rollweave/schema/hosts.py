"""Hosts as the core knows them, their devices, and the messages between the controller
and the agent of a host (`runtime/hosts`).

An agent opens one connection for its own messages, which begins with `JoinHost`. For
each process that it starts, it opens another connection, which begins with
`AttachProcess` and then carries the process's own frames.

A host also has the memory that a process needs. Each package states what its processes
need, from the configuration and the shape of the model alone: `train/needs`,
`engine/needs`, `weights/needs`. A check before a run adds this up on each GPU and each
host (`runtime/preflight/layout`).
"""

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated

import msgspec

from rollweave.schema.base import Struct, TaggedStruct

ALIVE_S = 0.5
"""Seconds between two signs of life of an agent and its controller, in each
direction.
"""


NAME_CHARS = 64
"""Maximum characters of the name of a host, a resource or a version."""

KIND_CHARS = 128
"""Maximum characters of the name of a GPU."""

MAX_ITEMS = 256
"""Maximum number of GPUs, of resources and of variables that a host offers."""

MAX_THREADS = 4096
"""Maximum number of threads with which a process computes."""


class Program(StrEnum):
    """The programs that run on hosts. No others are started there (`Programs`)."""

    ENGINE = "engine"
    SERVER_ENGINE = "server_engine"
    TRAINER = "trainer"
    RELAY = "relay"
    WORKER = "worker"
    ROLE = "role"


class Programs(Struct, frozen=True, kw_only=True):
    """The module of each program. Tests and benches replace modules by smaller ones; a
    controller cannot, on another host.
    """

    engine: str = "rollweave.runtime.entrypoints.engine"
    server_engine: str = "rollweave.runtime.entrypoints.server_engine"
    trainer: str = "rollweave.runtime.entrypoints.trainer"
    relay: str = "rollweave.runtime.entrypoints.relay"
    worker: str = "rollweave.runtime.entrypoints.worker"
    role: str = "rollweave.runtime.entrypoints.role"

    def module(self, program: Program) -> str:
        """Return the main module of a program."""
        module: str = getattr(self, program.value)
        return module


class Share(Struct, frozen=True, kw_only=True):
    """The share of its host that a process gets: it computes with `threads` threads,
    and sees no GPUs but `devices`; None stands for all GPUs that its agent sees.
    """

    threads: Annotated[int, msgspec.Meta(ge=1, le=MAX_THREADS)] = 1
    devices: tuple[int, ...] | None = None


class HostSlot(Struct, frozen=True, kw_only=True):
    """A host of the world, by its number in this run.

    `devices` are the indices of its GPUs, `pools` the pools that it belongs to. `slots`
    is the number of processes on its CPUs that it offers to a pool, for pools with a
    limited amount. Hosts of the same `machine` share its memory: several addresses of
    one machine may stand for hosts. A host that `lends` has an engine that the run may
    borrow, and no process of the run beside this engine and a relay.
    """

    number: int
    name: str = ""
    machine: str = ""
    cpus: int = 1
    devices: tuple[int, ...] = ()
    pools: tuple[str, ...] = ()
    slots: dict[str, int] = msgspec.field(default_factory=dict)
    lends: bool = False


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

    `labels` are the resources that the user names, as in Ray, with their amounts; an
    infinite amount is not limited.
    """

    cpus: int
    memory_bytes: int
    devices: tuple[Device, ...] = ()
    labels: Mapping[str, float] = msgspec.field(default_factory=dict)


class JoinHost(TaggedStruct, frozen=True, kw_only=True):
    """Offer a host to the controller. Answered by `HostAccepted` or `HostRefused`.

    `package` is the version of Rollweave there; `address` is the IP address at which
    other hosts reach this one. The host runs modules and files of the user only with
    `user_code`, passes on the environment variables `variables` and no others, and, if
    it `lends` an engine, starts only this engine and a relay.
    """

    name: str
    address: str
    package: str
    resources: Resources
    user_code: bool = False
    variables: tuple[str, ...] = ()
    lends: bool = False


_ADDRESS = re.compile(r"[0-9A-Za-z._:%-]{1,255}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")


def wrong_name(name: str) -> str:
    """Return the rule that this name of a host breaks, with the name; "" if it breaks
    no rule.
    """
    if _is_name(name, NAME_CHARS):
        return ""
    return f"must have 1 to {NAME_CHARS} printable characters, got {name[:NAME_CHARS]!a}"


def wrong_offer(joined: JoinHost) -> str:
    """Return the line that refuses a host whose offer is not bounded and printable,
    since logs, terminals and files show the offer; "" if the offer may be shown.
    """
    if wrong := wrong_name(joined.name):
        return f"the name of a host {wrong}"
    for what, holds in _rules(joined):
        if not holds:
            return f"host {joined.name} must offer {what}, got another offer"
    return ""


def _rules(joined: JoinHost) -> Iterator[tuple[str, bool]]:
    offered = joined.resources
    devices, labels = offered.devices, offered.labels
    yield "an address", _ADDRESS.fullmatch(joined.address) is not None
    yield "a version of up to 64 printable characters", _is_name(joined.package, NAME_CHARS)
    yield "from 1 to 65,536 cores", 0 < offered.cpus <= 1 << 16
    yield "less than an exbibyte of memory", 0 <= offered.memory_bytes < 1 << 60
    yield (
        f"at most {MAX_ITEMS} GPUs, resources and variables each",
        max(len(devices), len(labels), len(joined.variables)) <= MAX_ITEMS,
    )
    yield (
        f"GPUs with distinct numbers, names of up to {KIND_CHARS} printable characters and less "
        "than an exbibyte of memory",
        len({device.index for device in devices}) == len(devices)
        and all(
            0 <= device.index < 1 << 16
            and _is_name(device.kind, KIND_CHARS)
            and 0 <= device.memory_bytes < 1 << 60
            for device in devices
        ),
    )
    yield (
        f"resources of up to {NAME_CHARS} printable characters in positive amounts",
        all(_is_name(name, NAME_CHARS) and amount > 0 for name, amount in labels.items()),
    )
    yield "names of variables", all(map(_VARIABLE.fullmatch, joined.variables))


def _is_name(text: str, most: int) -> bool:
    return 0 < len(text) <= most and text.isprintable() and text.strip() == text


class AttachProcess(TaggedStruct, frozen=True, kw_only=True):
    """Assign this connection to the process number `process` of host `host`."""

    host: str
    process: int
    key: bytes
    """The key of the `StartProcess` that this answers. It distinguishes connections of
    this membership from connections of earlier memberships.
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


class LenderState(TaggedStruct, frozen=True, kw_only=True):
    """The state of the engine that a host lends, for a run that chooses what it
    borrows: sent every ten seconds, and at once when `takes` or `recalled` changes.

    `kv_use` is the mean share (0 to 1) of the engine's KV memory that serving has used
    over the last hour. The engine `takes` turns unless serving needs all of its memory;
    if it is `recalled`, the run must give it back immediately.
    """

    kv_use: Annotated[float, msgspec.Meta(ge=0, le=1)]
    takes: bool = True
    recalled: bool = False


class HostAlive(TaggedStruct, frozen=True, kw_only=True):
    """Sent every `ALIVE_S` seconds by both sides, so that silence is noticed."""


class HostReady(TaggedStruct, frozen=True, kw_only=True):
    """Answers `HostAccepted`. With an `error` the host cannot serve the run, and
    leaves.
    """

    error: str = ""


AgentMessage = (
    JoinHost
    | HostReady
    | AttachProcess
    | ProcessStarted
    | ProcessLogged
    | ProcessEnded
    | LenderState
    | HostAlive
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
    host must see. `env` is added to the environment of all processes; it has variables
    that `JoinHost` names. The user's files follow in messages `ArchivePart`, as an
    archive of `archive_bytes` with the SHA-256 digest `digest`, but only to a host with
    `user_code`; the directory with them is the processes' working directory, where
    `modules` must be importable. With `loans` the run chooses the engines that it
    borrows, by what `LenderState` says. Answered by `HostReady`.
    """

    lease_s: float
    mark_path: str
    mark: str
    env: dict[str, str] = msgspec.field(default_factory=dict)
    archive_bytes: int = 0
    digest: bytes = b""
    modules: tuple[UserModule, ...] = ()
    loans: bool = False


class ArchivePart(TaggedStruct, frozen=True, kw_only=True):
    """The next part of the archive that `HostAccepted` announced."""

    data: bytes


class HostRefused(TaggedStruct, frozen=True, kw_only=True):
    error: str


class StartProcess(TaggedStruct, frozen=True, kw_only=True):
    """Start a program with a share of the host. The agent chooses its module, its
    options and its environment.

    Answered by a connection that begins with `AttachProcess` and by `ProcessStarted`,
    and finally by `ProcessEnded`.
    """

    process: int
    key: bytes
    program: Program
    share: Share


class KillProcess(TaggedStruct, frozen=True, kw_only=True):
    """Kill the process. `ProcessEnded` follows."""

    process: int


class ReleaseHost(TaggedStruct, frozen=True, kw_only=True):
    """The run is over: end all processes, and do not join again."""


ControllerMessage = (
    HostAccepted | ArchivePart | HostRefused | StartProcess | KillProcess | ReleaseHost | HostAlive
)


JOIN_S = 600.0
"""Maximum seconds in which an agent and its controller must reach each other."""


class AgentSpec(Struct, frozen=True, kw_only=True):
    """An agent that a launcher starts; see `runtime/hosts/agent.HostAgent`.

    It offers `labels`, and `cpus` cores and the GPUs `devices`; None stands for
    everything that the agent sees. The user of the run has started it, so it runs the
    user's code, and passes on `variables`.
    """

    name: str
    address: str
    controller: tuple[str, int]
    secret: bytes
    join_s: float
    cpus: int | None = None
    devices: tuple[int, ...] | None = None
    labels: dict[str, float] = msgspec.field(default_factory=dict)
    variables: tuple[str, ...] = ()
    programs: Programs = Programs()


PROCESS_BYTES = 400 << 20
"""Memory of an interpreter that has imported torch and transformers, and has computed:
350 to 450 MB were measured on a CPU.
"""

CUDA_BYTES = 640 << 20
"""Memory on a GPU of one process's CUDA context, kernels and workspaces. It was not
measured.
"""


class Need(Struct, frozen=True, kw_only=True):
    """One use of memory by a process: GPU memory if `on_device` and it runs on a GPU.

    `setting` is the key that changes it most directly. If `in_turn`, the memory of a
    colocated run is freed while the processes of the other kind have the devices. If
    `at_restart`, the memory is needed only when a process starts again while the
    engines have theirs.
    """

    what: str
    nbytes: int
    on_device: bool = True
    in_turn: bool = False
    at_restart: bool = False
    setting: str


def interpreter(*, setting: str) -> Need:
    """Return the need of a process that does not compute on a GPU."""
    return Need(what="process", nbytes=PROCESS_BYTES, on_device=False, setting=setting)


def computing(device: str, *, setting: str) -> list[Need]:
    """Return the needs of a process that computes on a device, in addition to its
    tensors.
    """
    cuda = [Need(what="CUDA", nbytes=CUDA_BYTES, setting=setting)] if device == "cuda" else []
    return [*cuda, interpreter(setting=setting)]
