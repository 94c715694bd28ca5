"""The specification and limits of a sandbox, and the protocols that every back end
implements: `rollweave_sandbox` for this machine.

Invariants: an invalid specification is refused when it is made; a started sandbox is
stopped or killed by its caller, at the latest when its back end closes; a failure of
the sandbox itself is a `SandboxError`, while the failure of a command in it is a
result.
"""

import os
import posixpath
import re
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

import msgspec

from rollweave.schema.base import Struct
from rollweave.schema.errors import SandboxSpoiledError

T = TypeVar("T")

MIB = 1 << 20

HOST = "host"
"""Name of the image that has this machine's programs, libraries and interpreter,
read-only, and an empty root, home and /tmp.
"""

HOME = "/home/agent"

DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
"""Form of an image's name by the SHA-256 of its archive."""

RECIPE = ".toml"
"""Suffix of the file of a recipe."""

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
"""Suffixes of archives of images."""

_HOSTNAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?(?:\[[A-Za-z0-9._, -]*\])?")


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of the resources of a sandbox.

    A sandbox that exceeds memory_bytes, cpu_s or wall_s is killed, with the limit as
    the reason.
    """

    processes: int = 128
    """Maximum number of processes and threads at a time."""
    memory_bytes: int = 4096 * MIB
    """Maximum memory of all processes together, and private memory of each."""
    disk_bytes: int = 1024 * MIB
    """Maximum size of all writes, and of one file; they are in memory (tmpfs)."""
    cpu_s: float = 3600.0
    """Maximum CPU seconds of all processes together."""
    wall_s: float = 14_400.0
    """Maximum seconds from the start."""
    output_bytes: int = 1 * MIB
    """Maximum bytes of one command's output; longer output is truncated and marked."""
    files: int = 1024
    """Maximum number of open files of each process."""

    def __post_init__(self) -> None:
        least = {
            "processes": 4,
            "memory_bytes": 64 * MIB,
            "disk_bytes": MIB,
            "output_bytes": 1024,
            "files": 32,
        }
        for field, value in least.items():
            if getattr(self, field) < value:
                raise ValueError(
                    f"limits.{field} must be at least {value}, got {getattr(self, field)}"
                )
        for field in ("cpu_s", "wall_s"):
            if not 0 < getattr(self, field) < float("inf"):
                raise ValueError(
                    f"limits.{field} must be positive and finite, got {getattr(self, field)}"
                )


class SandboxSpec(Struct, frozen=True, kw_only=True):
    """The specification of a sandbox."""

    image: str = HOST
    """HOST, or the absolute path of an image: a folder with a root file system that has
    python3 (for apptainer also a .sif file). `envs.handlers.sandboxes` also accepts
    references that the cache of images resolves to such a folder (`is_reference`).
    """
    packages: tuple[str, ...] = ()
    """Python packages of this machine that the image HOST has, together with their
    requirements: `numpy`, or with extras `pydantic-ai-slim[openai]`.
    """
    folder: str = ""
    """Absolute path of a folder of this machine, whose files are copied to `workdir` at
    the start. The copies belong to the sandbox; the folder itself is not changed.
    """
    limits: Limits = Limits()
    network: bool = False
    """True shares the host's network, with all its servers, and gives the sandbox an
    exclusive loopback address, which the variable LOOPBACK and the hostname name. False
    gives a separate loopback interface and nothing else.
    """
    env: dict[str, str] = msgspec.field(default_factory=dict)
    """Variables added to PATH, HOME and LANG.

    Nothing of our environment is passed on.
    """
    workdir: str = HOME
    hostname: str = "sandbox"
    fakeroot: bool = False
    """True for uid 0 inside, without any capability of root, for installers that check
    only the uid.
    """

    def __post_init__(self) -> None:
        if self.image != HOST and not _plain_path(self.image) and not is_reference(self.image):
            raise ValueError(
                f"image must be {HOST!r} or an absolute path without '..', or sha256:DIGEST, or "
                f"the path of an archive or of a recipe ({RECIPE}), got {self.image!r}"
            )
        for package in self.packages:
            if not _PACKAGE.fullmatch(package):
                raise ValueError(f"packages must be names of Python packages, got {package!r}")
        if self.packages and self.image != HOST:
            raise ValueError(
                f"packages must be empty for an image, which has its own, got {self.packages[0]!r}"
            )
        if self.folder and not _plain_path(self.folder):
            raise ValueError(f"folder must be an absolute path without '..', got {self.folder!r}")
        if (
            not _plain_path(self.workdir)
            or self.workdir == "/"
            or self.workdir.split("/")[1] in ("proc", "dev", "sys", "run")
        ):
            raise ValueError(
                "workdir must be an absolute path without '..', and not of /proc, /dev, /sys or "
                f"/run, got {self.workdir!r}"
            )
        if not _HOSTNAME.fullmatch(self.hostname):
            raise ValueError(
                "hostname must be lower-case letters, digits and dashes, at most "
                f"63, got {self.hostname!r}"
            )
        for name, value in self.env.items():
            if not _VARIABLE.fullmatch(name) or "\0" in value:
                raise ValueError(
                    "env must have names of letters, digits and _, and values "
                    f"without NUL, got {name!r}"
                )

    def environment(self) -> dict[str, str]:
        """Return all environment variables of a process in the sandbox.

        On the image HOST, `python` and `python3` are the interpreter that runs
        Rollweave.
        """
        programs = f"{os.path.dirname(sys.executable)}:" if self.image == HOST else ""
        base = {
            "PATH": f"{programs}/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
            "HOME": HOME,
            "LANG": "C.UTF-8",
        }
        return {**base, **self.env}

    def python(self) -> str:
        """Return the interpreter inside: on the image HOST the one that runs Rollweave,
        else the image's own.
        """
        return sys.executable if self.image == HOST else "python3"


