"""Whole regular files at paths that may be hostile, and the editing of text files by a
model: `view`, `create`, `replace`, `insert` and `undo`. Needs Python 3.9 and its
standard library alone.

Invariants: nothing but a regular file is read or replaced, and opening never blocks (on
a FIFO, a device); no more than the bound is read, regardless of the declared size;
writes and edits are atomic, and keep the mode of the replaced file; the editor refuses
a file that is not UTF-8 and does not damage it, and line ends stay as they are; `undo`
restores the bytes before the last edit, unless the file was changed by other means
since. Every reply to an edit shows the lines around the edit.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections import deque

from .frames import BODY_BYTES, Call, Refused, Result

DEFAULT_MODE = 0o644

CHUNK_BYTES = 1 << 20

FILE_BYTES = 8 << 20
"""Maximum size in bytes of a file that is edited. Files written by hand are smaller."""

VIEW_CHARS = 200_000
"""Maximum number of characters in a view."""

AROUND = 4
"""Number of lines shown before and after an edit."""

EDITS = 100
"""Maximum number of edits, over all files, that can be undone. Their bytes are limited
to `UNDO_BYTES`.
"""

UNDO_BYTES = 64 << 20

ENTRIES = 1000
"""Maximum number of entries in a folder's view."""


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


class Editor:
    """The actions of this module. One action runs at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._undone: deque[tuple[str, bytes | None, bytes]] = deque()
        self._undo_bytes = 0

    def view(self, call: Call) -> Result:
        """Show lines `first` to `last` (1-based, inclusive) of a file with their
        numbers, or the names in a folder, two levels deep.
        """
        path = call.text("path")
        if os.path.isdir(path):
            return {"lines": 0}, _listing(path).encode(errors="replace")
        text = _text(path)
        lines = _lines(text)
        first = call.integer("first", 1, least=1)
        last = len(lines) if call.absent("last") else call.integer("last", least=first)
        if first > max(1, len(lines)):
            raise Refused(
                f"first must be at most the number of lines, {len(lines)}, got {first}: {path}"
            )
        return {"lines": len(lines)}, _numbered(lines, first, last).encode()

    def create(self, call: Call) -> Result:
        """Create a file with the body as its text. Refuse to replace an existing file
        unless `overwrite` is set.
        """
        path = call.text("path")
        text = _decoded(call.body, "text")
        with self._lock:
            before = None
            with contextlib.suppress(FileNotFoundError):
                before = load(path, FILE_BYTES)[0]
            if before is not None and not call.flag("overwrite"):
                raise Refused(f"path must not exist yet, unless overwrite is set: {path}")
            self._edit(path, before, call.body)
        return {"lines": len(_lines(text))}, b""

    def replace(self, call: Call) -> Result:
        """Replace `old`, which must occur exactly once, by `new`."""
        path, old, new = call.text("path"), call.text("old"), call.text("new")
        if not old:
            raise Refused("old must not be empty")
        with self._lock:
            text = _text(path)
            count = _occurrences(text, old)
            if count != 1:
                where = f", at lines {_where(text, old)}" if count else ""
                raise Refused(
                    f"old must be in the file exactly once, and is there {count} "
                    f"times{where}: {path}"
                )
            at = text.index(old)
            self._edit(path, text.encode(), (text[:at] + new + text[at + len(old) :]).encode())
            return self._around(path, text.count("\n", 0, at) + 1, new.count("\n") + 1)

    def insert(self, call: Call) -> Result:
        """Insert the body as separate lines after line `line`; 0 is before the
        first.
        """
        path = call.text("path")
        added = _decoded(call.body, "text")
        with self._lock:
            text = _text(path)
            lines = _lines(text)
            line = call.integer("line")
            if line > len(lines):
                raise Refused(
                    f"line must be at most the number of lines, {len(lines)}, got {line}: {path}"
                )
            end = "\r\n" if "\r\n" in text else "\n"
            if added and not added.endswith("\n"):
                added += end
            before, after = "".join(lines[:line]), "".join(lines[line:])
            if before and not before.endswith("\n"):
                before += end
            self._edit(path, text.encode(), (before + added + after).encode())
            return self._around(path, line + 1, max(1, added.count("\n")))

    def undo(self, call: Call) -> Result:
        """Restore the file as it was before its last edit; remove the file if that edit
        created it.
        """
        path = os.path.realpath(call.text("path"))
        with self._lock:
            last = next(
                (i for i in reversed(range(len(self._undone))) if self._undone[i][0] == path), None
            )
            if last is None:
                raise Refused(f"path must have an edit that can be undone: {path}")
            _, before, after = self._undone[last]
            if load(path, FILE_BYTES)[0] != after:
                raise Refused(
                    f"path must be as the last edit left it, and was changed since: {path}"
                )
            if before is None:
                os.unlink(path)
            else:
                store(path, before)
            self._forget(last)
        return {"removed": before is None}, b""

    def _edit(self, path: str, before: bytes | None, after: bytes) -> None:
        if len(after) > FILE_BYTES:
            raise Refused(f"file must have at most {FILE_BYTES} bytes, got {len(after)}: {path}")
        store(path, after)
        self._undone.append((os.path.realpath(path), before, after))
        self._undo_bytes += len(before or b"") + len(after)
        while len(self._undone) > EDITS or self._undo_bytes > UNDO_BYTES:
            self._forget(0)

    def _forget(self, index: int) -> None:
        _, before, after = self._undone[index]
        del self._undone[index]
        self._undo_bytes -= len(before or b"") + len(after)

    def _around(self, path: str, first: int, count: int) -> Result:
        lines = _lines(_text(path))
        shown = _numbered(lines, max(1, first - AROUND), first + count - 1 + AROUND)
        return {"lines": len(lines)}, shown.encode()


def _text(path: str) -> str:
    return _decoded(load(path, FILE_BYTES)[0], "file", f": {path}")


def _decoded(data: bytes, what: str, where: str = "") -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Refused(
            f"{what} must be UTF-8, got {error.reason} at byte {error.start}{where}"
        ) from error


def _lines(text: str) -> list[str]:
    """Split a text into lines, with their ends.

    Only a line feed ends a line, unlike in `str.splitlines`.
    """
    lines = text.split("\n")
    last = lines.pop()
    return [line + "\n" for line in lines] + ([last] if last else [])


def _numbered(lines: list[str], first: int, last: int) -> str:
    shown: list[str] = []
    size = 0
    for number, line in enumerate(lines[first - 1 : last], first):
        row = f"{number:6}\t{line.rstrip(chr(10))}\n"
        size += len(row)
        if size > VIEW_CHARS:
            shown.append(f"... {min(last, len(lines)) - number + 1} more lines\n")
            break
        shown.append(row)
    return "".join(shown)


def _occurrences(text: str, old: str) -> int:
    """Count occurrences. Overlapping occurrences count, since they are just as
    ambiguous.
    """
    return len(_starts(text, old, most=1000))


def _where(text: str, old: str) -> str:
    return ", ".join(str(text.count("\n", 0, at) + 1) for at in _starts(text, old, most=10))


def _starts(text: str, old: str, most: int) -> list[int]:
    positions: list[int] = []
    at = text.find(old)
    while at >= 0 and len(positions) < most:
        positions.append(at)
        at = text.find(old, at + 1)
    return positions


def _listing(path: str) -> str:
    """Return the names below a folder, two levels deep, without hidden names. No link
    is followed.
    """
    entries: list[str] = []
    queue = deque([(path, "", 0)])
    while queue:
        folder, prefix, depth = queue.popleft()
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            if not depth:
                raise
            entries.append(f"{prefix} ({error.strerror})")
            continue
        for name in names:
            if name.startswith("."):
                continue
            inside = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):
                is_folder = stat.S_ISDIR(os.lstat(inside).st_mode)
                entries.append(prefix + name + ("/" if is_folder else ""))
                if is_folder and depth == 0:
                    queue.append((inside, f"{prefix}{name}/", 1))
            if len(entries) >= ENTRIES:
                return "\n".join([*sorted(entries), f"... more than {ENTRIES} entries", ""])
    return "\n".join([*sorted(entries), ""])
