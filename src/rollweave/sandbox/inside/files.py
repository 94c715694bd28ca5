"""Whole regular files in and out, without falling into a trap that lies in wait at a
path. Python 3.9, stdlib alone.

Invariants: nothing but a regular file is read or replaced, and opening blocks on
nothing (a FIFO, a device); no more than the bound is read, whatever size is claimed; a
write is whole or not there, and keeps the mode of what it replaces.
"""

from __future__ import annotations

import contextlib
import os
import stat

from .calls import Call, Refused, Result
from .frames import BODY_BYTES

DEFAULT_MODE = 0o644

CHUNK_BYTES = 1 << 20


def load(path: str, limit: int) -> tuple[bytes, os.stat_result]:
    """A regular file's bytes.

    Raises Refused for anything else and beyond `limit` bytes; OSError where it cannot
    be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise Refused(f"path must be a regular file, got {_kind(found.st_mode)}: {path}")
        parts: list[bytes] = []
        size = 0
        # Never by its claimed size: that of /proc is 0, and a file may grow.
        while data := os.read(fd, min(CHUNK_BYTES, limit + 1 - size)):
            parts.append(data)
            size += len(data)
            if size > limit:
                raise Refused(
                    f"path must have at most {limit} bytes, got "
                    f"{max(size, found.st_size)} or more: {path}"
                )
    finally:
        os.close(fd)
    return b"".join(parts), found


def store(path: str, data: bytes, mode: int | None = None) -> None:
    """Make or replace a regular file, whole or not at all; folders on the way are made.

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
    temporary = f"{folder}/.write-{os.urandom(8).hex()}"  # tempfile would take 5 ms of a start
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            os.fchmod(fd, DEFAULT_MODE if mode is None else mode)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def read(call: Call) -> Result:
    """`read`: the bytes of the regular file `path`, at most `limit` of them."""
    data, found = load(call.text("path"), call.integer("limit", BODY_BYTES, most=BODY_BYTES))
    return {"mode": stat.S_IMODE(found.st_mode)}, data


def write(call: Call) -> Result:
    """`write`: the body becomes the file `path`, with permissions `mode` where given."""
    mode = None if call.absent("mode") else call.integer("mode", most=0o7777)
    store(call.text("path"), call.body, mode)
    return {}, b""


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISLNK, "a link"),
    )
    return next((name for test, name in kinds if test(mode)), "a device")