class Reply(Struct, frozen=True, kw_only=True):
    """The reply of an action of a sandbox's server: fields by name, and bytes."""

    header: dict[str, Any]
    body: bytes


def fields_of(reply: Reply, kind: type[T]) -> T:
    """Return the fields of a reply as a `kind`. Raises SandboxSpoiledError for other
    fields.
    """
    try:
        return msgspec.convert(reply.header, kind)
    except msgspec.ValidationError as error:
        raise SandboxSpoiledError(f"the sandbox sent a reply of another shape: {error}") from error


class ExecResult(Struct, frozen=True, kw_only=True):
    """The result of a command that ran."""

    rc: int
    """Exit status, or the negated number of the signal that ended the command."""
    stdout: bytes
    stderr: bytes
    timed_out: bool
    truncated: bool
    """True if output beyond the limit was dropped."""
    seconds: float


class Snapshot(Struct, frozen=True, kw_only=True):
    """A sandbox's writes, stored on the host.

    `branch` of the same back end can start any number of sandboxes from it.
    """

    spec: SandboxSpec
    layers: tuple[str, ...]
    """Folders of its layers on this host, the newest first. Only the newest belongs to
    the snapshot alone.
    """
    bytes: int
    """Number of bytes in the newest layer's files."""


class Sandbox(Protocol):
    """A started sandbox. All calls belong to the event loop's thread."""

    id: str
    ready_s: float
    """Seconds from the request for the sandbox until its server answered."""
    workdir: str
    """Folder in which its commands run, as a path inside."""

    @property
    def ended(self) -> str:
        """Reason for its end: stopped, killed, or the limit that it exceeded.

        Empty while it is alive.
        """

    async def call(self, action: str, body: bytes = b"", *, timeout_s: float, **args: Any) -> Reply:
        """Call an action of its server, with which `tools.py` works, and wait for its
        reply.

        `timeout_s` is the limit in seconds of the action inside, if it has one; the
        reply may be later by the argument `slack_s`. Raises SandboxError, which gives
        the reason if the sandbox is gone.
        """

    def tunnel(self, url: str) -> AbstractAsyncContextManager[str]:
        """Yield a URL at which programs inside reach the HTTP service at `url`, and
        nothing else of the host, even without a network. A sandbox has at most one
        tunnel at a time.

        Raises ValueError for a URL that is not plain http, SandboxError if the sandbox
        cannot listen.
        """

    async def exec(
        self,
        argv: list[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> ExecResult:
        """Run a program.

        Raises SandboxError; a command that fails or takes too long is a result.
        """

    async def read(self, path: str, *, limit: int = MIB) -> bytes:
        """Return a regular file's bytes. Raises SandboxError for any other kind of
        file, and for more than `limit` bytes. A large file arrives in parts, between
        which it may change.
        """

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Replace a file atomically, whatever the size of the data. Raises
        SandboxError.
        """

    async def snapshot(self, *, only: Sequence[str] = (), at: str = "") -> Snapshot:
        """Store the writes so far, while commands are paused. Raises SandboxError,
        ValueError.

        With `only`, paths relative to the work folder (`.` is all of it), the snapshot
        consists of the clean image and these files and folders, in the folder `at`
        instead of the work folder. Other files are left out, and so are symbolic links
        that lead out of the work folder and paths that do not exist.
        """

    async def stop(self, grace_s: float = 2.0) -> None:
        """Send SIGTERM to its commands, and SIGKILL to all processes that are left
        after `grace_s` seconds. Returns when no process is left.
        """

    def kill(self, *, spoiled: str = "") -> None:
        """Send SIGKILL to all its processes immediately. `spoiled` describes what the
        code inside did, if the code inside is the reason.
        """


class Backend(Protocol):
    """Starts sandboxes of one kind."""

    name: str

    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox and wait until its server answers. Raises SandboxError, and
        ValueError for a specification that this back end does not support.
        """

    async def branch(self, snapshot: Snapshot) -> Sandbox:
        """Start a sandbox that begins where the snapshot was taken.

        Raises SandboxError.
        """

    async def close(self) -> None:
        """End all its sandboxes, and remove its snapshots and files."""


def is_reference(image: str) -> bool:
    """Return whether the cache of images resolves `image` to a folder, because it is a
    digest, or the path of an archive or of a recipe. The path may be relative to the
    working directory.
    """
    named = DIGEST.fullmatch(image) or image.endswith((RECIPE, *ARCHIVES))
    return bool(named) and "\0" not in image


def check_snapshot_paths(only: Sequence[str], at: str) -> None:
    """Raise ValueError if a snapshot cannot consist of these paths in the folder
    `at`.
    """
    if bool(only) != bool(at) or (at and (not _plain_path(at) or at == "/")):
        raise ValueError(
            f"at must be an absolute path without '..' where only has paths, else empty, got {at!r}"
        )
    for path in only:
        if path != "." and (not path or not _plain_path(f"/{path}") or path.startswith("../")):
            raise ValueError(
                f"only must have paths relative to the work folder, without '..', got {path!r}"
            )


def _plain_path(path: str) -> bool:
    return (
        path.startswith("/")
        and "\0" not in path
        and posixpath.normpath(path) == path
        and not path.startswith("//")
    )
