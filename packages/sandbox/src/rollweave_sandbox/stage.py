"""Mounts a sandbox's root where only the sandbox sees it, with image and snapshots
below, and a tmpfs for all writes above.

The code runs in a process that was forked for one sandbox and becomes the sandbox.
Mounts are made in a new mount namespace. As root, the image's owner is mapped to the
sandbox's uid; as a user, a new user namespace is entered, too. If overlayfs does not
work, the image is copied.

Invariants: nothing outside `place` is written, regardless of symbolic links in an image
or a snapshot; the host's mounts do not change; all writes of the sandbox are on the one
tmpfs, or on /dev/shm, with their limits. Standard library alone.
"""

import contextlib
import errno
import os
import signal
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from rollweave_sandbox import kernel
from rollweave_sandbox.kernel import mount_devices
from rollweave_sandbox.layers import Copy, closing_fd, remove

INODE_BYTES = 8192
"""Bytes of disk space for each permitted file: the kernel needs about 1 kB for an empty
file, which no size limit counts.
"""

EMPTY_INODES = 256
"""Maximum number of inodes in a folder that appears empty: its mount points."""

WATCHERS = {"max_inotify_instances": 32, "max_inotify_watches": 65_536}
"""Limits on file watches in a sandbox's user namespace; a user usually has 128
instances.
"""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_OVERLAY, _OVERLAY_AS_ROOT, _OVERLAY_AS_USER = (
    "index=off,xino=off",
    "metacopy=off,redirect_dir=off",
    "userxattr",
)
"""Mount options with which every entry of the upper folder is stored completely;
`userxattr` implies the second option.
"""


_READ_ONLY = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID


@dataclass(frozen=True)
class Root:
    """The contents of a root. Inner paths are absolute, as the sandbox sees them."""

    layers: list[str]
    """Folders below the writes, the newest first; without layers, the root begins
    empty.
    """
    binds: list[tuple[str, str]] = field(default_factory=list)
    """Folders of the host, and the paths at which they appear, read-only."""
    links: list[tuple[str, str]] = field(default_factory=list)
    """Targets and paths of symbolic links."""
    files: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    """Folders that are made if missing, and then belong to the sandbox."""
    hidden: list[str] = field(default_factory=list)
    """Folders that appear empty and read-only, inside or around `binds`."""
    disk_bytes: int = 1 << 30


def stage(root: Root, place: str, uid: int | None) -> tuple[int, bool]:
    """Mount a root at `place`/root, for host user `uid` (None: our own user, if we are
    not root).

    `place` is an existing folder. Returns a descriptor of the folder that has the
    writes, and whether this folder also has the layers below the writes. Raises
    OSError.
    """
    if uid is None:
        enter_user_namespace(kernel.CLONE_NEWNS)
        _bound_watchers()
        owner = os.getuid()
    else:
        kernel.unshare(kernel.CLONE_NEWNS)
        owner = uid
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    size = f"size={root.disk_bytes},nr_inodes={inodes(root.disk_bytes)}"
    kernel.mount("tmpfs", place, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"{size},mode=0755")
    for name in ("upper", "work", "root"):
        os.mkdir(f"{place}/{name}", 0o755)
        os.chown(f"{place}/{name}", owner, owner)
    if root.layers:
        writes = _mount_layers(root, place, uid)
    else:
        kernel.mount(f"{place}/upper", f"{place}/root", flags=kernel.MS_BIND)
        writes = "upper"
    _populate(root, f"{place}/root", owner)
    mount_devices(f"{place}/root/dev")
    return os.open(f"{place}/{writes}", _FOLDER), not root.layers or writes == "root"


def name_account(uid: int, place: str) -> None:
    """Give the host user `uid`, who has no account, an entry in /etc/passwd and
    /etc/group that only this process and its children see. `place` is an existing
    folder. Raises OSError.
    """
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", place, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755")
    entries = {"passwd": f"sandbox:x:{uid}:{uid}::/:/bin/sh", "group": f"sandbox:x:{uid}:"}
    for name, entry in entries.items():
        with open(f"/etc/{name}", "rb") as accounts, open(f"{place}/{name}", "wb") as file:
            file.write(accounts.read().rstrip() + f"\n{entry}\n".encode())
        kernel.mount(f"{place}/{name}", f"/etc/{name}", flags=kernel.MS_BIND)


