"""The lanes of a run's trace: boxes of the trainer, of engines and of other processes,
and how many turns and environment steps were under way at each time.

Invariants: each line of the trace is read once; a line that is torn or foreign is left
out; the size of an answer does not grow with the run.
"""

import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollweave.record.trace import (
    CONTROLLER,
    ENDING,
    ENGINES,
    ENVIRONMENTS,
    RELAYS,
    TRAINER,
    WORKERS,
)
from rollweave_ui.files import AppendedFile

BATCH = 20_000
"""Number of lines that are read between two readings of the clock."""

MAX_BOXES = 1200
"""Maximum number of boxes of a lane in one answer; shorter gaps are closed."""

LOADS = {"init": "environment starts", "step": "environment steps", "eval": "rewards"}
"""Kinds of an attempt's spans that are counted instead of drawn → the name of their
lane.
"""

BOXED = {TRAINER: "trainer", ENGINES: "engine", RELAYS: "relay", WORKERS: "worker"}
"""Rows of the trace whose boxes are drawn → the kind of their lanes."""


class _Arguments(msgspec.Struct):
    name: str = ""


class _Event(msgspec.Struct):
    ph: str = ""
    name: str = ""
    pid: int = 0
    tid: int = 0
    ts: int = 0
    dur: int = 0
    args: _Arguments = msgspec.field(default_factory=_Arguments)


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class _Lane:
    """Spans in seconds, in the order in which they were written."""

    starts: "array[float]" = field(default_factory=lambda: array("d"))
    ends: "array[float]" = field(default_factory=lambda: array("d"))
    names: list[str] = field(default_factory=list)

    def add(self, start: float, end: float) -> None:
        self.starts.append(start)
        self.ends.append(end)


class LaneIndex:
    """The spans of the trace at `path`."""

    def __init__(self, path: Path) -> None:
        self._file = AppendedFile(path, ending=ENDING)
        self._clear()

    @property
    def problem(self) -> str:
        """Why the existing trace cannot be read; "" otherwise."""
        return self._file.problem

    def _clear(self) -> None:
        self._pending: list[bytes] = []
        self._names: dict[tuple[int, int], str] = {}
        self.boxes: dict[tuple[int, str], _Lane] = {}
        """Boxes by row of the trace and name of the lane."""
        self.loads: dict[tuple[str, str], _Lane] = {}
        """Spans that are counted: by ("turns", engine) or ("attempts", kind)."""
        self.end_s = 0.0

    def advance(self, budget_s: float) -> bool:
        """Read what was written since the last call, for about `budget_s` seconds;
        return whether all is read.
        """
        until = time.monotonic() + budget_s
        while True:
            if not self._pending:
                lines, replaced = self._file.lines()
                if replaced:
                    self._clear()
                if not lines and not self._file.unread:
                    return True
                self._pending = lines[::-1]
            for _ in range(min(BATCH, len(self._pending))):
                self._add(self._pending.pop())
            if time.monotonic() >= until:
                return not self._pending and not self._file.unread

    def _add(self, line: bytes) -> None:
        try:
            event = _decode(line.rstrip(b",\r\n "))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        if event.ph == "M" and event.name == "thread_name":
            self._names[event.pid, event.tid] = event.args.name
        elif event.ph == "X":
            start = event.ts / 1e6
            end = start + event.dur / 1e6
            self.end_s = max(self.end_s, end)
            if event.pid == ENVIRONMENTS:
                self._count(event.name, start, end)
            elif event.pid in BOXED or event.pid == CONTROLLER:
                name = self._names.get((event.pid, event.tid), str(event.tid))
                lane = self.boxes.setdefault((event.pid, name), _Lane())
                lane.add(start, end)
                lane.names.append(event.name)

    def _count(self, name: str, start: float, end: float) -> None:
        kind, _, rest = name.partition(" ")
        if kind == "turn":
            engine = rest.partition(" ")[2]
            if engine:
                self.loads.setdefault(("turns", engine), _Lane()).add(start, end)
        elif kind in LOADS:
            self.loads.setdefault(("attempts", kind), _Lane()).add(start, end)

    def window(self, start: float, end: float, bins: int) -> list[dict[str, Any]]:
        """Return the lanes between two times in seconds. Each lane has its kind, its
        name, and either its boxes `[start, end, name]` or the mean number of its open
        spans in each of `bins` parts.
        """
        if not end > start:
            return []
        lanes: list[dict[str, Any]] = []
        for (row, name), lane in self.boxes.items():
            if row in BOXED:
                boxes = _boxes(lane, start, end)
                lanes.append({"kind": BOXED[row], "name": name, "boxes": boxes})
        by_name = {lane["name"]: lane for lane in lanes if lane["kind"] == "engine"}
        for (kind, name), lane in self.loads.items():
            load = [round(float(value), 3) for value in _load(lane, start, end, bins)]
            if kind == "attempts":
                lanes.append({"kind": "attempts", "name": LOADS[name], "load": load})
            elif name in by_name:
                by_name[name]["load"] = load
            else:
                lanes.append({"kind": "engine", "name": name, "boxes": [], "load": load})
        return lanes


def _load(lane: _Lane, start: float, end: float, bins: int) -> Any:
    """Return the mean number of open spans in each of `bins` parts of the window,
    computed from the spans' seconds up to each edge.
    """
    edges = np.linspace(start, end, bins + 1)
    begun = _seconds_since(np.sort(np.frombuffer(lane.starts)), edges)
    over = _seconds_since(np.sort(np.frombuffer(lane.ends)), edges)
    return np.maximum(0.0, np.diff(begun - over)) / ((end - start) / bins)


def _seconds_since(times: Any, edges: Any) -> Any:
    """Return for each edge the sum of the seconds since the `times` before it. `times`
    are sorted.
    """
    sums = np.concatenate([[0.0], np.cumsum(times)])
    before = np.searchsorted(times, edges)
    return before * edges - sums[before]


def _boxes(lane: _Lane, start: float, end: float) -> list[list[Any]]:
    """Return the boxes in the window. If there are too many, boxes of one kind with
    little time between them are merged.
    """
    starts, ends = np.frombuffer(lane.starts), np.frombuffer(lane.ends)
    places = np.flatnonzero((starts < end) & (ends > start))
    found = sorted((float(starts[at]), float(ends[at]), lane.names[at]) for at in places)
    gap = 0.0 if len(found) <= MAX_BOXES else (end - start) / MAX_BOXES
    merged: list[list[Any]] = []
    for begin, over, name in found:
        last = merged[-1] if merged else None
        same = last is not None and last[2].split(" ")[0] == name.split(" ")[0]
        if gap and last is not None and same and begin - last[1] <= gap:
            last[1] = max(last[1], over)
            continue
        merged.append([begin, over, name])
    return [[round(a, 4), round(b, 4), name] for a, b, name in merged[: 2 * MAX_BOXES]]
