"""The processes of this machine at one moment: their parents, and the resources that
they use. Linux only, standard library alone.
"""

import os
from collections.abc import Iterable
from typing import NamedTuple

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ENTRIES_PER_TABLE = PAGE_BYTES // 8
"""Number of pages that one page of page tables maps."""


STAT_BYTES = 4096
"""More than the largest size of /proc/PID/stat, whose fields are numbers but one."""


class Process(NamedTuple):
    """A process, as /proc/PID/stat describes it."""

    pid: int
    parent: int
    started: int
    """Start time in kernel ticks since the boot; with the pid it identifies the
    process.
    """
    cpu_s: float
    """CPU seconds of the process, and of its children that it has waited for."""
    resident_bytes: int
    virtual_bytes: int
    stopped: bool
    """True while a signal or a tracer has stopped it."""

    @property
    def most_bytes(self) -> int:
        """Upper bound of its memory in bytes: resident pages, and the largest page
        tables that its address space can need.
        """
        return self.resident_bytes + self.virtual_bytes // ENTRIES_PER_TABLE

    def table_bytes(self) -> int:
        """Return the memory of its page tables, which no other process shares.

        The call costs little, however many pages there are.
        """
        try:
            return _kilobytes(f"/proc/{self.pid}/status", "VmPTE:", 0)
        except OSError:
            return 0

    def proportional_bytes(self, inherited_bytes: int = 0) -> int:
        """Return the bytes of resident memory, in which a page that n processes map
        counts 1/n, plus page tables.

        If the kernel refuses access, because the process hides its memory, resident
        memory beyond `inherited_bytes` counts.
        """
        resident = self.resident_bytes - inherited_bytes
        try:
            pages = _kilobytes(f"/proc/{self.pid}/smaps_rollup", "Pss:", resident)
            return pages + _kilobytes(f"/proc/{self.pid}/status", "VmPTE:", 0)
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
        processes = {}
        for name in os.listdir("/proc"):
            if name.isdecimal():
                line = process(int(name))
                if line is not None:  # otherwise it has ended
                    processes[line.pid] = line
        return cls(processes)

    def below(self, seen: dict[int, int]) -> list[Process]:
        """Return the processes of `seen` (start times by pid) that still exist, and all
        their descendants.
        """
        descendants: dict[int, Process] = {}
        waiting = [self._processes[pid] for pid, started in seen.items() if self._is(pid, started)]
        while waiting:
            process = waiting.pop()
            if process.pid not in descendants:
                descendants[process.pid] = process
                waiting.extend(self._children.get(process.pid, ()))
        return list(descendants.values())

    def _is(self, pid: int, started: int) -> bool:
        return pid in self._processes and self._processes[pid].started == started


def process(pid: int) -> Process | None:
    """Return one process; None if it does not exist."""
    try:
        # without a file object, a table of all processes takes about half of the time
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _parsed(pid, os.read(file, STAT_BYTES))
        finally:
            os.close(file)
    except (FileNotFoundError, ProcessLookupError):
        return None


def started(pids: Iterable[int]) -> dict[int, int]:
    """Return the start times, by pid, of the processes that exist."""
    return {pid: line.started for pid in pids if (line := process(pid)) is not None}


def _kilobytes(path: str, name: str, otherwise: int) -> int:
    """Return in bytes the size that a line of a file in /proc gives in kB."""
    with open(path) as lines:
        return next(
            (1024 * int(line.split()[1]) for line in lines if line.startswith(name)), otherwise
        )


def _parsed(pid: int, stat: bytes) -> Process:
    fields = stat.rpartition(b")")[2].split()  # a name may contain anything, even brackets
    return Process(
        pid=pid,
        parent=int(fields[1]),
        started=int(fields[19]),
        cpu_s=sum(int(ticks) for ticks in fields[11:15]) / TICKS_PER_S,
        resident_bytes=int(fields[21]) * PAGE_BYTES,
        virtual_bytes=int(fields[20]),
        stopped=fields[0] in (b"T", b"t"),
    )
