"""Writing of the run's own files: append-only files of whole pieces, and small files
and directories that are replaced atomically.

Invariants: when `append` returns, the operating system has the piece; if a write fails
(because of a full disk, for example) the file is unchanged, and the error is a
`DiskError` that names the file.
"""

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import xxhash

from rollweave.schema.errors import DiskError

NEW_SUFFIX = ".new"
"""Suffix of a replacement's name until it is complete."""

READ_CHUNK = 1 << 20
"""Number of bytes in one read while a file's digest is computed."""

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Constants from <linux/fcntl.h> and <linux/fs.h>, because Python's os does not have
the call.
"""

KEEP_SIZE, PUNCH_HOLE = 1, 2
"""Constants from <linux/falloc.h>, likewise."""

PARTIAL = ".partial-"
"""Separates the name of a directory from the process that is filling it."""

REPLACED_SUFFIX = ".partial-replaced"
"""Suffix of a directory that is being replaced on a file system that cannot exchange
two names.
"""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError in this context into a `DiskError` about `path`."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error) from error


def disk_error(path: Path, error: OSError) -> DiskError:
    return DiskError(error.errno or 0, f"cannot write {path}: {error.strerror or error}")


class AppendFile:
    """A file that only grows. It has no buffer: each piece is one write."""

    def __init__(self, path: Path, *, keep: int, header: bytes = b"") -> None:
        """Open or create `path`, and truncate it to `keep` bytes; if `keep` is 0, write
        `header`.

        Raises DiskError.
        """
        self.path = path
        self.size = keep
        """Number of bytes written, always whole pieces."""
        self._is_named = path.exists()
        """True if the file's entry in its directory is on the disk, or existed before.
        """
        with writing(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            with writing(path):
                os.ftruncate(self._fd, keep)
            if keep == 0:
                self.append(header)
        except BaseException:
            self.close()
            raise

    def append(self, piece: bytes) -> int:
        """Write one piece and return its offset.

        Raises DiskError; the file is then unchanged.
        """
        offset, view, done = self.size, memoryview(piece), 0
        try:
            while done < len(piece):
                done += os.pwrite(self._fd, view[done:], offset + done)
        except BaseException as error:
            os.ftruncate(self._fd, offset)  # a partial piece must not precede the next one
            if isinstance(error, OSError):
                raise disk_error(self.path, error) from error
            raise
        self.size = offset + done
        return offset

    def sync(self) -> None:
        """Sync the file to the disk, and its name if the file is new, so that both
        survive a power loss.

        Raises DiskError.
        """
        with writing(self.path):
            os.fsync(self._fd)
        if not self._is_named:
            with contextlib.suppress(OSError):  # some file systems cannot sync a directory
                sync(self.path.parent)
            self._is_named = True

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def replace_file(path: Path, content: bytes, *, mode: int = 0o666, synced: bool = True) -> None:
    """Write `content` to `path` atomically, and sync it to the disk if `synced`. Raises
    DiskError; `path` is then unchanged.

    `mode` is as for `open(2)`: the umask applies.
    """
    new = path.with_name(path.name + NEW_SUFFIX)
    with writing(path):
        try:
            new.unlink(missing_ok=True)  # a leftover may have another mode
            with open(new, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(content)
                file.flush()
                if synced:
                    os.fsync(file.fileno())
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
    # `path` is replaced, but some file systems cannot sync a directory.
    with contextlib.suppress(OSError):
        if synced:
            sync(path.parent)


def replace_directory(path: Path, new: Path) -> None:
    """Give the complete and synced directory `new` the name `path`, and remove the
    directory that has had this name, if any.

    `path` always refers to a complete directory, except for a moment on file systems
    such as NFS, which cannot exchange two names: a process that is killed then leaves
    the former directory with REPLACED_SUFFIX. Passes OSErrors through, with `path`
    unchanged.
    """
    former = None
    if not path.exists():
        new.rename(path)
    elif _exchange(new, path):
        former = new
    else:
        former = path.with_name(path.name + REPLACED_SUFFIX)
        shutil.rmtree(former, ignore_errors=True)
        path.rename(former)
        try:
            new.rename(path)
        except OSError:
            former.rename(path)
            raise
    sync(path.parent)
    if former is not None:
        shutil.rmtree(former, ignore_errors=True)  # a leftover only takes space


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory to fill; on success it is synced and becomes `path`,
    replacing an existing directory; on failure nothing is left behind, and the existing
    directory is untouched. Passes OSErrors through.

    An unfinished directory has the suffix `.partial-…`, and is removed by the next
    writer of the same name, or when the run is resumed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for sibling in path.parent.iterdir():
        if sibling.name.startswith(path.name + PARTIAL):
            shutil.rmtree(sibling, ignore_errors=True)
    partial = path.with_name(f"{path.name}{PARTIAL}{os.getpid()}")
    try:
        partial.mkdir()
        yield partial
        _sync_tree(partial)
        replace_directory(path, partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _sync_tree(root: Path) -> None:
    for directory, _, names in os.walk(root):
        for name in names:
            sync(Path(directory, name))
        sync(Path(directory))


def file_digest(path: Path) -> str:
    """Return the xxh3-128 of the file, in hex. Raises OSError."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(READ_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def free_space(fd: int, end: int) -> None:
    """Free the space of the file's first `end` bytes, which then read as zeros. The
    file keeps its size. Has no effect on file systems without holes.
    """
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
    if fallocate is not None:
        fallocate(fd, KEEP_SIZE | PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(end))


def sync(path: Path) -> None:
    """Sync a file or directory to the disk. Passes OSErrors through."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories' names in one step. Return False if the file system
    cannot.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE):
        code = ctypes.get_errno()
        if code == errno.EINVAL:
            return False
        raise OSError(code, os.strerror(code), str(other))
    return True
