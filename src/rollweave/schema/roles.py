"""Messages between the controller of a role and the processes of its workers
(`runtime/roles`), and the two errors of a call; and the functions that a serverless
platform executes (`runtime/hosts/serverless.py`).

Arguments and results are MessagePack within MessagePack, since their types are known
only from the annotations of the method.
"""

from collections.abc import Sequence

import msgspec

from rollweave.schema.base import Struct, TaggedStruct
from rollweave.schema.errors import RollweaveError

ROLE_NAME = r"[A-Za-z0-9_][A-Za-z0-9_-]*"
"""Pattern of the names of roles of a run."""

CONSTRUCTION = 0
"""Number of the call that makes the worker."""


class Arguments(Struct, frozen=True, kw_only=True):
    """The encoded arguments of one call."""

    args: tuple[msgspec.Raw, ...] = ()
    kwargs: dict[str, msgspec.Raw] = {}  # noqa: RUF012 (msgspec copies it)


class StartWorker(TaggedStruct, frozen=True, kw_only=True):
    """Make the worker of this process. Answered by `Returned`, with the
    `DeclaredMethod` of each registered method by its name, or by `Raised`, both of call
    `CONSTRUCTION`.

    `worker` refers to its class: "package.module:Class" or "/path/to/script.py:Class".
    `address` is its host's address. `devices` are its GPUs as their host numbers them,
    and `hardware` is the hardware that was requested for it. Ranks that are not started
    and ended together do not `join` in a process group.
    """

    worker: str
    rank: int
    world_size: int
    joins: bool = True
    address: str
    hardware: str = ""
    devices: tuple[int, ...] = ()
    arguments: Arguments = Arguments()


class CallMethod(TaggedStruct, frozen=True, kw_only=True):
    """Call a registered method. Answered by `Returned` or `Raised`."""

    call: int
    method: str
    arguments: Arguments


class DeclaredMethod(Struct, frozen=True, kw_only=True):
    """The way in which a registered method of a worker is called. `timeout_s` is None
    if the caller decides.
    """

    mode: str
    timeout_s: float | None = None
    beside: bool = False


class StoreOpened(TaggedStruct, frozen=True, kw_only=True):
    """Rank 0 has opened the store at which the ranks meet. It sends this to the
    controller, which forwards it to the other ranks.
    """

    address: str


class StopWorker(TaggedStruct, frozen=True, kw_only=True):
    """Close the worker, and end the process."""


RoleCommand = StartWorker | CallMethod | StoreOpened | StopWorker
"""Messages to the process of a worker."""


class Returned(TaggedStruct, frozen=True, kw_only=True):
    call: int
    value: msgspec.Raw


class Raised(TaggedStruct, frozen=True, kw_only=True):
    """A method raised an exception. `kinds` are the names of its class and of the base
    classes; `place` is the last line of code in its traceback. `rule` is the rule that
    the class of the worker breaks, if no method and no constructor raised it.
    """

    call: int
    kinds: tuple[str, ...]
    text: str
    place: str = ""
    rule: str = ""


RoleReport = Returned | Raised | StoreOpened
"""Messages from the process of a worker."""


class WorkerFailure(Struct, frozen=True, kw_only=True):
    """The exception that a method raised on one rank; `rule` as in `Raised`."""

    rank: int
    kinds: tuple[str, ...]
    text: str
    place: str = ""
    rule: str = ""

    @property
    def kind(self) -> str:
        """The name of the exception's class."""
        return self.kinds[0]

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        return f"rank {self.rank}: {self.kind}: {self.text}{place}"


class WorkerError(RollweaveError):
    """A method raised an exception on some ranks, in `failures`. The workers are alive,
    and take further calls.
    """

    def __init__(self, name: str, failures: Sequence[WorkerFailure]) -> None:
        self.failures = tuple(failures)
        more = f"; and {len(failures) - 1} more" if len(failures) > 1 else ""
        super().__init__(f"{name} {failures[0]}{more}")


class WorkerLostError(RollweaveError):
    """A worker's process or host is lost, or it has not answered in time. All workers
    of its role have ended with it.
    """


class RolesAddress(Struct, frozen=True, kw_only=True):
    """The address at which the controller of a run takes calls of its roles. `url` has
    a secret part. A call is answered within `limit_s`.
    """

    url: str
    limit_s: float


class CallFailed(TaggedStruct, frozen=True, kw_only=True):
    """The method raised an exception on some workers of a role."""

    failures: tuple[WorkerFailure, ...]


class CallLost(TaggedStruct, frozen=True, kw_only=True):
    """A worker of a role was lost, or did not answer in time."""

    error: str


class CallRefused(TaggedStruct, frozen=True, kw_only=True):
    """There is no such role or method, or the arguments do not suit its mode."""

    error: str


RoleAnswer = Returned | CallFailed | CallLost | CallRefused
"""Answers of the controller to a call of a role of its run."""


class DeployedFunction(TaggedStruct, frozen=True, kw_only=True):
    """The user's function of the reward `name`."""

    name: str
    function: str
    timeout_s: float


class DeployedRole(TaggedStruct, frozen=True, kw_only=True):
    """The class of a role, whose serverless methods are executed by any instance. It
    is constructed with `arguments`, and called with `CallMethod`.
    """

    name: str
    reference: str
    arguments: Arguments
