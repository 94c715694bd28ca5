"""Layers of file systems: copies of a sandbox's writes, as a layer for the next
sandbox.

Invariants: the copied files are not trusted, so no link is followed, no open blocks,
depth and bytes are bounded, and no file of the copy can raise privileges (no set-uid,
no devices). The marks of overlayfs for removed files are preserved. Standard library
alone.
"""

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence

DEPTH = 100
"""Maximum depth of folders: each folder keeps two descriptors open while it is copied.
"""

CHUNK_BYTES = 1 << 20

OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")
"""Attributes by which overlayfs marks a folder that hides lower layers: the first if
root has mounted it, the second if a user has.
"""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Close the descriptor at the end of the context."""
    try:
        yield fd
    finally:
        os.close(fd)


def opened_folder(path: str | os.PathLike[str]) -> contextlib.AbstractContextManager[int]:
    """Open a folder for a context, which receives the descriptor. Raises OSError."""
    return closing_fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY))


class LayerError(OSError):
    """A layer cannot be copied: too deep, too large, or unreadable."""


class Copy:
    """Copies a folder's content into an existing folder.

    `flatten` applies removals instead of preserving their marks.
    """

    def __init__(
        self,
        *,
        limit_bytes: int,
        skip: frozenset[str] = frozenset(),
        only: Sequence[str] = (),
        flatten: bool = False,
        owner: int = -1,
    ) -> None:
        """Prepare a copy. `skip` has paths, relative to the folder, that are left out;
        `owner` is the uid and gid of the files that are made.

        With `only`, just these paths are copied, without symbolic links that lead out
        of the folder. The copy's owner can read every copied file.
        """
        self.bytes = 0
        self._limit_bytes, self._skip, self._only = limit_bytes, skip, tuple(only)
        self._flatten, self._owner = flatten, owner

    def run(self, source: int, target: int) -> None:
        """Copy between two open folders. Raises LayerError, OSError."""
        self._folder(source, target, "", 0)

    def _folder(self, source: int, target: int, path: str, depth: int) -> None:
        if depth > DEPTH:
            raise LayerError(f"folders must be at most {DEPTH} deep, got more at {path[:60]!r}…")
        for name in sorted(os.listdir(source)):
            where = f"{path}{name}"
            if where in self._skip or not self._is_wanted(where):
                continue
            status = os.stat(name, dir_fd=source, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                self._subfolder(source, target, name, status, f"{where}/", depth)
                continue
            is_whiteout = stat.S_ISCHR(status.st_mode) and status.st_rdev == 0
            if not (is_whiteout or stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
                continue  # sockets, FIFOs and devices are useless outside their sandbox
            if self._flatten:
                remove(name, target)
            if self._only and not self._is_selected(where):
                continue  # the file is in the place of a wanted path's folder
            if is_whiteout and not self._flatten:
                os.mknod(name, stat.S_IFCHR, 0, dir_fd=target)
            elif stat.S_ISLNK(status.st_mode):
                link_target = os.readlink(name, dir_fd=source)
                if self._only and leads_out(link_target, where.count("/")):
                    continue
                os.symlink(link_target, name, dir_fd=target)
                os.chown(name, self._owner, self._owner, dir_fd=target, follow_symlinks=False)
            elif stat.S_ISREG(status.st_mode):
                self._file(source, target, name, where)

    def _is_wanted(self, where: str) -> bool:
        """Return whether anything at or below a path is to be copied."""
        return (
            not self._only
            or self._is_selected(where)
            or any(path.startswith(f"{where}/") for path in self._only)
        )

    def _is_selected(self, where: str) -> bool:
        return any(
            path == "." or where == path or where.startswith(f"{path}/") for path in self._only
        )

    def _subfolder(
        self, source: int, target: int, name: str, status: os.stat_result, path: str, depth: int
    ) -> None:
        with closing_fd(os.open(name, _FOLDER, dir_fd=source)) as inner:
            marks = {
                mark: os.getxattr(inner, mark) for mark in OPAQUE if mark in os.listxattr(inner)
            }
            if self._flatten and (marks or not _is_folder(name, target)):
                remove(name, target)
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=target)
            with closing_fd(os.open(name, _FOLDER, dir_fd=target)) as outer:
                self._folder(inner, outer, path, depth + 1)
                if not self._flatten:
                    for mark, value in marks.items():
                        os.setxattr(outer, mark, value)
                self._finish(outer, status)

    def _file(self, source: int, target: int, name: str, where: str) -> None:
        with closing_fd(os.open(name, _FILE, dir_fd=source)) as inner:
            status = os.fstat(inner)
            if not stat.S_ISREG(status.st_mode):
                return  # the file was replaced since
            with closing_fd(os.open(name, _NEW_FILE, 0o600, dir_fd=target)) as outer:
                self._data(inner, outer, status.st_size, where)
                self._finish(outer, status)

    def _data(self, inner: int, outer: int, size: int, where: str) -> None:
        """Copy the data of a file, and keep its holes."""
        position = 0
        while position < size:
            try:
                position = os.lseek(inner, position, os.SEEK_DATA)
            except OSError:  # ENXIO: a hole to the end
                break
            end = min(size, os.lseek(inner, position, os.SEEK_HOLE))
            while position < end:
                data = os.pread(inner, min(CHUNK_BYTES, end - position), position)
                if not data:
                    break
                self.bytes += len(data)
                if self.bytes > self._limit_bytes:
                    raise LayerError(
                        f"a layer must have at most {self._limit_bytes} bytes, got "
                        f"more at {where[:200]!r}"
                    )
                position += os.pwrite(outer, data, position)
            if position < end:
                break  # the file was truncated since
        os.ftruncate(outer, size)

    def _finish(self, fd: int, status: os.stat_result) -> None:
        if self._owner >= 0:
            os.fchown(fd, self._owner, self._owner)
        mode = status.st_mode & 0o1777 | (0o400 if self._only else 0)
        # The owner must be able to remove a folder.
        os.fchmod(fd, mode | 0o700 if stat.S_ISDIR(status.st_mode) else mode)
        os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))


def copy_selected(
    layers: Sequence[int], folder: str, target: int, only: Sequence[str], *, limit_bytes: int
) -> int:
    """Copy the paths `only` of the folder `folder`, as the union of the open `layers`
    shows them, into the open `target`.

    The oldest layer comes first. Returns the number of bytes. Raises LayerError,
    OSError.
    """
    copy = Copy(limit_bytes=limit_bytes, only=only, flatten=True)
    for layer in layers:
        here, is_new = _descend(layer, folder)
        if is_new:
            for name in os.listdir(target):
                remove(name, target)
        if here >= 0:
            with closing_fd(here):
                copy.run(here, target)
    return copy.bytes


def _descend(layer: int, folder: str) -> tuple[int, bool]:
    """Open a folder of one layer; -1 if the layer lacks the folder. Also return whether
    the layer hides this folder of the layers below.
    """
    here, is_new = os.dup(layer), False
    for name in folder.strip("/").split("/"):
        try:
            below = os.open(name, _FOLDER, dir_fd=here)
        except FileNotFoundError:
            below = -1
        except NotADirectoryError:  # a whiteout, or something that is not a folder
            below, is_new = -1, True
        os.close(here)
        if below < 0:
            return -1, is_new
        here = below
        is_new = is_new or any(mark in os.listxattr(here) for mark in OPAQUE)
    return here, is_new


def leads_out(link: str, depth: int) -> bool:
    """Return whether a symbolic link in a folder `depth` levels below the top may lead
    out of the top folder. After a name, `..` need not lead back, because the name may
    also be a link.
    """
    names = [name for name in link.split("/") if name not in ("", ".")]
    ups = next((place for place, name in enumerate(names) if name != ".."), len(names))
    return link.startswith("/") or ups > depth or ".." in names[ups:]


def remove(name: str, folder: int) -> None:
    """Remove the file or tree `name` from an open folder, if it exists."""
    if _is_folder(name, folder):
        with closing_fd(os.open(name, _FOLDER, dir_fd=folder)) as inner:
            for below in os.listdir(inner):
                remove(below, inner)
        os.rmdir(name, dir_fd=folder)
    else:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


def _is_folder(name: str, folder: int) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
