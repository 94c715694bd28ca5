"""The back ends, which start sandboxes, and the command line with which each makes a
sandbox from a specification.

The functions that return command lines are pure, so that golden tests can cover them. A
runtime gets a root or an image, the server's socket as CHANNEL_FD and, if it can load a
seccomp program, the program as SECCOMP_FD. Nothing of our environment is passed on.
"""

import asyncio
import itertools
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rollweave.sandbox.base import (
    HOME,
    HOST,
    Backend,
    Limits,
    SandboxSpec,
    Snapshot,
    is_reference,
)
from rollweave.schema.errors import ConfigError, SandboxError
from rollweave_sandbox.folders import check_folder, copy_folder, put_folder
from rollweave_sandbox.kernel import masked
from rollweave_sandbox.launcher import Launcher
from rollweave_sandbox.layers import Copy, opened_folder
from rollweave_sandbox.rootfs import LOOPBACK, SUPPORT, View, root_of, view_of
from rollweave_sandbox.running import RunningSandbox, started

CHANNEL_FD, SECCOMP_FD = 3, 4

SIGNALS = 4096
"""Maximum number of queued signals and of timers, which take kernel memory."""

UID = 1000
"""Uid of the agent inside the sandbox."""

BUBBLEWRAP = "bwrap"
INSTALL_BUBBLEWRAP = "install bubblewrap, version 0.8 or later (apt-get install bubblewrap)"

PROCESS = "rollweave_sandbox.zygote_process"

PRELOADED_PACKAGE = "ipython"
"""The package that the zygote has loaded, and that a sandbox without it must not
have.
"""

APPTAINER = ("apptainer", "singularity")
INSTALL_APPTAINER = (
    "install Apptainer 1.1 or later (https://apptainer.org), or load its module on a cluster"
)


def rlimits(limits: Limits) -> dict[str, int]:
    """Return the limits of each process, by their names in <sys/resource.h>.

    Private memory is limited instead of address space, because programs reserve much
    more address space than they use.
    """
    return {
        "NPROC": limits.processes,
        "DATA": limits.memory_bytes,
        "FSIZE": limits.disk_bytes,
        "NOFILE": limits.files,
        "CPU": max(1, int(limits.cpu_s)),
        "SIGPENDING": SIGNALS,
        "MSGQUEUE": 0,
        "NICE": 0,
        "RTPRIO": 0,
    }


def server_command(
    limits: dict[str, int], workdir: str, *, python: str = "python3", support: str = SUPPORT
) -> list[str]:
    """Return the command of the program inside: the server, within per-process limits.

    The server runs without `site`. Installed packages may name paths that do not exist.
    An agent could make such a path, and code there would run in the server of every
    sandbox that starts from the agent's writes.
    """
    packed, server = json.dumps(limits, sort_keys=True), [f"{support}/inside", "--fd"]
    return [python, "-I", "-S", f"{support}/boot.py", packed, workdir, *server, str(CHANNEL_FD)]


def bubblewrap_command(spec: SandboxSpec, *, bwrap: str, root: str, python: str) -> list[str]:
    """Return the command of bubblewrap 0.8 or later: new namespaces, no capability, and
    the root already mounted at `root` with its /dev.

    /proc is read-only: writing to it could only weaken a limit (oom_score_adj) or
    change another process (mem). Per-process limits are set earlier, before any code of
    an image or an agent runs.
    """
    uid = "0" if spec.fakeroot else str(UID)
    argv = [bwrap, "--unshare-user", "--uid", uid, "--gid", uid, "--unshare-ipc", "--unshare-pid"]
    argv += [] if spec.network else ["--unshare-net"]
    argv += ["--unshare-uts", "--unshare-cgroup", "--disable-userns", "--assert-userns-disabled"]
    argv += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", spec.hostname]
    argv += ["--seccomp", str(SECCOMP_FD), "--bind", root, "/", "--dev-bind", f"{root}/dev", "/dev"]
    argv += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"]
    for name in masked():
        argv += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    argv += ["--remount-ro", "/proc", "--clearenv"]
    for name, value in spec.environment().items():
        argv += ["--setenv", name, value]
    return [*argv, "--chdir", spec.workdir, "--", *server_command({}, spec.workdir, python=python)]


