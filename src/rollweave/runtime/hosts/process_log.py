"""The log on this host of a process on another one.

Invariants: the file holds printable text, so that no terminal acts on what a process
writes; a log takes at most `LOG_BYTES` on the disk, in the file and in the older half
beside it, and says at its top that something is cut; a host that sends more than
`RATE_BYTES` between two signs of life cannot keep the controller's disk busy.
"""

import codecs
import contextlib
from collections.abc import Callable
from pathlib import Path

from rollweave.schema.text import visible

LOG_BYTES = 32 << 20
"""Maximum bytes of a process's log, over all epochs of a run."""

RATE_BYTES = 1 << 20
"""Maximum bytes that are written between two calls of `tick`: an agent sends a quarter
of it (`runtime/hosts/agent.LOG_BYTES`).
"""

OLDER = ".1"
"""Suffix of the older half."""


class ProcessLog:
    """Writes the log at `path`. `on_cut` is called once, when output is cut for the
    first time, with a description.
    """

    def __init__(self, path: Path, on_cut: Callable[[str], None]) -> None:
        self.path = path
        self._on_cut, self._is_cut = on_cut, False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")
        self._left = RATE_BYTES

    def tick(self) -> None:
        """Allow `RATE_BYTES` more."""
        self._left = RATE_BYTES

    def write(self, data: bytes, *, last: bool = False) -> None:
        """Append output. A full disk loses it."""
        if len(data) > self._left:
            self._cut(f"output is left out, since more than {RATE_BYTES >> 20} MiB came at once")
            data = data[: self._left]
        self._left -= len(data)
        text = self._decoder.decode(data, last)
        lines = visible(text.replace("\r\n", "\n").replace("\r", "\n")).encode()
        with contextlib.suppress(OSError):
            self._make_room(len(lines))
            with self.path.open("ab") as file:
                file.write(lines)

    def _make_room(self, count: int) -> None:
        """Rename the file to the older half, which it replaces, before it gets too
        long.
        """
        size = self.path.stat().st_size if self.path.exists() else 0
        if not size or size + count <= LOG_BYTES // 2:
            return
        older = self.path.with_name(self.path.name + OLDER)
        self.path.replace(older)
        text = (
            f"older output is in {older.name}, and what was older still is cut: a log of a process "
            f"on another host has at most {LOG_BYTES >> 20} MiB"
        )
        self.path.write_text(f"[{text}]\n")
        self._cut(text)

    def _cut(self, text: str) -> None:
        if not self._is_cut:
            self._is_cut = True
            self._on_cut(f"{self.path}: {text}")
