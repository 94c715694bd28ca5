"""Back ends under test, and images for them."""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollweave.sandbox.base import Backend, Sandbox, SandboxSpec, Snapshot
from rollweave_sandbox.processes import Process, Table, started
from rollweave_sandbox.registry import backend
from tests.support import forking

ISOLATING = ("bubblewrap", "zygote")
NAMES = (*ISOLATING, "plain")

APPTAINER_IMAGE = os.environ.get("ROLLWEAVE_APPTAINER_IMAGE", "")
"""A `.sif` file or a folder with a Python for the real Apptainer, where it is
installed.
"""
REAL_APPTAINER = pytest.param("apptainer", marks=pytest.mark.extended)


@functools.cache
def why_not(name: str) -> str:
    """Return why a back end cannot be tested here; empty if it can."""
    if name == "plain":
        return ""
    if name == "apptainer":
        return "" if APPTAINER_IMAGE else "ROLLWEAVE_APPTAINER_IMAGE names no image"
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed (apt-get install bubblewrap)"
    probe = [
        "bwrap",
        "--unshare-user",
        "--unshare-pid",
        "--unshare-net",
        "--ro-bind",
        "/",
        "/",
        "true",
    ]
    tried = subprocess.run(probe, capture_output=True, check=False)
    return (
        ""
        if tried.returncode == 0
        else f"this machine has no user namespaces for us: {tried.stderr.decode()[-200:]}"
    )


def needs(name: str) -> None:
    if reason := why_not(name):
        pytest.skip(reason)


@asynccontextmanager
async def opened(name: str, *, faked: bool = False) -> AsyncIterator[Backend]:
    """A back end; when it is closed nothing of it is left: no process, no folder, no
    descriptor. `faked` says that a program of the tests stands in for its runtime.
    """
    if not faked:
        needs(name)
    fds = len(os.listdir("/proc/self/fd"))
    with no_process_left():
        backend_ = backend(name)
        if name == "apptainer" and not faked:
            backend_ = OnImage(backend_)
        folders = [backend_._launcher._base, backend_._launcher._snapshots]  # type: ignore[attr-defined]
        try:
            yield backend_
        finally:
            await backend_.close()
    assert len(os.listdir("/proc/self/fd")) <= fds
    assert left_of(folders) == []


class OnImage:
    """A back end that has no image HOST: each sandbox has the given image instead."""

    def __init__(self, backend_: Backend) -> None:
        self._backend = backend_
        self._launcher = backend_._launcher  # type: ignore[attr-defined]
        self.name = backend_.name

    async def start(self, spec: SandboxSpec) -> Sandbox:
        return await self._backend.start(msgspec.structs.replace(spec, image=APPTAINER_IMAGE))

    async def branch(self, snapshot: Snapshot) -> Sandbox:
        return await self._backend.branch(snapshot)

    async def close(self) -> None:
        await self._backend.close()


@contextmanager
def no_process_left() -> Iterator[None]:
    """Use a table, which works while threads and processes of earlier tests end."""
    before = started(each.pid for each in _below_us())
    yield
    left = [each.pid for each in _below_us() if before.get(each.pid) != each.started]
    assert left == [], [_command(pid) for pid in left]


def _below_us() -> list[Process]:
    """Return the processes that tests have started, without the server that forks
    them.
    """
    apart = (os.getpid(), forking.server().pid)
    return [each for each in Table.now().below(started([os.getpid()])) if each.pid not in apart]


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    return "gone by now"


def left_of(folders: list[str]) -> list[str]:
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return [
        folder
        for folder in folders
        if os.path.exists(folder) or any(folder in line for line in mounts)
    ]


LEFT_OUT = (
    *("site-packages", "dist-packages", "config-*", "__pycache__", "test", "unittest"),
    *("distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "tkinter", "turtledemo"),
    *("_codecs_*", "_curses*", "_decimal*", "_hashlib*", "_sqlite3*", "_ssl*", "_test*"),
    *("_tkinter*", "_elementtree*", "pyexpat*"),
)
"""Parts of Python's library that nothing in a small image needs, and whose copying,
packing and hashing would take most of the time of tests of images.
"""


def image(folder: Path) -> str:
    """A small image: this machine's programs by links into a copy of nothing but what
    Python needs.
    """
    root = folder / "image"
    for name in ("proc", "dev", "tmp", "etc", "home", "project"):
        (root / name).mkdir(parents=True)
    (root / "project" / "kept").write_text("from the image")
    (root / "project" / "gone").write_text("from the image")
    python = Path(sys.base_prefix)
    for program in ("/bin/sh", "/bin/ls", "/bin/cat", "/bin/rm", "/bin/ln", "/usr/bin/id"):
        _install(root, Path(program))
    _install(root, Path(os.path.realpath(sys.executable)), to="usr/bin/python3")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = Path(os.__file__).parent
    target = root / "usr" / "lib" / version
    shutil.copytree(library, target, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for extension in (target / "lib-dynload").glob("*.so"):
        _libraries(root, library / "lib-dynload" / extension.name)
    for shared in python.glob("lib/libpython*.so*"):
        _install(root, shared, to=f"usr/lib/{shared.name}")
    return str(root)


def _install(root: Path, program: Path, to: str | None = None) -> None:
    target = root / (to or str(program).lstrip("/"))
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(os.path.realpath(program), target)
    _libraries(root, program)


def _libraries(root: Path, program: Path) -> None:
    for library in _linked(Path(os.path.realpath(program))):
        target = root / library.lstrip("/")
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(os.path.realpath(library), target)


@functools.cache
def _linked(program: Path) -> list[str]:
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    return [word for word in listed.split() if word.startswith("/")]


def python(source: str) -> list[str]:
    return [sys.executable, "-I", "-c", source]


SPEC = SandboxSpec()


async def sh(sandbox: Sandbox, script: str, **options: Any) -> str:
    """Return the output of a script in a sandbox."""
    return (await sandbox.exec(["sh", "-c", script], **options)).stdout.decode()
