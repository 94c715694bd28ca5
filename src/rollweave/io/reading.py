"""Reading of files that other programs can replace, such as the files of a run's
directory.

Invariants: nothing here waits for another process, since only regular files are read;
each read is bounded, and a file that consists of a hole is refused instead of read for
hours. Every OSError names the file. A file system that hangs still hangs its reader,
which must not be an event loop.
"""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from os import open as open_descriptor
from pathlib import Path
from typing import IO, Any

from rollweave.schema.errors import ConfigError

CHUNK = 1 << 20
"""Maximum bytes of one read from the system."""

JSON_BYTES = 1 << 30
"""Maximum size of a file of JSON that belongs to a checkpoint."""

LINE_BYTES = 64 << 20
"""Maximum bytes of a line that is read; longer lines are left out."""

SPARSE_BYTES, SPARSE = 1 << 30, 1000
"""A file of at least `SPARSE_BYTES` is refused if less than one part in `SPARSE` was
ever written: no run writes such a file.
"""


def opened(path: Path) -> IO[bytes]:
    """Open a regular file for reading. Raises OSError immediately for anything else."""
    try:
        # without O_NONBLOCK, a named pipe waits for its other end
        fd = open_descriptor(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_symlink():
            raise _other(path, stat.S_IFLNK) from None
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _other(path, status.st_mode)
        if status.st_size >= SPARSE_BYTES and status.st_blocks * 512 * SPARSE < status.st_size:
            text = f"must be a file that was written, got {status.st_size} bytes, almost all a hole"
            raise OSError(errno.EFBIG, text, str(path))
        return open(fd, "rb", buffering=CHUNK)
    except BaseException:
        os.close(fd)
        raise


def _other(path: Path, mode: int) -> OSError:
    return OSError(errno.EINVAL, f"must be a file, got a {kind(mode)}", str(path))


def whole(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises OSError."""
    with opened(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"must have at most {most} bytes, got more", str(path))
    return content


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint. A missing file yields an empty
    object unless the file is `required`. Raises ConfigError for anything else.
    """
    if not required and not path.exists():
        return {}
    try:
        value = json.loads(whole(path, JSON_BYTES).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} must be readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a regular file, with their ends; lines that are too long are
    left out. Raises OSError.
    """
    with opened(path) as file:
        while line := file.readline(LINE_BYTES):
            if len(line) < LINE_BYTES or line.endswith(b"\n"):
                yield line
                continue
            while (rest := file.readline(LINE_BYTES)) and not rest.endswith(b"\n"):
                pass


def kind(mode: int) -> str:
    """Return the kind of a file with this mode, in words."""
    for is_kind, name in (
        (stat.S_ISREG, "file"),
        (stat.S_ISDIR, "directory"),
        (stat.S_ISFIFO, "named pipe"),
        (stat.S_ISSOCK, "socket"),
        (stat.S_ISLNK, "symbolic link to nothing"),
    ):
        if is_kind(mode):
            return name
    return "device"


def kind_at(path: Path) -> str:
    """Return the kind of the file at this path, following links; "" if there is no
    file. A link that leads nowhere is a "symbolic link to nothing". Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            with contextlib.suppress(OSError):
                status = path.stat()
        return kind(status.st_mode)
    return ""


def named(error: OSError) -> str:
    """Return an OSError in words, with its file and without its number."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{os.fsdecode(error.filename)}: {error.strerror}"
