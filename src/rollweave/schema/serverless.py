"""Messages between a run, or the program of a role, and the process that deploys its
functions on Ray Serve (`runtime/hosts/on_serve.py`).
"""

from rollweave.schema.base import TaggedStruct
from rollweave.schema.roles import Arguments


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


class DeployFunctions(TaggedStruct, frozen=True, kw_only=True):
    """Deploy functions on the Ray cluster at `address`, or on a cluster of this machine
    alone. Answered by `FunctionsDeployed` or `DeployFailed`.

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


class FunctionsDeployed(TaggedStruct, frozen=True, kw_only=True):
    """The URL of each function, by its name."""

    urls: dict[str, str]


class DeployFailed(TaggedStruct, frozen=True, kw_only=True):
    """The functions could not be deployed; no function is left on the cluster."""

    error: str


class RemoveFunctions(TaggedStruct, frozen=True, kw_only=True):
    """Remove the applications, and exit."""


ServeCommand = DeployFunctions | RemoveFunctions

ServeReport = FunctionsDeployed | DeployFailed
