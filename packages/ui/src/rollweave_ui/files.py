"""Read files while a run appends to them or replaces them."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from rollweave.io.reading import named, opened

READ_BYTES = 8 << 20
"""Maximum number of bytes in one read."""

HELD_S = 5.0
"""Maximum seconds for which a thread waits for another thread that reads the same run.
"""


class UnknownRunError(Exception):
    """There is no such run, or no such attempt in it; the message is one line."""


class AppendedFile:
    """A file of lines that grows. Lines that were read are not read again, unless the
    file was replaced or became shorter.

    A last line equal to `ending` is not read: later lines overwrite it.
    """

    def __init__(self, path: Path, *, ending: bytes = b"") -> None:
        self._path, self._ending = path, ending
        self._inode = -1
        self._offset = 0
        self._size = 0
        self.problem = ""
        """Why the existing file cannot be read; "" otherwise."""

    @property
    def unread(self) -> bool:
        """True if the last call is known to have left complete lines unread."""
        return self._size - self._offset >= READ_BYTES

    def lines(self) -> tuple[list[bytes], bool]:
        """Return the complete lines since the last call, at most `READ_BYTES` bytes,
        and whether another file has replaced the file that was read before.

        A missing file has no lines. Only the end of a line longer than `READ_BYTES` is
        returned.
        """
        try:
            with opened(self._path) as file:
                status = os.fstat(file.fileno())
                replaced = self._inode >= 0 and (
                    status.st_ino != self._inode or status.st_size < self._offset
                )
                if replaced:
                    self._offset = 0
                self._inode, self._size = status.st_ino, status.st_size
                piece = os.pread(file.fileno(), READ_BYTES, self._offset)
        except OSError as error:
            gone = self._inode >= 0
            self.problem = "" if isinstance(error, FileNotFoundError) else named(error)
            self._inode, self._offset, self._size = -1, 0, 0
            return [], gone
        self.problem = ""
        end = piece.rfind(b"\n") + 1
        if self._ending and piece[:end].endswith(b"\n" + self._ending):
            end -= len(self._ending)
        self._offset += end if end or len(piece) < READ_BYTES else len(piece)
        return piece[:end].splitlines(), replaced


class ReplacedFile:
    """A small file that is replaced as a whole."""

    def __init__(self, path: Path, *, most: int = 16 << 20) -> None:
        self.path, self._most = path, most
        self._stamp: tuple[int, int, int] | None = None

    def content(self) -> tuple[bytes | None, bool]:
        """Return the content (None without a file), and whether it may have changed
        since the last call. Unchanged content is returned as b"".

        Raises OSError for a file that cannot be read.
        """
        try:
            status = self.path.stat()
        except FileNotFoundError:
            if self.path.is_symlink():
                opened(self.path)  # raises
            changed, self._stamp = self._stamp is not None, None
            return None, changed
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        if stamp == self._stamp:
            return b"", False
        with opened(self.path) as file:
            content = file.read(self._most)
        self._stamp = stamp
        return content, True


@contextlib.contextmanager
def held(lock: threading.Lock, path: Path) -> Iterator[None]:
    """Hold a lock. Raises UnknownRunError if another thread holds it for too long."""
    if not lock.acquire(timeout=HELD_S):
        raise UnknownRunError(
            f"{path} has been read for more than {HELD_S:g} s: its file system may hang"
        )
    try:
        yield
    finally:
        lock.release()


def one_line(error: Exception) -> str:
    text = getattr(error, "problem", None) or str(error) or type(error).__name__
    return " ".join(str(text).split())[:300]
