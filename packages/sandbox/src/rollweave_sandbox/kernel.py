"""System calls that set up sandboxes and that Python does not provide, and the /dev of
a sandbox: a few harmless devices, and terminals and shared memory that belong to the
sandbox alone and are limited. Linux only, standard library alone.

Every back end mounts this /dev with the root, because the /dev that bubblewrap makes,
for example, has no such limits.

Invariant: a call that fails raises OSError with the kernel's error number and the name
of the call; nothing is retried.
"""

import ctypes
import os
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1, 0x2, 0x4, 0x8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 22, 36, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522

_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442
"""Numbers that are the same on every architecture, like the numbers of all calls since
Linux 5.0.
"""
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
_SYS_SET_HOSTNAME = {"x86_64": 170, "aarch64": 161}

_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_EMPTY_PATH = 1, 0x4, 0x40
_AT_EMPTY_PATH, _AT_RECURSIVE = 0x1000, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 0x1, 0x2, 0x4
_MOUNT_ATTR_IDMAP = 0x00100000

_libc = ctypes.CDLL(None, use_errno=True)

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

_QUIET = MS_NOSUID | MS_NOEXEC


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    """Call mount(2)."""
    result = _libc.mount(
        source.encode(),
        target.encode(),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        data.encode() or None,
    )
    _check(result, f"mount of {kind or source} on {target}")


def unmount(target: str, flags: int = 0) -> None:
    """Call umount2(2)."""
    _check(_libc.umount2(target.encode(), flags), f"umount of {target}")


def bind_as(source: str, target: str, userns: int) -> None:
    """Mount the folder `source` on `target` read-only, with the owners of its files as
    the user namespace `userns` maps them.
    """
    folder = os.open(target, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _attach(source, folder, _MOUNT_ATTR_IDMAP | _MOUNT_ATTR_RDONLY, userns=userns)
    finally:
        os.close(folder)


def bind_read_only(source: str, target: int) -> None:
    """Mount the folder `source`, with all that is mounted in it, on the open folder
    `target`: read-only, without set-uid programs and devices. Needs Linux 5.12.
    """
    flags = _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV
    _attach(source, target, flags, recursive=_AT_RECURSIVE)


def _attach(source: str, target: int, flags: int, *, userns: int = 0, recursive: int = 0) -> None:
    tree = _syscall(
        _SYS_OPEN_TREE,
        "open_tree",
        ctypes.c_int(-100),
        source.encode(),
        ctypes.c_uint(_OPEN_TREE_CLONE | recursive),
    )
    try:
        attr = struct.pack("=QQQQ", flags, 0, 0, userns)
        _syscall(
            _SYS_MOUNT_SETATTR,
            "mount_setattr",
            tree,
            b"",
            _AT_EMPTY_PATH | recursive,
            attr,
            ctypes.c_size_t(len(attr)),
        )
        _syscall(
            _SYS_MOVE_MOUNT,
            "move_mount",
            tree,
            b"",
            target,
            b"",
            _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH,
        )
    finally:
        os.close(tree)


def pivot_root(new_root: str) -> None:
    """Make `new_root`, a mount point, the root, and remove the old root from this mount
    namespace.
    """
    os.chdir(new_root)
    _syscall(_SYS_PIVOT_ROOT[os.uname().machine], "pivot_root", b".", b".")
    unmount(".", MNT_DETACH)
    os.chdir("/")


def set_hostname(name: str) -> None:
    _syscall(
        _SYS_SET_HOSTNAME[os.uname().machine],
        "sethostname",
        name.encode(),
        ctypes.c_size_t(len(name.encode())),
    )


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this process a signal when the parent's thread that made it
    ends. A change of credentials resets this setting.
    """
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def set_dumpable(value: int) -> None:
    """Set whether /proc/self belongs to our user (1) or to root (0)."""
    _prctl(_PR_SET_DUMPABLE, value)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def drop_capabilities() -> None:
    """Drop all capabilities irrevocably, including capabilities that a program's file
    grants.
    """
    for number in range(64):
        try:
            _prctl(_PR_CAPBSET_DROP, number)
        except OSError:  # the kernel has no more capabilities
            break
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _syscall(_SYS_CAPSET[os.uname().machine], "capset", header, bytes(24))


def no_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def load_filter(program: bytes) -> None:
    """Filter this process's system calls by a classic BPF program, 8 bytes an
    instruction. Call `no_new_privileges` before.
    """
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: a count, padding, a pointer
    fprog = ctypes.create_string_buffer(
        struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    )
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, fprog, 0, 0), "seccomp")


def _prctl(option: int, value: int) -> None:
    long = ctypes.c_ulong
    _check(_libc.prctl(option, long(value), long(0), long(0), long(0)), f"prctl {option}")


def _syscall(number: int, what: str, *args: object) -> int:
    return _check(_libc.syscall(ctypes.c_long(number), *args), what)


def _check(result: int, what: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def masked() -> list[str]:
    """Return the masked files of /proc that this kernel has."""
    return [name for name in MASKED if os.path.exists(f"/proc/{name}")]


def mount_devices(dev: str) -> None:
    """Mount the devices on the folder `dev`, read-only except for /dev/shm and the
    terminals. Raises OSError.
    """
    mount("tmpfs", dev, "tmpfs", _QUIET, "size=64k,nr_inodes=64,mode=0755")
    for name in DEVICES:
        os.close(os.open(f"{dev}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        mount(f"/dev/{name}", f"{dev}/{name}", flags=MS_BIND)
    for name, target in LINKS.items():
        os.symlink(target, f"{dev}/{name}")
    os.mkdir(f"{dev}/pts", 0o755)
    mount(
        "devpts",
        f"{dev}/pts",
        "devpts",
        _QUIET,
        f"newinstance,ptmxmode=0666,mode=0620,max={TERMINALS}",
    )
    os.mkdir(f"{dev}/shm", 0o1777)
    size = f"size={SHM_BYTES},nr_inodes={SHM_FILES},mode=1777"
    mount("tmpfs", f"{dev}/shm", "tmpfs", MS_NOSUID | MS_NODEV, size)
    mount("none", dev, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | _QUIET)
