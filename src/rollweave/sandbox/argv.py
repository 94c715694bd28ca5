"""The command line with which each runtime makes a sandbox from a specification. The
functions are pure, so that golden tests can cover them.

A runtime gets a root or an image, the server's socket as CHANNEL_FD and, if it can load
a seccomp program, the program as SECCOMP_FD. Nothing of our environment is passed on.
"""

import json

from rollweave.sandbox.base import HOST, Limits, SandboxSpec
from rollweave.sandbox.devices import masked

CHANNEL_FD, SECCOMP_FD = 3, 4

SUPPORT = "/run/rollweave"
"""Path at which a sandbox sees boot.py and the server."""

SIGNALS = 4096
"""Maximum number of queued signals and of timers, which take kernel memory."""

UID = 1000
"""Uid of the agent inside the sandbox."""


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


def server(
    limits: dict[str, int], workdir: str, *, python: str = "python3", support: str = SUPPORT
) -> list[str]:
    """Return the command of the program inside: the server, within per-process limits.

    The server runs without `site`. Installed packages may name paths that do not exist.
    An agent could make such a path, and code there would run in the server of every
    sandbox that starts from the agent's writes.
    """
    packed = json.dumps(limits, sort_keys=True)
    return [
        python,
        "-I",
        "-S",
        f"{support}/boot.py",
        packed,
        workdir,
        f"{support}/inside",
        "--fd",
        str(CHANNEL_FD),
    ]


def bubblewrap(spec: SandboxSpec, *, bwrap: str, root: str, python: str) -> list[str]:
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
    argv += [
        "--proc",
        "/proc",
        "--ro-bind",
        "/proc/sys",
        "/proc/sys",
    ]
    for name in masked():
        argv += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    argv += ["--remount-ro", "/proc", "--clearenv"]
    for name, value in spec.environment().items():
        argv += ["--setenv", name, value]
    return [*argv, "--chdir", spec.workdir, "--", *server({}, spec.workdir, python=python)]


def apptainer(spec: SandboxSpec, *, runtime: str, support: str) -> list[str]:
    """Return the command of Apptainer 1.x: contained, without our environment and home,
    with writes to a tmpfs whose size the runtime sets (ProRL §3.2.2).

    `support` is the folder on the host that has boot.py and the server. Raises
    ValueError for a specification that the runtime does not support.
    """
    if spec.image == HOST:
        raise ValueError(f"image must be a .sif file or a folder for apptainer, got {HOST!r}")
    for name, value in spec.env.items():
        if "," in value:
            raise ValueError(
                f"env must have values without a comma for apptainer, got {name}={value!r}"
            )
    argv = [runtime, "exec", "--containall", "--cleanenv", "--no-home", "--writable-tmpfs"]
    argv += ["--fakeroot"] if spec.fakeroot else []
    argv += [] if spec.network else ["--net", "--network", "none"]
    argv += [
        "--uts",
        "--hostname",
        spec.hostname,
        "--bind",
        f"{support}:{SUPPORT}:ro",
        "--pwd",
        "/",
    ]
    for name, value in spec.environment().items():
        argv += ["--env", f"{name}={value}"]
    return [*argv, spec.image, *server(rlimits(spec.limits), spec.workdir)]
