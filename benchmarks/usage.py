"""Processor time and memory of a tree of processes, seen from outside."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

SAMPLE_S = 0.5
TICKS = os.sysconf("SC_CLK_TCK")


class Usage:
    """The resources that the process `root` and all processes below it use, sampled on
    a thread.

    `peak` is the largest sum of their memory in bytes, in which a page that several of
    them share counts once (PSS). A process counts from its first sample on, and keeps
    the processor time of its last sample.
    """

    def __init__(self, root: int) -> None:
        self.peak = 0
        self._root = root
        self._ticks = dict[int, int]()
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cpu_s(self) -> float:
        """Return the seconds of processor time until now."""
        self._sample()
        with self._lock:
            return sum(self._ticks.values()) / TICKS

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        with self._lock:
            total = 0
            for pid in _tree(self._root):
                with contextlib.suppress(OSError):  # it may have ended
                    self._ticks[pid] = _ticks(pid)
                    total += _pss(pid)
            self.peak = max(self.peak, total)


def _tree(root: int) -> Iterator[int]:
    yield root
    for path in Path(f"/proc/{root}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in path.read_text().split():
                yield from _tree(int(child))


def _ticks(pid: int) -> int:
    """Return the processor time of a process, in ticks of the system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = fields[11:13]
    return int(user) + int(system)


def _pss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


@contextlib.contextmanager
def used(root: int | None = None) -> Iterator[Usage]:
    """Watch `root` and all below it, by default this process, for the context."""
    usage = Usage(os.getpid() if root is None else root)
    try:
        yield usage
    finally:
        usage.stop()