def inodes(disk_bytes: int) -> int:
    """Return the maximum number of files for this many bytes of disk."""
    return max(10_000, disk_bytes // INODE_BYTES)


def enter_user_namespace(flags: int) -> None:
    """Enter new namespaces as our own user, with all capabilities over them."""
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(kernel.CLONE_NEWUSER | flags)
    map_user(uid, uid, gid, gid)


def _bound_watchers() -> None:
    """Bound file watches: all sandboxes of a user share the user's limits, and no
    sandbox must use them up.
    """
    for name, most in WATCHERS.items():
        # If a setting cannot be written, the kernel's own limit for our user remains.
        with contextlib.suppress(OSError), open(f"/proc/sys/user/{name}", "w") as out:
            out.write(str(most))


def map_user(inside: int, uid: int, inside_gid: int, gid: int) -> None:
    """Map our user and group in the user namespace that was just made."""
    for file, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {uid} 1"),
        ("gid_map", f"{inside_gid} {gid} 1"),
    ):
        with open(f"/proc/self/{file}", "w") as out:
            out.write(line)


def _mount_layers(root: Root, place: str, uid: int | None) -> str:
    """Mount the layers; return the name of the folder that has the writes."""
    below = []
    for number, layer in enumerate(root.layers):
        target = f"{place}/l{number}"
        os.mkdir(target)
        below.append(target)
        if uid is None:
            kernel.mount(layer, target, flags=kernel.MS_BIND | kernel.MS_REC)
        else:
            _bind_mapped(layer, target, uid)
    options = f"lowerdir={':'.join(below)},upperdir={place}/upper,workdir={place}/work,{_OVERLAY}"
    options += f",{_OVERLAY_AS_USER if uid is None else _OVERLAY_AS_ROOT}"
    try:
        kernel.mount(
            "overlay", f"{place}/root", "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, options
        )
    except OSError:
        _copy_layers(root, f"{place}/root", os.getuid() if uid is None else uid)
        kernel.mount(f"{place}/root", f"{place}/root", flags=kernel.MS_BIND)
        return "root"
    return "upper"


def _copy_layers(root: Root, target: str, owner: int) -> None:
    copy = Copy(limit_bytes=root.disk_bytes, flatten=True, owner=owner)
    with closing_fd(os.open(target, _FOLDER)) as to:
        for layer in reversed(root.layers):
            with closing_fd(os.open(layer, _FOLDER)) as source:
                copy.run(source, to)


def _bind_mapped(layer: str, target: str, uid: int) -> None:
    """Mount a layer with its owner mapped to the sandbox's user, who can then change
    the layer's files in the overlay, and nowhere else.
    """
    owner = os.stat(layer)
    try:
        with closing_fd(
            _mapping(f"{owner.st_uid} {uid} 1", f"{owner.st_gid} {uid} 1")
        ) as namespace:
            kernel.bind_as(layer, target, namespace)
    except OSError:  # without a mapping of owners, files are readable as their modes allow
        kernel.mount(layer, target, flags=kernel.MS_BIND)


def _mapping(uids: str, gids: str) -> int:
    """Return a descriptor of a user namespace with these maps. A forked process makes
    the namespace.
    """
    ready_r, ready_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kernel.unshare(kernel.CLONE_NEWUSER)
            os.write(ready_w, b".")
            signal.pause()
        finally:
            os._exit(1)
    os.close(ready_w)
    try:
        os.read(ready_r, 1)
        for file, line in (("uid_map", uids), ("gid_map", gids)):
            with open(f"/proc/{pid}/{file}", "w") as out:
                out.write(line)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready_r)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _populate(root: Root, path: str, owner: int) -> None:
    with closing_fd(os.open(path, _FOLDER)) as top:
        os.fchown(top, owner, owner)
        for name in ("proc", "dev", "sys"):
            os.close(ensure_folder(top, name, owner))
        with closing_fd(ensure_folder(top, "tmp", owner)) as temporary:
            os.fchmod(temporary, 0o1777)
        mounts = [*root.binds, *(("", where) for where in root.hidden)]
        # A folder is mounted before the mounts in it.
        for source, where in sorted(mounts, key=lambda mount: mount[1].count("/")):
            if source:
                _bind(source, where, top, owner)
            else:
                _mount_empty(where, top, owner)
        for link_target, link in root.links:
            with _replaced(top, link, owner) as (folder, name):
                os.symlink(link_target, name, dir_fd=folder)
        for file, text in root.files.items():
            with (
                _replaced(top, file, owner) as (folder, name),
                closing_fd(os.open(name, _NEW_FILE, 0o644, dir_fd=folder)) as made,
            ):
                os.write(made, text.encode())
        for where in root.hidden:
            _seal(where, top)
        for path_inside in root.folders:
            _make_if_missing(top, path_inside, owner)


