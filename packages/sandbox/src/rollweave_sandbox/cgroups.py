"""Control groups: limits that the kernel enforces for all processes of a sandbox
together.

Nothing else counts kernel memory that no process maps (buffers of sockets and pipes,
page tables, file watches, shared memory that was unmapped). Groups of version 1 and 2
are used where they can be made. They are made below our own group, whose limits then
hold for sandboxes, too. In version 2, a group that contains processes cannot limit
groups below it, so they are made next to our own group. Where groups cannot be made,
`Groups.missing` says why, and `doctor` reports the reason to the user.

Invariants: nothing outside the folders that we made is changed; a live owner's folder
is locked, and the next owner removes folders that are not locked; a sandbox joins its
groups before anything else, or does not start. Standard library alone.
"""

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rollweave.io.locked_folders import try_lock

CONTROLLERS = ("memory", "pids")

WITHOUT = {
    "memory": "buffers of sockets and pipes, watches of files and shared memory that was unmapped "
    "are not limited; what processes have mapped is looked at every 0.1 s",
    "pids": "processes are limited by the kernel for each user alone, which sandboxes of `plain` "
    "share with us",
}
"""Controller → what is unbounded, or bounded less well, without it: for users."""

PREFIX = "rollweave-sandboxes-"
"""Prefix of our folders' names.

Each owner has one folder in each hierarchy, with a group for each sandbox in it.
"""

OWN_GROUP = re.compile(PREFIX + "[0-9a-f]{16}")

SOCKET_BYTES = 64 << 20
"""Maximum size of a sandbox's IP socket buffers in version 1, which does not count them
as memory.
"""

BATCH_BYTES = 4 << 20
"""Bytes below its limit at which a group may already be full, because each core takes
pages in batches.
"""

OWN_PROCESSES = 8
"""Number of the back end's own processes in a group, which do not count as the
sandbox's.
"""

REMOVE_S = 2.0
"""Maximum seconds until a group whose processes have all ended can be removed."""

SWEPT_DEPTH = 3
"""Number of levels below our own group's parent that are searched for folders of dead
owners.
"""

NO_CONTROLLER = "this machine has none"


@dataclass(frozen=True)
class Place:
    """A group in which our groups can be made."""

    version: int
    folder: str
    above: str
    """The folder of its parent, if it is visible to us."""


@dataclass(frozen=True)
class Group:
    """The groups of one sandbox: a version and a folder for each available
    controller.
    """

    folders: dict[str, tuple[int, str]]

    @property
    def paths(self) -> set[str]:
        return {folder for _, folder in self.folders.values()}

    def limit(self, *, memory_bytes: int, processes: int) -> None:
        """Set their limits. Raises OSError."""
        if "pids" in self.folders:
            _write(f"{self.folders['pids'][1]}/pids.max", str(processes + OWN_PROCESSES))
        if "memory" in self.folders:
            _limit_memory(*self.folders["memory"], memory_bytes)

    def join(self) -> None:
        """Move this process into them.

        The move takes the kernel some 15 ms unless it has just moved another process.
        Raises OSError.
        """
        for folder in self.paths:
            _write(f"{folder}/cgroup.procs", "0")

    def out_of_memory(self) -> bool:
        """Return whether the kernel killed a process because the group was at its
        limit, not because the machine's memory was full.
        """
        if "memory" not in self.folders:
            return False
        version, folder = self.folders["memory"]
        try:
            if version == 2:
                events = _numbers(f"{folder}/memory.events")
                return bool(events.get("oom_kill") and events.get("oom"))
            if not _numbers(f"{folder}/memory.oom_control").get("oom_kill"):
                return False
            return (
                _number(f"{folder}/memory.max_usage_in_bytes")
                >= _number(f"{folder}/memory.limit_in_bytes") - BATCH_BYTES
            )
        except FileNotFoundError:
            return False

    def remove(self) -> bool:
        """Remove the groups; return True if they are gone.

        A group with a process in it stays.
        """
        removed = [_removed(folder) for folder in self.paths]
        return all(removed)


class Groups:
    """The groups of one owner's sandboxes. `close` removes them."""

    def __init__(self, proc: str = "/proc/self") -> None:
        """Make a folder in each hierarchy that permits it.

        The files `cgroup` and `mountinfo` in `proc` say where we are.
        """
        self.missing: dict[str, str] = {}
        """Controller → why it is not available."""
        self._bases: dict[str, tuple[int, str]] = {}
        self._locks: list[int] = []
        base_of: dict[str, str] = {}
        for controller in CONTROLLERS:
            self.missing[controller] = NO_CONTROLLER
            for place in _places(proc, controller):
                try:
                    base = base_of.get(place.folder) or self._base(place)
                    base_of[place.folder] = base
                    if place.version == 2:
                        _write(f"{base}/cgroup.subtree_control", f"+{controller}")
                except OSError as error:
                    self.missing[controller] = f"{place.folder}: {error.strerror}"
                else:
                    self._bases[controller] = (place.version, base)
                    del self.missing[controller]
                    break

    @property
    def versions(self) -> dict[str, int]:
        """Controller → the version of control groups that bounds its resource."""
        return {controller: version for controller, (version, _) in self._bases.items()}

    def make(self, name: str) -> Group:
        """Make the groups of a sandbox.

        Raises OSError; then none of the groups is left.
        """
        group = Group(
            {
                controller: (version, f"{base}/{name}")
                for controller, (version, base) in self._bases.items()
            }
        )
        try:
            for folder in group.paths:
                os.mkdir(folder)
        except OSError:
            group.remove()
            raise
        return group

    def close(self) -> None:
        """Remove all groups once their processes have ended."""
        deadline = time.monotonic() + REMOVE_S
        for base in {base for _, base in self._bases.values()}:
            while not _remove_tree(base) and time.monotonic() < deadline:
                time.sleep(0.005)
        for lock in self._locks:
            os.close(lock)
        self._bases, self._locks = {}, []

    def _base(self, place: Place) -> str:
        remove_stale(place)
        while True:
            base = f"{place.folder}/{PREFIX}{secrets.token_hex(8)}"
            os.mkdir(base, 0o755)
            with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                lock = try_lock(base)
                if lock is not None:
                    self._locks.append(lock)
                    if os.path.isdir(base):
                        return base


