"""Hosts of a run on this machine: network namespaces whose links have a limited speed,
and everything that may happen to a host.

Invariants: those of `benchmarks/network.py`; in the end every process on every host is
killed.
"""

import contextlib
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

from benchmarks.harness import die_with_us, environment
from benchmarks.network import Network
from rollweave.io.locked_folders import remove_stale, temporary_folder
from rollweave.runtime.hosts.agent import FOLDER_PREFIX

CONTROLLERS = -1
"""Number of the controllers' host."""

MEGABITS = 200.0
"""Speed of every host's link, up and down, in megabits a second: far less than the
memory through which processes of one machine share weights.
"""

PREFIX = "rollweave-net-"
"""Prefix of the folder for temporary files: short, as Ray's sockets have long names."""

CACHE = "torchinductor"
"""Substring of the name of torch's cache, which it keeps for later processes."""


class Hosts:
    """`count` hosts, from `__enter__` on, of which the last `far` are at a second site,
    and one more for controllers, whose link is not limited. Temporary files of all
    their processes are in `scratch`, which is removed in the end; if this process is
    killed, by the next one.

    `why_not` is the reason if there are none; then no other method may be called.
    """

    def __init__(self, count: int, *, megabits: float | None = MEGABITS, far: int = 0) -> None:
        self.count, self._megabits = count, megabits
        self._network = Network(1 + count, far=far)  # the controllers' host is the first one
        self._folder = temporary_folder(PREFIX)
        self.scratch = Path()

    def __enter__(self) -> Self:
        self._network.__enter__()
        if not self.why_not:
            self.scratch = self._folder.__enter__()
            if self._megabits is not None:
                self.limit(self._megabits, *range(self.count))
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if not self.why_not:
                for host in (*range(self.count), CONTROLLERS):
                    self.kill(host)
                self._folder.__exit__(None, None, None)
        finally:
            self._network.__exit__()

    @property
    def why_not(self) -> str:
        """Return why there are no hosts; "" if there are."""
        return self._network.why_not

    @property
    def controller(self) -> str:
        """The address of the controllers' host."""
        return self.address(CONTROLLERS)

    def address(self, host: int) -> str:
        """Return the address of a host."""
        return self._network.address(1 + host)

    def inside(self, host: int) -> contextlib.AbstractContextManager[None]:
        """Move this thread to a host: processes started in this context stay there."""
        return self._network.inside(1 + host)

    def environment(self) -> dict[str, str]:
        """Return the environment of processes on the hosts, controllers included."""
        return environment(TMPDIR=str(self.scratch))

    def launch(
        self, host: int, command: Sequence[str], output: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Start a process on a host, which ends with this one. Its output is appended
        to `output`.
        """
        with self.inside(host):
            return subprocess.Popen(
                command,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_us,
            )

    def limit(self, megabits: float, *hosts: int) -> None:
        """Limit the links of these hosts."""
        self._network.limit(megabits, [1 + host for host in hosts])

    def limit_sites(self, megabits: float | None) -> None:
        """Limit the link between the two sites; None removes the limit."""
        self._network.limit_sites(megabits)

    def crossed_bytes(self) -> int:
        """Return the bytes that have been sent to the second site."""
        return self._network.crossed_bytes()

    # What may happen to a host.

    def kill(self, host: int) -> None:
        """Kill every process on a host at once."""
        while self.processes(host):
            self._network.signal_all(1 + host, signal.SIGKILL)
            time.sleep(0.02)  # the kernel takes a moment to end them

    def fail(self, host: int) -> None:
        """Let a host lose its power: its connections do not end, and are refused only
        once it is `restored`.
        """
        self.cut(host)
        self.kill(host)

    def hang(self, host: int) -> None:
        """Stop every process on a host."""
        self._network.signal_all(1 + host, signal.SIGSTOP)

    def wake(self, host: int) -> None:
        """Let the processes on a host continue."""
        self._network.signal_all(1 + host, signal.SIGCONT)

    def cut(self, host: int) -> None:
        """Cut the link of a host."""
        self._network.cut(1 + host)

    def restore(self, host: int) -> None:
        """Restore the link of a host."""
        self._network.join(1 + host)

    # What is left.

    def processes(self, host: int) -> list[int]:
        """Return the processes on a host."""
        return self._network.processes(1 + host)

    def files_left(self) -> list[str]:
        """Return the files of runs that are over. Folders of killed agents are those
        that the next agent removes.
        """
        remove_stale(str(self.scratch), FOLDER_PREFIX)
        return [path.name for path in self.scratch.iterdir() if CACHE not in path.name]


def command_of(pid: int) -> str:
    """Return the command line of a process; "" if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    return ""
