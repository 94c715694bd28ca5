"""Unpacks archives that are not trusted into an open folder.

Invariants: the kernel resolves only the last name of a path, in a folder that is held
open, so no link is followed and nothing outside the folder is reached; no set-uid or
set-gid file, device, FIFO or socket is made; what is written is bounded in bytes,
entries and depth, regardless of the size that the archive declares. Standard library
alone.
"""

import contextlib
import importlib
import math
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import IO, Any, cast

PATH_BYTES = 2048
"""Maximum length of a member's path: half of the kernel's maximum, so that paths from
outside the folder fit, too.
"""

CHUNK_BYTES = 1 << 20

LATEST_S = 1 << 33
"""Maximum modification time that is kept, in seconds since 1970: file systems cannot
store later times.
"""

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags with which a folder is opened, but no link to a folder."""

_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\xfd7zXZ\x00": "lzma"}
"""First bytes of a compressed file → the module that reads it."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of one archive."""

    bytes: int = 32 << 30
    """Maximum bytes of the unpacked archive, including headers. Holes of sparse files
    count as if they were written.
    """
    members: int = 1_000_000
    """Maximum number of files, folders and links, including parent folders that the
    archive does not list.
    """
    depth: int = 100
    """Maximum number of names in a path."""
    seconds: float = 1800.0
    """Maximum seconds for unpacking."""

    def __post_init__(self) -> None:
        for field, value in asdict(self).items():
            if not 0 < value < math.inf:
                raise ValueError(f"bounds.{field} must be positive and finite, got {value}")


class Refused(Exception):
    """The archive has members that no image may have, or exceeds its bounds."""


class Tree:
    """Makes the members below an open folder."""

    def __init__(self, top: int, bounds: Bounds) -> None:
        self._top, self._bounds = top, bounds
        self._open: list[tuple[str, int]] = []
        """The parent folders of the last member, each with an open descriptor."""
        self._folders: list[tuple[list[str], tarfile.TarInfo]] = []
        self._entries = self._written = 0

    def add(self, member: tarfile.TarInfo, data: IO[bytes] | None) -> None:
        """Make one member. `data` is the content of a regular file.

        Raises Refused, OSError.
        """
        names = self._names(member.name)
        if member.isdir():
            self._folder(names, member.name)
            self._folders.append((names, member))
        elif not names:
            raise Refused(f"member {member.name!r} must be a folder, since it is the root")
        elif member.isreg() and data is not None:
            self._file(names, member, data)
        elif member.issym():
            folder = self._place(names, member.name)
            os.symlink(member.linkname, names[-1], dir_fd=folder)
            os.utime(names[-1], times(member), dir_fd=folder, follow_symlinks=False)
        elif member.islnk():
            self._link(names, member)

    def finish(self) -> None:
        """Give the folders their modes and times at the end, because making files in a
        folder changes its time. Later members come first.
        """
        for names, member in reversed(self._folders):
            folder = self._folder(names, member.name)
            os.fchmod(folder, member.mode & 0o1777 | 0o700)
            os.utime(folder, times(member))
        self._close_below(0)

    def _names(self, path: str) -> list[str]:
        """Split a path into names; a leading slash is dropped, as by GNU tar."""
        names = [name for name in path.split("/") if name not in ("", ".")]
        if ".." in names or "\0" in path:
            raise Refused(f"member {path!r:.200} must have a path without '..' and without NUL")
        check_member("/".join(names), self._entries, self._bounds)
        return names

    def _count(self) -> None:
        self._entries += 1
        check_member("", self._entries, self._bounds)

    def _folder(self, names: list[str], path: str, *, make: bool = True) -> int:
        """Return a descriptor of the folder, which is made if missing; the caller must
        not close it.
        """
        same = 0
        while same < min(len(names), len(self._open)) and self._open[same][0] == names[same]:
            same += 1
        self._close_below(same)
        for name in names[same:]:
            here = self._open[-1][1] if self._open else self._top
            try:
                below = os.open(name, FOLDER, dir_fd=here)
            except FileNotFoundError:
                if not make:
                    raise
                self._count()
                os.mkdir(name, 0o755, dir_fd=here)
                below = os.open(name, FOLDER, dir_fd=here)
            except NotADirectoryError:
                raise Refused(
                    f"member {path!r:.200} must lie in folders, and {name!r:.100} is a "
                    "link or a file"
                ) from None
            self._open.append((name, below))
        return self._open[-1][1] if self._open else self._top

    def _close_below(self, depth: int) -> None:
        while len(self._open) > depth:
            os.close(self._open.pop()[1])

    def _place(self, names: list[str], path: str) -> int:
        """Remove what has the last name of the path, and return a descriptor of the
        folder in which to make it.
        """
        folder = self._folder(names[:-1], path)
        self._count()
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(names[-1], dir_fd=folder, follow_symlinks=False).st_mode):
                raise Refused(f"member {path!r:.200} must not replace a folder")
            os.unlink(names[-1], dir_fd=folder)
        return folder

    def _file(self, names: list[str], member: tarfile.TarInfo, data: IO[bytes]) -> None:
        out = os.open(names[-1], _FILE, 0o600, dir_fd=self._place(names, member.name))
        try:
            while chunk := data.read(CHUNK_BYTES):
                self._written += len(chunk)
                check_bytes(self._written, self._bounds)
                while chunk:
                    chunk = chunk[os.write(out, chunk) :]
            os.fchmod(out, member.mode & 0o1777)
            os.utime(out, times(member))
        finally:
            os.close(out)

    def _link(self, names: list[str], member: tarfile.TarInfo) -> None:
        source = self._names(member.linkname)
        if not source:
            raise Refused(f"member {member.name!r:.200} must not be a hard link to the root")
        if source == names:
            return
        folder = os.dup(self._folder(source[:-1], member.linkname, make=False))
        try:
            place = self._place(names, member.name)
            os.link(
                source[-1], names[-1], src_dir_fd=folder, dst_dir_fd=place, follow_symlinks=False
            )
        finally:
            os.close(folder)


