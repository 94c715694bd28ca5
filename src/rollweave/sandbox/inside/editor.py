"""`view`, `create`, `replace`, `insert` and `undo`: the editing of text files by a
model. Needs Python 3.9 and its standard library alone.

Invariants: edits are atomic (`files.store`); a file that is not UTF-8 is refused, not
damaged, and line ends stay as they are; `undo` restores the bytes before the last edit,
unless the file was changed by other means since. Every reply to an edit shows the lines
around the edit.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections import deque

from .calls import Call, Refused, Result
from .files import load, store

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
