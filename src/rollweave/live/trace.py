"""Spans of the run's life as `trace.json`, for Perfetto or chrome://tracing, and for `rollweave report`.

Invariants: written as it happens, one event a line, so that a killed run leaves a readable trace (viewers accept the missing
end); bounded: beyond `LIMIT` events further ones are counted and not written.
"""

from pathlib import Path
from typing import Any

import msgspec

LIMIT = 500_000
"""Events in one trace: about 60 MB, what a viewer still opens."""

_encode = msgspec.json.Encoder().encode

BUFFER_LINES = 256
"""Lines gathered before they are written."""

ENGINES, ENVIRONMENTS, TRAINER, CONTROLLER = 1, 2, 3, 4
"""Process rows of the viewer."""

ROWS = {ENGINES: "engines", ENVIRONMENTS: "environments", TRAINER: "trainer", CONTROLLER: "controller"}


class Trace:
    """Appends spans. Times are seconds of the run's clock."""

    def __init__(self, path: Path, *, limit: int = LIMIT) -> None:
        """Open `path`, going on after what an earlier life wrote."""
        self._limit = limit
        self._lines: list[bytes] = []
        self._lanes: dict[tuple[int, str], int] = {}
        self._free: dict[int, list[int]] = {}
        self._next: dict[int, int] = {}
        self.dropped = 0
        self._written = _cut_end(path)
        self._file = path.open("ab")
        if self._written == 0:
            self._file.write(b"[\n")
            for process, name in ROWS.items():
                self._meta("process_name", process, 0, name)

    def span(self, row: int, lane: str, name: str, start: float, end: float, **arguments: Any) -> None:
        """One box from `start` to `end` on the line `lane` of `row`."""
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
        """A mark."""
        self._put({"name": name, "ph": "i", "s": "p", "pid": row, "tid": self._lane(row, lane), "ts": round(at * 1e6)})

    def release(self, row: int, lane: str) -> None:
        """The line is over; another may take its place, so that a long run does not have thousands of lines."""
        number = self._lanes.pop((row, lane), None)
        if number is not None:
            self._free.setdefault(row, []).append(number)

    def flush(self) -> None:
        """Hand what was gathered to the operating system."""
        if self._lines:
            self._file.write(b"".join(self._lines))
            self._lines.clear()
        self._file.flush()

    def close(self) -> None:
        """Write the end. The file is valid JSON from then on."""
        self.flush()
        self._file.write(b"{}]\n")
        self._file.close()

    def _lane(self, row: int, lane: str) -> int:
        number = self._lanes.get((row, lane))
        if number is None:
            free = self._free.get(row)
            if free:
                number = free.pop()
            else:
                number = self._next[row] = self._next.get(row, 0) + 1
                self._meta("thread_name", row, number, lane if row != ENVIRONMENTS else f"slot {number}")
            self._lanes[row, lane] = number
        return number

    def _meta(self, kind: str, process: int, thread: int, name: str) -> None:
        self._put({"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}})

    def _put(self, event: dict[str, Any]) -> None:
        if self._written >= self._limit:
            self.dropped += 1
            return
        self._written += 1
        self._lines.append(_encode(event) + b",\n")
        if len(self._lines) >= BUFFER_LINES:
            self._file.write(b"".join(self._lines))
            self._lines.clear()


def _cut_end(path: Path) -> int:
    """Make a former trace appendable: cut a torn last line and the closing bracket. Returns how many events it has."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        events, end = 0, 0
        for line in file:
            if line == b"[\n" or line.endswith(b"},\n"):
                events += line != b"[\n"
                end += len(line)
            else:
                break
        file.truncate(end)
    if events == 0:
        path.unlink()
    return events
