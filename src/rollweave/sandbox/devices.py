"""The /dev of a sandbox: a few harmless devices, and terminals and shared memory that
belong to the sandbox alone and are limited.

Every back end mounts this /dev with the root, because the /dev that bubblewrap makes,
for example, has no such limits. Standard library alone.
"""

import os

from rollweave.sandbox import kernel

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}

TERMINALS = 32
"""Maximum number of pseudo-terminals of one sandbox: the kernel has about 4,000 for the
whole machine.
"""

SHM_BYTES = 64 << 20
"""Size of /dev/shm in bytes, as in container engines."""

SHM_FILES = 8192
"""Maximum number of files in /dev/shm."""

MASKED = ("cmdline", "key-users", "keys", "timer_list")
"""Files of /proc with the kernel's command line, and with processes and keys from
outside the sandbox.
"""

_QUIET = kernel.MS_NOSUID | kernel.MS_NOEXEC


def masked() -> list[str]:
    """Return the masked files of /proc that this kernel has."""
    return [name for name in MASKED if os.path.exists(f"/proc/{name}")]


def mount_devices(dev: str) -> None:
    """Mount the devices on the folder `dev`, read-only except for /dev/shm and the
    terminals. Raises OSError.
    """
    kernel.mount("tmpfs", dev, "tmpfs", _QUIET, "size=64k,nr_inodes=64,mode=0755")
    for name in DEVICES:
        os.close(os.open(f"{dev}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        kernel.mount(f"/dev/{name}", f"{dev}/{name}", flags=kernel.MS_BIND)
    for name, target in LINKS.items():
        os.symlink(target, f"{dev}/{name}")
    os.mkdir(f"{dev}/pts", 0o755)
    kernel.mount(
        "devpts",
        f"{dev}/pts",
        "devpts",
        _QUIET,
        f"newinstance,ptmxmode=0666,mode=0620,max={TERMINALS}",
    )
    os.mkdir(f"{dev}/shm", 0o1777)
    size = f"size={SHM_BYTES},nr_inodes={SHM_FILES},mode=1777"
    kernel.mount("tmpfs", f"{dev}/shm", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size)
    kernel.mount("none", dev, flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | _QUIET)