def unbounded() -> dict[str, str]:
    """Return, by controller, why the kernel cannot bound the memory or processes of a
    whole sandbox here; empty if it can.
    """
    groups = Groups()
    groups.close()
    return groups.missing


def remove_all_stale() -> None:
    """Remove the groups that dead owners have left in any hierarchy."""
    for controller in CONTROLLERS:
        for place in _places("/proc/self", controller):
            remove_stale(place)


def remove_stale(place: Place) -> None:
    """Remove the groups that dead owners have left near a place, which are not locked
    and have no process.
    """
    for base in _own_groups(place.above, SWEPT_DEPTH):
        with contextlib.suppress(OSError):
            lock = try_lock(base)
            if lock is not None:
                _remove_tree(base)
                os.close(lock)


def _own_groups(folder: str, depth: int) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if OWN_GROUP.fullmatch(entry.name):
                    yield entry.path
                elif depth > 1:
                    yield from _own_groups(entry.path, depth - 1)


def _places(proc: str, controller: str) -> Iterator[Place]:
    """Yield places for our groups, the best first: in version 1 our own group, in
    version 2 our own group and its parent.
    """
    with open(f"{proc}/cgroup") as lines:
        own = [line.rstrip("\n").split(":", 2) for line in lines]
    for _, names, path in own:
        if controller in names.split(","):
            for folder, top in _seen(proc, "cgroup", controller, path):
                yield Place(1, folder, _above(folder, top))
    for _, names, path in own:
        if not names:
            for folder, top in _seen(proc, "cgroup2", "", path):
                above = _above(folder, top)
                for candidate in dict.fromkeys((folder, above)):
                    if controller in _words(f"{candidate}/cgroup.controllers") and _offers(
                        candidate, controller
                    ):
                        yield Place(2, candidate, above)


def _seen(proc: str, kind: str, option: str, path: str) -> Iterator[tuple[str, str]]:
    """Yield the paths at which a group's folder is mounted, with their mount points."""
    with open(f"{proc}/mountinfo") as lines:
        mounts = [line.split() for line in lines]
    for fields in mounts:
        middle = fields.index("-")
        root, point, options = fields[3], fields[4], fields[-1].split(",")
        if (
            fields[middle + 1] == kind
            and (not option or option in options)
            and f"{path}/".startswith(f"{root.rstrip('/')}/")
        ):
            yield f"{point}/{path[len(root.rstrip('/')) :].strip('/')}".rstrip("/"), point


def _above(folder: str, top: str) -> str:
    return folder if folder == top else os.path.dirname(folder)


def _offers(folder: str, controller: str) -> bool:
    """Return whether a group of version 2 offers the controller to groups below it;
    switch it on if the group is delegated to us.
    """
    control = f"{folder}/cgroup.subtree_control"
    if controller not in _words(control) and _delegated(folder):
        with contextlib.suppress(OSError):  # the group contains processes
            _write(control, f"+{controller}")
    return controller in _words(control)


def _delegated(folder: str) -> bool:
    """Return whether the group is delegated to us: it is our user's own, or the service
    manager has marked it.
    """
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            return os.getxattr(folder, name) == b"1"
    owner = os.stat(folder).st_uid
    return owner == os.getuid() and owner != 0


def _limit_memory(version: int, folder: str, limit: int) -> None:
    if version == 2:
        _write(f"{folder}/memory.max", str(limit))
        _write(f"{folder}/memory.oom.group", "1")
        optional = {"memory.swap.max": 0}
    else:
        _write(f"{folder}/memory.limit_in_bytes", str(limit))
        optional = {
            "memory.memsw.limit_in_bytes": limit,
            "memory.kmem.tcp.limit_in_bytes": SOCKET_BYTES,
        }
    for name, value in optional.items():
        with contextlib.suppress(OSError):  # a kernel that has no swap, or does not count it
            _write(f"{folder}/{name}", str(value))


def _write(path: str, value: str) -> None:
    # only the kernel makes these files
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, value.encode())
    finally:
        os.close(file)


def _words(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read().split()
    except OSError:
        return []


def _numbers(path: str) -> dict[str, int]:
    """Read a file whose lines consist of a name and a number."""
    with open(path) as lines:
        return {name: int(number) for name, number in (line.split() for line in lines)}


def _number(path: str) -> int:
    with open(path) as file:
        return int(file.read())


def _remove_tree(base: str) -> bool:
    """Remove a group as `_removed` does, after the groups below it."""
    with contextlib.suppress(OSError), os.scandir(base) as entries:
        for folder in [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]:
            _removed(folder)
    return _removed(base)


def _removed(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
