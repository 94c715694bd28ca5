"""From a specification to the command line that makes the sandbox, for each runtime: pure, so that golden tests can hold it.

A runtime is given a root, or an image, the server's socket as CHANNEL_FD, and, where it takes one, the seccomp program as
SECCOMP_FD. Nothing of our environment is named.
"""

import json

from rollweave.sandbox.base import HOST, MIB, Limits, SandboxSpec

CHANNEL_FD, SECCOMP_FD = 3, 4

SUPPORT = "/run/rollweave"
"""Where a sandbox sees boot.py and the server."""

SHM_BYTES = 64 * MIB
"""Of /dev/shm, as container engines have it."""

UID = 1000
"""Of the agent, as seen inside."""


def rlimits(limits: Limits) -> dict[str, int]:
    """Limits of each process, by their names in <sys/resource.h>, as boot.py takes them.

    Private memory, not address space: programs reserve much more of the latter than they use.
    """
    return {
        "NPROC": limits.processes,
        "DATA": limits.memory_bytes,
        "FSIZE": limits.disk_bytes,
        "NOFILE": limits.files,
        "CPU": max(1, int(limits.cpu_s)),
    }


def server(limits: dict[str, int], workdir: str, *, python: str = "python3", support: str = SUPPORT) -> list[str]:
    """The program inside: the server, within the limits of a process."""
    packed = json.dumps(limits, sort_keys=True)
    return [python, "-I", f"{support}/boot.py", packed, workdir, f"{support}/inside", "--fd", str(CHANNEL_FD)]


def bubblewrap(spec: SandboxSpec, *, bwrap: str, root: str, python: str) -> list[str]:
    """Of bubblewrap 0.8 or later: all namespaces new, no capability, a root that is mounted at `root` already."""
    uid = "0" if spec.fakeroot else str(UID)
    argv = [bwrap, "--unshare-user", "--uid", uid, "--gid", uid, "--unshare-ipc", "--unshare-pid"]
    argv += [] if spec.network else ["--unshare-net"]
    argv += ["--unshare-uts", "--unshare-cgroup", "--disable-userns", "--assert-userns-disabled"]
    argv += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", spec.hostname]
    argv += ["--seccomp", str(SECCOMP_FD), "--bind", root, "/", "--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"]
    argv += ["--dev", "/dev", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev", "--clearenv"]
    for name, value in spec.environment().items():
        argv += ["--setenv", name, value]
    return [*argv, "--chdir", spec.workdir, "--", *server(rlimits(spec.limits), spec.workdir, python=python)]


def apptainer(spec: SandboxSpec, *, runtime: str, support: str) -> list[str]:
    """Of Apptainer 1.x: contained, no environment, no home, writes to a tmpfs of the runtime's own size (ProRL §3.2.2).

    `support` is the folder on the host that has boot.py and the server. Raises ValueError for what the runtime cannot give.
    """
    if spec.image == HOST:
        raise ValueError(f"image must be a .sif file or a folder for apptainer, got {HOST!r}")
    for name, value in spec.env.items():
        if "," in value:
            raise ValueError(f"env must have values without a comma for apptainer, got {name}={value!r}")
    argv = [runtime, "exec", "--containall", "--cleanenv", "--no-home", "--writable-tmpfs"]
    argv += ["--fakeroot"] if spec.fakeroot else []
    argv += [] if spec.network else ["--net", "--network", "none"]
    argv += ["--uts", "--hostname", spec.hostname, "--bind", f"{support}:{SUPPORT}:ro", "--pwd", "/"]
    for name, value in spec.environment().items():
        argv += ["--env", f"{name}={value}"]
    return [*argv, spec.image, *server(rlimits(spec.limits), spec.workdir)]
