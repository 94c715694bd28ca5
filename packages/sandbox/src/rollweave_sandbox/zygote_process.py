"""The zygote: a supervisor whose forks become sandboxes without another program, and
have all modules that the supervisor has imported.

The supervisor stages a fork's root and drops its uid. Here the fork makes all
namespaces, mounts /proc, gives up every capability, and becomes two processes: an init,
with which the PID namespace ends, and the server.

Invariants: before the server reads its first byte it has no capability and no way to
gain one, no mount but the sandbox's, no descriptor but the channel, no variable of
ours, and the filter of system calls is loaded. Standard library alone.
"""

import contextlib
import fcntl
import gc
import importlib
import os
import runpy
import signal
import site
import socket
import struct
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from rollweave_sandbox import kernel
from rollweave_sandbox.inside.cells import PRELOADED
from rollweave_sandbox.kernel import masked
from rollweave_sandbox.seccomp import bpf_filter
from rollweave_sandbox.stage import map_user
from rollweave_sandbox.supervisor import serve

CHANNEL = 3
"""Descriptor of the server's socket. Descriptor 4 is a seccomp program for runtimes
that load it themselves.
"""

OURS = ("rollweave", __name__.partition(".")[0])
"""Packages whose modules code inside should not import."""

_preloaded: list[str] = []
"""Names of the modules that were loaded for cells: IPython, and what it imports."""

_ours: list[str] = []
"""Names of the modules of these packages."""

_forgotten: list[ModuleType | None] = []
"""Modules that were forgotten. If they were freed, a fork would write to the pages that
it shares.
"""

_QUIET = kernel.MS_NOSUID | kernel.MS_NOEXEC
_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40


def enter(request: dict[str, Any], serve_calls: Callable[[list[str]], None]) -> NoReturn:
    """Become the sandbox: this process waits for its init, whose child is the server.

    Raises OSError before the init or the server runs.
    """
    inside = request["inside"]
    os.close(CHANNEL + 1)
    namespaces = (
        kernel.CLONE_NEWNS
        | kernel.CLONE_NEWPID
        | kernel.CLONE_NEWIPC
        | kernel.CLONE_NEWUTS
        | kernel.CLONE_NEWCGROUP
    )
    namespaces |= 0 if inside["network"] else kernel.CLONE_NEWNET
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(kernel.CLONE_NEWUSER | namespaces)
    map_user(inside["uid"], uid, inside["uid"], gid)
    init = os.fork()
    if init:
        os.close(CHANNEL)
        kernel.die_with_parent(signal.SIGKILL)
        os._exit(_status(os.waitpid(init, 0)[1]))
    kernel.die_with_parent(signal.SIGKILL)
    if not inside["network"]:
        _loopback_up()
    kernel.set_hostname(inside["hostname"])
    _mount(inside["root"])
    kernel.pivot_root(inside["root"])
    _forget_host_files()
    _forget_modules(keep_preloaded=inside["preloaded"])
    os.setsid()
    kernel.drop_capabilities()
    kernel.no_new_privileges()
    kernel.load_filter(bpf_filter())
    server = os.fork()
    if server:
        os.close(CHANNEL)
        kernel.set_dumpable(0)
        _reap_until(server)
    _serve(inside, serve_calls)


def _forget_modules(*, keep_preloaded: bool) -> None:
    """Forget Rollweave's modules, and, unless the sandbox has their packages, the
    modules that were loaded for cells.
    """
    names = (*_ours, *(() if keep_preloaded else _preloaded))
    _forgotten.extend(sys.modules.pop(name, None) for name in names)


def _mount(root: str) -> None:
    kernel.mount(root, root, flags=kernel.MS_BIND | kernel.MS_REC)
    kernel.mount("proc", f"{root}/proc", "proc", _QUIET | kernel.MS_NODEV)
    for name in masked():
        kernel.mount(f"{root}/dev/null", f"{root}/proc/{name}", flags=kernel.MS_BIND)
    kernel.mount(f"{root}/proc/sys", f"{root}/proc/sys", flags=kernel.MS_BIND)
    read_only = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID
    for path in ("proc/sys", "proc"):
        kernel.mount("none", f"{root}/{path}", flags=read_only | kernel.MS_NOEXEC | kernel.MS_NODEV)


def _forget_host_files() -> None:
    """Replace the descriptors of the host's /dev/null by descriptors of the sandbox's
    own.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(nothing, fd)
    os.close(nothing)


def _loopback_up() -> None:
    with socket.socket() as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP | _IFF_RUNNING))


def _reap_until(server: int) -> NoReturn:
    """Reap orphans, as an init must, until the server ends.

    When the init then ends, all processes of the PID namespace end.
    """
    while True:
        pid, status = os.wait()
        if pid == server:
            os._exit(_status(status))


def _status(wait_status: int) -> int:
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def _forget_environment() -> None:
    """Forget the values that the interpreter read from the zygote's environment
    variables.
    """
    time.tzset()
    if (files := sys.modules.get("tempfile")) is not None:
        vars(files)["tempdir"] = None


def _serve(inside: dict[str, Any], serve_calls: Callable[[list[str]], None]) -> NoReturn:
    try:
        kernel.set_dumpable(0)
        os.environ.clear()
        os.environ.update(inside["env"])
        _forget_environment()
        os.umask(0o022)
        os.chdir(inside["workdir"])
        serve_calls(["--fd", str(CHANNEL)])
    finally:
        os._exit(1)


def main() -> None:
    """Serve as `supervisor.main` does, with the server loaded from BASE."""
    serve_calls = _loaded(f"{sys.argv[4]}/support/inside")
    # `.pth` files may add folders that no sandbox has, and that an agent could make.
    known = (sys.base_prefix, *site.getsitepackages())
    sys.path[:] = [path for path in sys.path if path.startswith(known)]
    gc.freeze()  # no garbage collection writes to the pages that forks share
    serve(lambda request: enter(request, serve_calls))


def _loaded(folder: str) -> Callable[[list[str]], None]:
    """Load the server, and IPython if it is installed; otherwise cells are plain
    Python. Return the server's `main`.
    """
    runpy.run_path(f"{folder}/__main__.py", run_name="zygote")["load"]()
    package = next(
        name
        for name, module in sys.modules.items()
        if getattr(module, "__path__", None) == [folder]
    )
    before = set(sys.modules)
    with contextlib.suppress(ImportError):
        importlib.import_module(PRELOADED)
    for name in sys.modules:
        top = name.partition(".")[0]
        if top in OURS:
            _ours.append(name)
        elif name not in before and top not in sys.stdlib_module_names:
            _preloaded.append(name)
    serve_calls: Callable[[list[str]], None] = importlib.import_module(f"{package}.server").main
    return serve_calls