@contextlib.contextmanager
def _replaced(top: int, path: str, owner: int) -> Iterator[tuple[int, str]]:
    """Remove what is at the path; yield the open folder in which to make something
    else, and its name there.
    """
    folder, name = _parent(top, path, owner)
    with closing_fd(folder):
        remove(name, folder)
        yield folder, name


def _bind(source: str, where: str, top: int, owner: int) -> None:
    with closing_fd(ensure_folder(top, where, owner)) as target:
        try:
            kernel.bind_read_only(source, target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM):
                raise
        # A kernel before 5.12, or a filter of system calls that does not know the new
        # calls. The mount is by descriptor, so that no path is resolved again.
        kernel.mount(source, f"/proc/self/fd/{target}", flags=kernel.MS_BIND | kernel.MS_REC)
    # The folder is now the mounted one.
    with closing_fd(ensure_folder(top, where, owner)) as target:
        at = f"/proc/self/fd/{target}"
        kernel.mount("none", at, flags=_READ_ONLY | kernel.MS_NODEV | _locked_flags(at))


def _mount_empty(where: str, top: int, owner: int) -> None:
    """Mount a folder with room for mount points only; `_seal` makes it read-only once
    the mount points are made.
    """
    options = f"size=4k,nr_inodes={EMPTY_INODES},mode=0755"
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    with closing_fd(ensure_folder(top, where, owner)) as target:
        kernel.mount("tmpfs", f"/proc/self/fd/{target}", "tmpfs", flags, options)


def _seal(where: str, top: int) -> None:
    with closing_fd(ensure_folder(top, where)) as target:
        kernel.mount("none", f"/proc/self/fd/{target}", flags=_READ_ONLY | kernel.MS_NODEV)


def _locked_flags(path: str) -> int:
    """Return the mount's flags that a user namespace must repeat when it changes other
    flags.
    """
    flags = os.statvfs(path).f_flag
    pairs = (
        (os.ST_NODEV, kernel.MS_NODEV),
        (os.ST_NOEXEC, kernel.MS_NOEXEC),
        (os.ST_NOATIME, 0x400),
        (0x1000, 0x200000),
    )
    return sum(mount_flag for seen, mount_flag in pairs if flags & seen)  # the last: relatime


def _parent(top: int, path: str, owner: int) -> tuple[int, str]:
    folder, _, name = path.strip("/").rpartition("/")
    return (ensure_folder(top, folder, owner) if folder else os.dup(top)), name


def ensure_folder(top: int, path: str, owner: int = -1) -> int:
    """Return a descriptor of a folder below `top`, which is made if missing.

    Any part of the path that is not a folder is replaced by a folder.
    """
    here = os.dup(top)
    for name in path.strip("/").split("/"):
        try:
            is_folder = stat.S_ISDIR(os.stat(name, dir_fd=here, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            is_folder = False
        if not is_folder:
            remove(name, here)
            os.mkdir(name, 0o755, dir_fd=here)
            os.chown(name, owner, owner, dir_fd=here, follow_symlinks=False)  # -1 leaves it ours
        below = os.open(name, _FOLDER, dir_fd=here)
        os.close(here)
        here = below
    return here


def _make_if_missing(top: int, path: str, owner: int) -> None:
    """Make a folder as `ensure_folder` does, but leave the image's own links as they
    are.
    """
    names = path.strip("/").split("/")
    for count in range(1, len(names) + 1):
        here, name = _parent(top, "/".join(names[:count]), owner)
        try:
            status = os.stat(name, dir_fd=here, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                return
            # Root's folder of a layer whose owner could not be mapped.
            if count == len(names) and status.st_uid == 0 < owner:
                os.chown(name, owner, owner, dir_fd=here, follow_symlinks=False)
        except FileNotFoundError:
            os.mkdir(name, 0o755, dir_fd=here)
            os.chown(name, owner, owner, dir_fd=here, follow_symlinks=False)
        finally:
            os.close(here)
