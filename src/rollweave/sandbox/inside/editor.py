"""`view`, `create`, `replace`, `insert` and `undo`: text files as a model edits them.
Python 3.9, stdlib alone.

Invariants: an edit is whole or not there (`files.store`); what is not UTF-8 is refused,
not damaged, and line ends stay as they are; `undo` gives back the bytes that the last
edit found, unless somebody else has changed the file since. Every reply to an edit
shows the lines around it.
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
"""Of the largest file that is edited: more is not written by hand."""

VIEW_CHARS = 200_000
"""Of the longest view."""

AROUND = 4
"""Lines shown before and after an edit."""

EDITS = 100
"""That can be undone, over all files; they hold at most `UNDO_BYTES`."""

UNDO_BYTES = 64 << 20

ENTRIES = 1000
"""Of a folder's view."""


class Editor:
    """The actions of this module. They exclude each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._undone: deque[tuple[str, bytes | None, bytes]] = deque()
        self._held = 0

    def view(self, call: Call) -> Result:
        """Lines `first` to `last` (1-based, inclusive) of a file with their numbers, or
        names in a folder, two levels deep.
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
        """A new file with the body as its text; one that is there is kept, and refused,
        unless `overwrite`.
        """
        path = call.text("path")
        text = _decoded(call.body, "text")
        with self._lock:
            before = None
            with contextlib.suppress(FileNotFoundError):
                before = load(path, FILE_BYTES)[0]
            if before is not None and not call.flag("overwrite"):
                raise Refused(f"path must not be there yet, unless overwrite is set: {path}")
            self._edit(path, before, call.body)
        return {"lines": len(_lines(text))}, b""

    def replace(self, call: Call) -> Result:
        """`old` becomes `new`. It must be there exactly once."""
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
        """The body becomes lines of its own after line `line`; 0 is before the first."""
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
        """The file as it was before its last edit; gone, if that had created it."""
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
        self._held += len(before or b"") + len(after)
        while len(self._undone) > EDITS or self._held > UNDO_BYTES:
            self._forget(0)

    def _forget(self, index: int) -> None:
        _, before, after = self._undone[index]
        del self._undone[index]
        self._held -= len(before or b"") + len(after)

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
    """With their ends.

    A line ends with a line feed alone: not with what `str.splitlines` takes for an end.
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
    """Overlapping ones count: which of them was meant is as unclear."""
    return len(_starts(text, old, most=1000))


def _where(text: str, old: str) -> str:
    return ", ".join(str(text.count("\n", 0, at) + 1) for at in _starts(text, old, most=10))


def _starts(text: str, old: str, most: int) -> list[int]:
    found: list[int] = []
    at = text.find(old)
    while at >= 0 and len(found) < most:
        found.append(at)
        at = text.find(old, at + 1)
    return found


def _listing(path: str) -> str:
    """Names below a folder, two levels deep; hidden ones are left out, and no link is
    followed.
    """
    found: list[str] = []
    queue = deque([(path, "", 0)])
    while queue:
        folder, prefix, depth = queue.popleft()
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            if not depth:
                raise
            found.append(f"{prefix} ({error.strerror})")
            continue
        for name in names:
            if name.startswith("."):
                continue
            inside = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):
                is_folder = stat.S_ISDIR(os.lstat(inside).st_mode)
                found.append(prefix + name + ("/" if is_folder else ""))
                if is_folder and depth == 0:
                    queue.append((inside, f"{prefix}{name}/", 1))
            if len(found) >= ENTRIES:
                return "\n".join([*sorted(found), f"... more than {ENTRIES} entries", ""])
    return "\n".join([*sorted(found), ""])