def apptainer_command(spec: SandboxSpec, *, runtime: str, support: str) -> list[str]:
    """Return the command of Apptainer 1.x: contained, without our environment and home,
    with writes to a tmpfs whose size the runtime sets (ProRL §3.2.2).

    `support` is the folder on the host that has boot.py and the server. Raises
    ValueError for a specification that the runtime does not support.
    """
    if spec.image == HOST:
        raise ValueError(f"image must be a .sif file or a folder for apptainer, got {HOST!r}")
    # The home is empty and in memory, since its source does not exist. Without a
    # source, Apptainer would mount a folder of the host that has the same path.
    home = f"{support}/nothing:{spec.environment()['HOME']}"
    argv = [runtime, "exec", "--containall", "--cleanenv", "--home", home, "--writable-tmpfs"]
    argv += ["--fakeroot"] if spec.fakeroot else []
    argv += [] if spec.network else ["--net", "--network", "none"]
    argv += ["--uts", "--hostname", spec.hostname, "--bind", f"{support}:{SUPPORT}:ro"]
    argv += ["--pwd", "/"]
    return [*argv, spec.image, *server_command(rlimits(spec.limits), spec.workdir)]


def apptainer_environment(spec: SandboxSpec, *, runtime: str) -> dict[str, str]:
    """Return the variables of Apptainer's process. Those of the sandbox are among them
    with a prefix: other users see the arguments of a process, and `--env` divides
    values at commas. Apptainer finds its helpers on PATH.
    """
    prefix = f"{os.path.basename(runtime).upper()}ENV_"
    inside = {name: value for name, value in spec.environment().items() if name != "HOME"}
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        **{f"{prefix}{name}": value for name, value in inside.items()},
    }


_addresses = itertools.count(secrets.randbelow(1 << 24))


def addressed(spec: SandboxSpec) -> SandboxSpec:
    """Return the specification with an exclusive loopback address if it shares the
    host's network, so that servers in several sandboxes may listen on the same port
    (ProRL Agent §3.2.2).
    """
    if not spec.network or LOOPBACK in spec.env:
        return spec
    number = next(_addresses)
    address = f"127.{number >> 16 & 255 or 1}.{number >> 8 & 255}.{number % 254 + 1}"
    return msgspec.structs.replace(spec, env={**spec.env, LOOPBACK: address})


def check_image(image: str) -> None:
    """Raise ValueError if `image` is not the path of an existing file or folder."""
    if image != HOST and (is_reference(image) or not Path(image).exists()):
        raise ValueError(f"image must exist, got {image!r}")


class _Launched:
    """The part that all back ends share."""

    _launcher: Launcher

    async def close(self) -> None:
        await self._launcher.close()


