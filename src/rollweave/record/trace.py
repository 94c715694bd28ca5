"""Spans of the run's life as `trace.json`, for Perfetto, chrome://tracing and
`rollweave report`.

Invariants: the trace is written as events happen, one event per line, so that a killed
run leaves a readable trace (viewers accept the missing end). The trace is bounded:
after `limit` events, further events are counted and not written. With `renew`, which
keeps the newest events, a new trace begins instead, and the former part stays next to
it.
"""

import contextlib
from pathlib import Path
from typing import Any

from rollweave.io.disk import AppendFile, writing
from rollweave.io.reading import lines
from rollweave.schema.base import as_json
from rollweave.schema.errors import DiskError

LIMIT = 500_000
"""Maximum number of events in one trace: about 60 MB, which a viewer still opens."""

OPENING = b"[\n"
ENDING = b"{}]\n"
"""The last line of a closed trace, which the next life replaces."""

BUFFER_LINES = 256
"""Number of lines buffered before they are written."""

ENGINES, ENVIRONMENTS, TRAINER, CONTROLLER, RELAYS, WORKERS = 1, 2, 3, 4, 5, 6
"""Process rows of the viewer."""

ROWS = {
    ENGINES: "engines",
    ENVIRONMENTS: "environments",
    TRAINER: "trainer",
    CONTROLLER: "controller",
    RELAYS: "relays",
    WORKERS: "workers",
}


class Trace:
    """Appends spans. Times are in seconds of the run's clock."""

    def __init__(self, path: Path, *, limit: int = LIMIT, renew: bool = False) -> None:
        """Open `path`, and continue after the events of an earlier life. With `renew`,
        a full trace becomes `*.old.json`, and a new trace begins.

        Raises DiskError, as do all methods that write.
        """
        self._path, self._limit, self._renew = path, limit, renew
        self._lines: list[bytes] = []
        self.dropped = 0
        self._begin()

    def _begin(self) -> None:
        self._lanes: dict[tuple[int, str], int] = {}
        self._free: dict[int, list[int]] = {}
        self._next: dict[int, int] = {}
        self._written, kept = _complete_events(self._path)
        self._file = AppendFile(self._path, keep=kept, header=OPENING)
        if self._written == 0:
            for process, name in ROWS.items():
                self._meta("process_name", process, 0, name)

    def span(
        self, row: int, lane: str, name: str, start: float, end: float, **arguments: Any
    ) -> None:
        """Append one box from `start` to `end`, in seconds, on the line `lane` of
        `row`.
        """
        self._make_room()
        event = {
            "name": name,
            "ph": "X",
            "pid": row,
            "tid": self._lane(row, lane),
            "ts": round(start * 1e6),
            "dur": max(1, round((end - start) * 1e6)),
        }
        if arguments:
            event["args"] = arguments
        self._put(event)

    def instant(self, row: int, lane: str, name: str, at: float) -> None:
        """Append a mark."""
        self._make_room()
        self._put(
            {
                "name": name,
                "ph": "i",
                "s": "p",
                "pid": row,
                "tid": self._lane(row, lane),
                "ts": round(at * 1e6),
            }
        )

    def release(self, row: int, lane: str) -> None:
        """Free the line for reuse: without reuse, a long run would have thousands of
        lines.
        """
        number = self._lanes.pop((row, lane), None)
        if number is not None:
            self._free.setdefault(row, []).append(number)

    def flush(self) -> None:
        """Write the buffered lines to the operating system."""
        lines = b"".join(self._lines)
        self._lines.clear()
        self._file.append(lines)

    def close(self) -> None:
        """Write the end of the trace, and close the file.

        The file is valid JSON from then on unless the disk fails; viewers accept the
        missing end.
        """
        with contextlib.suppress(DiskError):
            self.flush()
            self._file.append(ENDING)
        self._file.close()

    def _make_room(self) -> None:
        """Make room for two events: an event and the name of its line."""
        if self._renew and self._written > self._limit - 2:
            self.close()
            with writing(self._path):
                self._path.replace(self._path.with_suffix(".old.json"))
            self._begin()

    def _lane(self, row: int, lane: str) -> int:
        number = self._lanes.get((row, lane))
        if number is None:
            free = self._free.get(row)
            if free:
                number = free.pop()
            else:
                number = self._next[row] = self._next.get(row, 0) + 1
                self._meta(
                    "thread_name", row, number, lane if row != ENVIRONMENTS else f"slot {number}"
                )
            self._lanes[row, lane] = number
        return number

    def _meta(self, kind: str, process: int, thread: int, name: str) -> None:
        self._put({"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}})

    def _put(self, event: dict[str, Any]) -> None:
        if self._written >= self._limit:
            self.dropped += 1
            return
        self._written += 1
        self._lines.append(as_json(event) + b",\n")
        if len(self._lines) >= BUFFER_LINES:
            self.flush()


def _complete_events(path: Path) -> tuple[int, int]:
    """Return the number and the bytes of the events in an existing trace, without a
    torn last line and the closing bracket.
    """
    events, end = 0, 0
    if path.exists():
        for line in lines(path):
            if line != OPENING and not line.endswith(b"},\n"):
                break
            events += line != OPENING
            end += len(line)
    return events, end if events else 0