class Bounded:
    """A stream that refuses to be read beyond its bound."""

    def __init__(self, stream: IO[bytes], bounds: Bounds) -> None:
        self._stream, self._bounds, self._bytes = stream, bounds, 0

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._bytes += len(data)
        check_bytes(self._bytes, self._bounds)
        return data


class Header(tarfile.TarInfo):
    """A member whose invalid header is an error. `tarfile` would take an invalid header
    for the end of the archive.
    """

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "Header":
        try:
            return super().fromtarfile(archive)
        except (tarfile.TruncatedHeaderError, tarfile.InvalidHeaderError) as error:  # type: ignore[attr-defined]
            raise Refused(f"it is no archive, or torn: {error}") from error


def check_member(path: str, members: int, bounds: Bounds) -> None:
    """Raise Refused if the path, or the number of members so far, exceeds the
    bounds.
    """
    if len(os.fsencode(path)) > PATH_BYTES:
        raise Refused(f"a path must have at most {PATH_BYTES} bytes, got {path[:100]!r}…")
    if (names := path.count("/") + 1) > bounds.depth:
        raise Refused(f"a path must have at most bounds.depth = {bounds.depth} names, got {names}")
    if members > bounds.members:
        raise Refused(
            f"it must have at most bounds.members = {bounds.members} members, and has more"
        )


def check_bytes(got: int, bounds: Bounds) -> None:
    """Raise Refused if the number of bytes exceeds the bounds."""
    if got > bounds.bytes:
        raise Refused(
            f"it must unpack to at most bounds.bytes = {bounds.bytes} bytes, and unpacks to more"
        )


def times(member: tarfile.TarInfo) -> tuple[int, int]:
    """Return the times of access and modification, in whole seconds."""
    changed = int(min(max(member.mtime, 0), LATEST_S)) if math.isfinite(member.mtime) else 0
    return changed, changed


def unpack(archive: IO[bytes], top: int, bounds: Bounds) -> None:
    """Unpack an archive into an open, empty folder.

    Raises Refused, OSError, and the exceptions of decompressors.
    """
    tree = Tree(top, bounds)
    with _plain(archive) as stream:
        reading = cast(IO[bytes], Bounded(stream, bounds))
        with tarfile.open(fileobj=reading, mode="r|", tarinfo=Header) as opened:
            while (member := opened.next()) is not None:
                tree.add(member, opened.extractfile(member) if member.isreg() else None)
                cast(Any, opened).members.clear()  # otherwise all members stay in memory
        while reading.read(CHUNK_BYTES):
            pass  # read to the end, where compressed data has its checksum
    tree.finish()


@contextlib.contextmanager
def _plain(archive: IO[bytes]) -> Iterator[IO[bytes]]:
    """Return a stream of the archive without its compression."""
    start = archive.read(8)
    archive.seek(0)
    for magic, module in MAGIC.items():
        if start.startswith(magic):
            with importlib.import_module(module).open(archive) as stream:
                yield stream
            return
    yield archive