class _Layered(_Launched):
    """A back end whose sandboxes have layers below their writes."""

    async def start(self, spec: SandboxSpec) -> RunningSandbox:
        self._check(spec)
        return await self._started(spec, await self._launcher.layers_of(spec))

    async def branch(self, snapshot: Snapshot) -> RunningSandbox:
        return await self._started(snapshot.spec, snapshot.layers)

    async def _started(self, spec: SandboxSpec, layers: tuple[str, ...]) -> RunningSandbox:
        requested_spec, spec = spec, addressed(spec)
        view = await view_of(spec)
        root = root_of(spec, view, support=self._launcher.support, layers=layers)
        return await started(
            spec,
            self._launcher,
            requested_spec=requested_spec,
            below=layers,
            env={},
            root=root,
            rlimits=rlimits(spec.limits),
            **self._program_of(spec, view, root),
        )

    def _check(self, spec: SandboxSpec) -> None:
        """Raise ValueError for an image that this back end does not support."""
        raise NotImplementedError

    def _program_of(self, spec: SandboxSpec, view: View, root: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of the request that say what runs in the root, which may be
        changed.
        """
        raise NotImplementedError


class Bubblewrap(_Layered):
    """Bubblewrap, the default back end: all namespaces, no capability, and a filter of
    system calls.
    """

    name = "bubblewrap"

    def __init__(self) -> None:
        """Find the program. Raises SandboxError if it is not installed."""
        program = shutil.which(BUBBLEWRAP)
        if program is None:
            raise SandboxError(f"bubblewrap needs {BUBBLEWRAP} on PATH: {INSTALL_BUBBLEWRAP}")
        self._program = program
        self._launcher = Launcher()

    def _check(self, spec: SandboxSpec) -> None:
        check_image(spec.image)

    def _program_of(self, spec: SandboxSpec, view: View, root: dict[str, Any]) -> dict[str, Any]:
        return {
            "argv": bubblewrap_command(
                spec, bwrap=self._program, root=self._launcher.root, python=spec.python()
            )
        }


class Zygote(_Layered):
    """Sandboxes without a separate program: forks of a process that has loaded Python
    and the server.

    The supervisor itself is this process (`zygote_process`). A Python sandbox is
    therefore ready in milliseconds, and shares its interpreter's memory with its
    siblings. Compared with bubblewrap there are two disadvantages: siblings share the
    layout of their address space, and the code that makes the sandbox is ours alone.
    Only the host's image is supported, because its interpreter is ours.
    """

    name = "zygote"

    def __init__(self) -> None:
        self._launcher = Launcher(module=PROCESS)

    def _check(self, spec: SandboxSpec) -> None:
        if spec.image != HOST:
            raise ValueError(
                f"image must be {HOST!r} for zygote, whose interpreter is the "
                f"host's, got {spec.image!r}"
            )

    def _program_of(self, spec: SandboxSpec, view: View, root: dict[str, Any]) -> dict[str, Any]:
        # The server was loaded from `support`, and finds its files there.
        root["binds"].append((self._launcher.support, self._launcher.support))
        inside = {
            "root": self._launcher.root,
            "uid": 0 if spec.fakeroot else UID,
            "network": spec.network,
            "hostname": spec.hostname,
            "workdir": spec.workdir,
            "env": spec.environment(),
            "preloaded": PRELOADED_PACKAGE in view.names,
        }
        return {"argv": [], "inside": inside}


class Apptainer(_Launched):
    """Apptainer, for clusters that have it and images in its format (ProRL §3.2.2);
    without snapshots.

    Apptainer provides the isolation: it applies no system call filter of ours, and
    bounds the size of writes itself. Time, CPU, memory and processes are limited as by
    other back ends.
    """

    name = "apptainer"

    def __init__(self) -> None:
        """Find the program. Raises SandboxError if it is not installed."""
        program = next((path for name in APPTAINER if (path := shutil.which(name))), None)
        if program is None:
            raise SandboxError(
                f"apptainer needs {' or '.join(APPTAINER)} on PATH: {INSTALL_APPTAINER}"
            )
        self._program = program
        self._launcher = Launcher()

    async def start(self, spec: SandboxSpec) -> RunningSandbox:
        requested_spec, spec = spec, addressed(spec)
        argv = apptainer_command(spec, runtime=self._program, support=self._launcher.support)
        check_image(spec.image)
        _check_way(spec.image)
        if spec.folder:
            await asyncio.to_thread(check_folder, spec.folder)
        sandbox = await started(
            spec,
            self._launcher,
            requested_spec=requested_spec,
            argv=argv,
            env=apptainer_environment(spec, runtime=self._program),
            account=True,
        )
        if spec.folder:
            try:
                await put_folder(sandbox, spec.folder, spec.workdir)
            except BaseException:
                sandbox.kill()
                raise
        return sandbox

    async def branch(self, snapshot: Snapshot) -> RunningSandbox:
        raise SandboxError(
            f"apptainer starts from no snapshot, got one with {len(snapshot.layers)} layers"
        )


def _check_way(path: str) -> None:
    """Raise ValueError if we are root and the runtime, which then has another uid,
    cannot read the image.
    """
    if os.getuid() == 0:
        real = Path(path).resolve()
        needed = dict.fromkeys([*Path(path).parents, *real.parents], 0o001)
        needed[real] = 0o005 if real.is_dir() else 0o004
        closed = next((at for at, mode in needed.items() if at.stat().st_mode & mode != mode), None)
        if closed is not None:
            raise ValueError(
                "image must be readable by every user if root uses apptainer, got "
                f"{path!r}: {closed} is closed"
            )


class Plain(_Launched):
    """No isolation: the server runs as a child process in a temporary folder, with our
    rights, our network and our files.

    This back end is for trusted code, and for machines that support nothing better. It
    is used only if a configuration names it. Time, CPU and memory are limited; a
    process that leaves the process tree between two polls is found only when the back
    end closes.
    """

    name = "plain"

    def __init__(self) -> None:
        self._launcher = Launcher()

    async def start(self, spec: SandboxSpec) -> RunningSandbox:
        if spec.image != HOST:
            raise ValueError(
                f"image must be {HOST!r} for plain, which has no other, got {spec.image!r}"
            )
        if spec.fakeroot:
            raise ValueError("fakeroot must be false for plain, got true")
        return await self._started(spec, str(self._launcher.folder()), spec.folder)

    async def branch(self, snapshot: Snapshot) -> RunningSandbox:
        folder = str(self._launcher.folder())
        try:
            await asyncio.to_thread(_copied, snapshot, folder)
        except OSError as error:
            raise SandboxError(f"the snapshot cannot be copied: {error}") from error
        return await self._started(snapshot.spec, folder)

    async def _started(self, spec: SandboxSpec, folder: str, content: str = "") -> RunningSandbox:
        path = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"
        home = folder + HOME
        workdir = home if spec.workdir == HOME else spec.workdir
        env = {"PATH": path, "HOME": home, **addressed(spec).env}
        here = msgspec.structs.replace(spec, workdir=workdir, env=env)
        # NPROC counts all processes of our user here, so it cannot limit a sandbox.
        limits = {name: value for name, value in rlimits(spec.limits).items() if name != "NPROC"}
        argv = server_command(
            limits, here.workdir, python=sys.executable, support=self._launcher.support
        )
        if content:
            await asyncio.to_thread(copy_folder, content, "/", workdir)
        writes = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        return await started(
            here,
            self._launcher,
            requested_spec=spec,
            writes=writes,
            contained=False,
            drop=False,
            argv=argv,
            env=here.environment(),
        )


def _copied(snapshot: Snapshot, folder: str) -> None:
    with opened_folder(folder) as target, opened_folder(snapshot.layers[0]) as source:
        Copy(limit_bytes=snapshot.spec.limits.disk_bytes).run(source, target)


BACKENDS: dict[str, Callable[[], Backend]] = {
    "bubblewrap": Bubblewrap,
    "zygote": Zygote,
    "apptainer": Apptainer,
    "plain": Plain,
}
"""Name → class of each back end.

The first is the default. `plain` isolates nothing, and is used only if it is named.
"""


def backend(name: str | None = None) -> Backend:
    """Return the back end called `name`, or the default back end.

    Raises ConfigError for an unknown name, and SandboxError, which says what to
    install, if the back end is not installed.
    """
    if name is None:
        try:
            return Bubblewrap()
        except SandboxError as error:
            raise SandboxError(
                f"no sandbox: {error}. To run without any isolation, name the back end: plain, "
                "for trusted code only"
            ) from error
    if name not in BACKENDS:
        raise ConfigError(
            f"sandbox back end must be one of {', '.join(BACKENDS)}, got {name!r}; "
            f"the default: {INSTALL_BUBBLEWRAP}"
        )
    return BACKENDS[name]()
