"""Reading and writing whole regular files at paths that may be hostile.
Needs Python 3.9 and its standard library alone.

Invariants: nothing but a regular file is read or replaced, and opening never blocks (on
a FIFO, a device); no more than the bound is read, regardless of the declared size;
writes are atomic, and keep the mode of the replaced file.
"""

from __future__ import annotations

import contextlib
import os
import stat

from .calls import Call, Refused, Result
from .frames import BODY_BYTES

DEFAULT_MODE = 0o644

CHUNK_BYTES = 1 << 20


def load(path: str, limit: int, offset: int | None = None) -> tuple[bytes, os.stat_result]:
    """Return a regular file's bytes and status; with `offset`, only the next `limit`
    bytes from there.

    Raises Refused for anything else and for more than `limit` bytes; OSError if it
    cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Refused(f"path must be a regular file, got {_kind(status.st_mode)}: {path}")
        if offset is not None:
            os.lseek(fd, offset, os.SEEK_SET)
        parts: list[bytes] = []
        size = 0
        # The declared size is not used: files in /proc declare 0, and a file may grow.
        most = limit + 1 if offset is None else limit
        while data := os.read(fd, min(CHUNK_BYTES, most - size)):
            parts.append(data)
            size += len(data)
            if size > limit:
                raise Refused(
                    f"path must have at most {limit} bytes, got {max(size, status.st_size)} or "
                    f"more: {path}"
                )
    finally:
        os.close(fd)
    return b"".join(parts), status


def store(path: str, data: bytes, mode: int | None = None) -> None:
    """Make or replace a regular file atomically; missing parent folders are made.

    Raises Refused and OSError.
    """
    store_part(path, data, mode, os.urandom(8).hex(), 0, last=True)


def store_part(
    path: str, data: bytes, mode: int | None, part: str, offset: int, *, last: bool
) -> None:
    """Store a part of a file, at `offset`, in a temporary file that `part` names. The
    last part makes or replaces the file. If a part fails, all parts are removed.

    Raises Refused and OSError.
    """
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    os.makedirs(folder, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        there = os.lstat(target).st_mode
        if not stat.S_ISREG(there):
            raise Refused(
                f"path must be a regular file, or nothing yet, got {_kind(there)}: {path}"
            )
        mode = stat.S_IMODE(there) if mode is None else mode
    temporary = f"{folder}/.write-{part}"  # importing tempfile takes 5 ms
    new = 0 if offset else os.O_CREAT | os.O_EXCL
    fd = os.open(temporary, os.O_WRONLY | new | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.seek(offset)
            file.write(data)
            if last:
                file.flush()
                os.fchmod(fd, DEFAULT_MODE if mode is None else mode)
        if last:
            os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read(call: Call) -> Result:
    """`read`: return the bytes of the regular file `path`, which must have at most
    `limit`. With `offset`, return at most `limit` bytes from there; longer files are
    then allowed.
    """
    limit = call.integer("limit", BODY_BYTES, most=BODY_BYTES)
    offset = None if call.absent("offset") else call.integer("offset")
    data, status = load(call.text("path"), limit, offset)
    return {"mode": stat.S_IMODE(status.st_mode)}, data


def write(call: Call) -> Result:
    """`write`: store the body as the file `path`, with permissions `mode` if given; or,
    with `part`, as one of its parts.
    """
    mode = None if call.absent("mode") else call.integer("mode", most=0o7777)
    part = call.optional("part")
    if part is None:
        store(call.text("path"), call.body, mode)
        return {}, b""
    if not part.isalnum():
        raise Refused(f"part must be letters and digits, got {part!r:.100}")
    offset, last = call.integer("offset"), call.flag("last")
    store_part(call.text("path"), call.body, mode, part, offset, last=last)
    return {}, b""


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISLNK, "a link"),
    )
    return next((name for test, name in kinds if test(mode)), "a device")
