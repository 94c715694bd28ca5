"""Messages between a run and the process that deploys its reward functions on Ray Serve
(`runtime/hosts/on_serve.py`), and the request to such a function.
"""

from rollweave.schema.base import Struct, TaggedStruct


class DeployedFunction(Struct, frozen=True, kw_only=True):
    """The user's function of one reward."""

    reward: str
    function: str
    timeout_s: float


class DeployFunctions(TaggedStruct, frozen=True, kw_only=True):
    """Deploy functions on the Ray cluster at `address`, or on one of this machine
    alone. Answered by `FunctionsDeployed` or `DeployFailed`.

    `run_id` distinguishes the run's applications, and `secret` is part of their URLs.
    `archive` has the user's modules (`runtime/hosts/user_files`), with its `digest`.
    Each instance reserves `cpus`.
    """

    address: str | None
    run_id: str
    secret: str
    functions: tuple[DeployedFunction, ...]
    archive: bytes
    digest: bytes
    cpus: float


class FunctionsDeployed(TaggedStruct, frozen=True, kw_only=True):
    """The URL of each reward's function."""

    urls: dict[str, str]


class DeployFailed(TaggedStruct, frozen=True, kw_only=True):
    """Nothing is deployed."""

    error: str


class RemoveFunctions(TaggedStruct, frozen=True, kw_only=True):
    """Remove the applications, and exit."""


ServeCommand = DeployFunctions | RemoveFunctions

ServeReport = FunctionsDeployed | DeployFailed
