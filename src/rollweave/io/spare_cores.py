"""The idle cores of this machine, for a process that computes.

A process begins with the threads that are its own. From then on it follows what Linux
counts: while a core idles it takes one more thread, and while its own thread has to
wait for a core it gives one back. So the cores of a machine go to whichever process has
work, without any arrangement between the processes.
"""

import os
import time
from pathlib import Path
from typing import NamedTuple

from rollweave.io.machine import cores

PERIOD_S = 0.25
"""Minimum seconds between two changes: Linux counts idle time in hundredths of
seconds.
"""

IDLE = 0.75
"""A thread more is taken if this much of a core was idle."""

WAITED = 0.1
"""A thread is given back if the process waited for a core for this share of the time.
"""

_TICKS = os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """Seconds since some moment: the time, those for which this machine's cores were
    idle, summed, and those for which the calling thread waited for a core.
    """

    at: float
    idle_s: float
    waited_s: float


class SpareCores:
    """The number of threads of a process, at least its `own`.

    At most, it has as many threads as the process may use cores. Where the system does
    not count, it keeps its own.
    """

    def __init__(self, own: int = 1) -> None:
        self._own = self.threads = own
        self._most = max(own, usable_cores())
        self._before = usage()

    def follow(self) -> int:
        """Return the number of threads to compute with from now on. Call it often, and
        on the thread that computes.
        """
        now, before = usage(), self._before
        if now is None or before is None or now.at - before.at < PERIOD_S:
            return self.threads
        self._before = now
        elapsed = now.at - before.at
        if (now.waited_s - before.waited_s) / elapsed > WAITED:
            self.threads = max(self._own, self.threads - 1)
        elif (now.idle_s - before.idle_s) / elapsed > IDLE:
            self.threads = min(self._most, self.threads + 1)
        return self.threads


def usage() -> Usage | None:
    """Read what Linux counts; None on other systems."""
    try:
        waited = Path("/proc/thread-self/schedstat").read_text().split()[1]
        lines = Path("/proc/stat").read_text().splitlines()
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        fields = [line.split() for line in lines if line.startswith("cpu")]
        idle = sum(int(one[4]) + int(one[5]) for one in fields if one[0] in mine)
    except (OSError, AttributeError, ValueError, IndexError):
        return None
    return Usage(time.monotonic(), idle / _TICKS, int(waited) / 1e9)


def usable_cores() -> int:
    """Return the number of cores that this process may use, within the quota of its
    container.
    """
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores(), int(quota) // int(period)))
    except (OSError, ValueError):  # there is no file, or "max"
        return cores()
