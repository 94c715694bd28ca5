"""The processes of this machine, read once: who descends from whom, and what each uses.

Linux, standard library alone.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ENTRIES_PER_TABLE = PAGE_BYTES // 8
"""Number of pages that one page of page tables maps."""


@dataclass(frozen=True, slots=True)
class Process:
    """A line of /proc/PID/stat."""

    pid: int
    parent: int
    started: int
    """In the kernel's ticks since the boot: with the pid it names one process for ever."""
    cpu_s: float
    """Of itself, and of those of its children that it has waited for."""
    resident_bytes: int
    virtual_bytes: int
    stopped: bool
    """True while a signal or a tracer has stopped it."""

    @property
    def most_bytes(self) -> int:
        """Upper bound of its memory: resident pages, and the page tables that its whole
        address space could need.
        """
        return self.resident_bytes + self.virtual_bytes // ENTRIES_PER_TABLE

    def proportional_bytes(self, inherited_bytes: int = 0) -> int:
        """Return resident memory, in which a page that n processes map counts 1/n, plus
        page tables.

        Where the kernel does not tell, because the process hides its memory, resident
        memory beyond `inherited_bytes` counts.
        """
        resident = self.resident_bytes - inherited_bytes
        try:
            tables = _kilobytes(f"/proc/{self.pid}/status", "VmPTE:", 0)
            return _kilobytes(f"/proc/{self.pid}/smaps_rollup", "Pss:", resident) + tables
        except (FileNotFoundError, ProcessLookupError):
            return 0
        except OSError:
            return max(0, resident)


class Table:
    """All processes at one moment."""

    def __init__(self, processes: dict[int, Process]) -> None:
        self._processes = processes
        self._children: dict[int, list[Process]] = {}
        for process in processes.values():
            self._children.setdefault(process.parent, []).append(process)

    @classmethod
    def now(cls) -> "Table":
        found = {}
        for name in os.listdir("/proc"):
            if name.isdecimal():
                line = process(int(name))
                if line is not None:  # else it has ended
                    found[line.pid] = line
        return cls(found)

    def below(self, seen: dict[int, int]) -> list[Process]:
        """Those of `seen` (start times by pid) that are still there, and all their
        descendants.
        """
        found: dict[int, Process] = {}
        waiting = [self._processes[pid] for pid, started in seen.items() if self._is(pid, started)]
        while waiting:
            process = waiting.pop()
            if process.pid not in found:
                found[process.pid] = process
                waiting.extend(self._children.get(process.pid, ()))
        return list(found.values())

    def _is(self, pid: int, started: int) -> bool:
        return pid in self._processes and self._processes[pid].started == started


def process(pid: int) -> Process | None:
    """One process, where it is there."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return _parsed(pid, file.read())
    except (FileNotFoundError, ProcessLookupError):
        return None


def started(pids: Iterable[int]) -> dict[int, int]:
    """Start times of those that are there."""
    return {pid: line.started for pid in pids if (line := process(pid)) is not None}


def family(pid: int) -> set[int]:
    """A process and its descendants, while none of them is made or ends: quicker than a
    table where there are many others.
    """
    found, waiting = {pid}, [pid]
    while waiting:
        waiting.extend(_children(waiting.pop()))
        found.update(waiting)
    return found


def _children(pid: int) -> list[int]:
    while True:
        try:
            tasks = os.listdir(f"/proc/{pid}/task")
        except (FileNotFoundError, ProcessLookupError):
            return []
        try:
            return [
                int(child)
                for task in tasks
                for child in _read(f"/proc/{pid}/task/{task}/children").split()
            ]
        except (FileNotFoundError, ProcessLookupError):
            # a thread has ended: another has its children now, maybe one that was read
            # before
            continue


def _kilobytes(path: str, name: str, otherwise: int) -> int:
    """Return in bytes what a line of a file in /proc gives in kB."""
    with open(path) as lines:
        return next(
            (1024 * int(line.split()[1]) for line in lines if line.startswith(name)), otherwise
        )


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _parsed(pid: int, stat: bytes) -> Process:
    fields = stat.rpartition(b")")[2].split()  # a name may hold anything, also brackets
    return Process(
        pid=pid,
        parent=int(fields[1]),
        started=int(fields[19]),
        cpu_s=sum(int(ticks) for ticks in fields[11:15]) / TICKS_PER_S,
        resident_bytes=int(fields[21]) * PAGE_BYTES,
        virtual_bytes=int(fields[20]),
        stopped=fields[0] in (b"T", b"t"),
    )
