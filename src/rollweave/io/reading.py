"""Reading of files that other programs can replace, such as the files of a run's
directory, and of files of JSON Lines that a user gives: one object a line.

Invariants: nothing here waits for another process, since only regular files are read;
each read is bounded, except for the user's JSON Lines, and a file that consists of a
hole is refused instead of read for hours. Every OSError names the file. A file system
that hangs still hangs its reader, which must not be an event loop. In JSON Lines, text
that is not UTF-8, half a surrogate pair, a key that stands twice, NaN, and a number
that no float holds are errors that name the file and the line.
"""

import contextlib
import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from os import open as open_descriptor
from pathlib import Path
from typing import IO, Any, NoReturn

from rollweave.schema.base import DEPTH, is_deep
from rollweave.schema.errors import ConfigError
from rollweave.schema.text import valid

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

FORMATS = {
    b"PAR1": "a Parquet file, which docs/DATASETS.md converts in one line",
    b"\x1f\x8b": "a gzip file, which must be unpacked",
    b"\x28\xb5\x2f\xfd": "a zstd file, which must be unpacked",
    b"PK\x03\x04": "a zip file, which must be unpacked",
    b"ARROW1": "an Arrow file, which docs/DATASETS.md converts in one line",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}
"""First bytes of files that are often given in place of text in UTF-8."""

_HALF = re.compile(r"\\u[dD][89a-fA-F]")


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


def json_lines(path: str, setting: str, *, form: str = "") -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the number and the object of each line that is not empty. `form` says what
    an object must have; an error appends it to "must be a JSON object".

    Raises ConfigError, which names the setting for a file that cannot be read.
    """
    data = _bytes(path, setting)
    for start, kind in FORMATS.items():
        if data.startswith(start):
            raise ConfigError(f"{setting} must be a file of JSON lines, {path} is {kind}")
    for number, line in enumerate(_decoded(data, path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = _DECODER.decode(line)
            if not isinstance(record, dict):
                raise TypeError(f"got {line[:40]}")
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{path}:{number}: must be a JSON object{form}: {type(error).__name__}: {error}"
            ) from error
        if is_deep(record):
            raise ConfigError(f"{path}:{number}: must be at most {DEPTH} levels deep")
        if _HALF.search(line) and (half := _half_in(record, ())) is not None:
            raise ConfigError(
                f"{path}:{number}: {'.'.join(half[0]) or 'a key'} must be valid text, without one "
                f"half of a surrogate pair (\\ud800 to \\udfff), got {half[1]!a:.80}"
            )
        yield number, record


def utf8_text(path: str, setting: str) -> str:
    """Return the text of a file without a byte order mark. Raises ConfigError, which
    names the line that is not UTF-8.
    """
    return _decoded(_bytes(path, setting), path)


def _bytes(path: str, setting: str) -> bytes:
    try:
        with opened(Path(path)) as file:
            return file.read()
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{setting} must be a readable file, got {path!r}: {error}") from error


def _decoded(data: bytes, path: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{number}: must be UTF-8: {error}") from error


def _half_in(value: Any, path: tuple[str, ...]) -> tuple[tuple[str, ...], str] | None:
    """Return the path of the first invalid text in `value`, and the text; else None."""
    match value:
        case str():
            return None if valid(value) == value else (path, value)
        case dict():
            keys = (_half_in(key, path) for key in value)
            values = (_half_in(inner, (*path, key)) for key, inner in value.items())
            return next((found for found in (*keys, *values) if found is not None), None)
        case list():
            inner = (_half_in(each, (*path, str(place))) for place, each in enumerate(value))
            return next((found for found in inner if found is not None), None)
        case _:
            return None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r:.80} stands twice")
    return found


def _float(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"numbers must be at most 1.8e308, got {text:.80}")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_float, parse_constant=_no_constant
)
