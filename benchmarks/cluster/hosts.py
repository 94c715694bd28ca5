"""Hosts of a run on this machine: agents in network namespaces whose links have a limited
speed, and everything that may happen to a host.

Invariants: as of `benchmarks/network.py`; in the end every process on every host is
killed.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from benchmarks.network import SWITCH, Network
from benchmarks.soak.run_under_test import die_with_us, source_path
from rollweave.io.locked_folders import remove_stale
from rollweave.runtime.hosts.agent import FOLDER_PREFIX
from rollweave.runtime.hosts.cluster import SECRET_VARIABLE

MEGABITS = 200.0
"""Speed of every host's link, up and down, in megabits a second: far less than the memory
through which processes of one machine share weights.
"""

CONTROLLER = SWITCH
"""Address of the controller, which is on no host."""

JOIN_S = 120.0
"""Maximum seconds that an agent searches for a controller."""

CACHE = "torchinductor"
"""In the name of torch's cache, which it keeps for later processes."""

SECRET = "a secret of three hosts"
"""The secret of all runs."""


class HostsUnderTest:
    """`count` hosts, from `__enter__` on, of which the last `far` are at a second site.
    Files of their agents are in `directory`.

    `why_not` is the reason if there are none; then no other method may be called.
    """

    def __init__(
        self,
        count: int,
        directory: Path,
        *,
        megabits: float | None = MEGABITS,
        far: int = 0,
    ) -> None:
        self.count, self._directory, self._megabits = count, directory, megabits
        self._network = Network(count, far=far)
        self._agents: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self._network.__enter__()
        if not self.why_not and self._megabits is not None:
            self._network.limit(self._megabits)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if not self.why_not:
                for host in range(self.count):
                    self.kill(host)
                self.wait_for_agents()
        finally:
            self._network.__exit__()

    @property
    def why_not(self) -> str:
        """Why there are no hosts; empty if there are."""
        return self._network.why_not

    def limit(self, megabits: float, *hosts: int) -> None:
        """Limit the links of these hosts."""
        self._network.limit(megabits, hosts)

    def limit_sites(self, megabits: float | None) -> None:
        """Limit the link between the two sites; None removes the limit."""
        self._network.limit_sites(megabits)

    def crossed_bytes(self) -> int:
        """Return the bytes that have been sent to the second site."""
        return self._network.crossed_bytes()

    def start(self, *hosts: int, port: int, run: str = "", options: Sequence[str] = ()) -> None:
        """Start an agent on each of these hosts for the run at this port of the
        controller's address. `run` tells agents of several runs apart.
        """
        for host in hosts:
            name = f"{chr(ord('a') + host)}{run}"
            command = [
                *(sys.executable, "-m", "rollweave.cli.main", "host"),
                *("--join", f"{CONTROLLER}:{port}", "--name", name),
                *("--join-s", f"{JOIN_S:g}", *options),
            ]
            scratch = self._directory / "scratch"
            scratch.mkdir(parents=True, exist_ok=True)
            env = {
                **os.environ,
                SECRET_VARIABLE: SECRET,
                "PYTHONPATH": source_path(),
                "TMPDIR": str(scratch),
            }
            with (
                (self._directory / f"agent-{name}.out").open("ab") as output,
                self._network.inside(host),
            ):
                self._agents[name] = subprocess.Popen(
                    command,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    preexec_fn=die_with_us,
                )

    def name(self, host: int, run: str = "") -> str:
        """Return the name under which an agent of this host joins."""
        return f"{chr(ord('a') + host)}{run}"

    def number(self, name: str) -> int:
        """Return the number of the host of this name."""
        return ord(name[0]) - ord("a")

    # What may happen to a host.

    def kill_agent(self, name: str) -> None:
        """Kill an agent alone; what it has started must end by itself."""
        self._agents[name].kill()

    def kill(self, host: int) -> None:
        """Kill every process on a host at once."""
        while self._network.processes(host):
            self._network.signal_all(host, signal.SIGKILL)

    def fail(self, host: int) -> None:
        """Let a host lose its power: its connections do not end, and are refused only
        once it is `restored`.
        """
        self.cut(host)
        self.kill(host)

    def hang(self, host: int) -> None:
        """Stop every process on a host."""
        self._network.signal_all(host, signal.SIGSTOP)

    def wake(self, host: int) -> None:
        """Let the processes on a host continue."""
        self._network.signal_all(host, signal.SIGCONT)

    def cut(self, host: int) -> None:
        """Cut the link of a host."""
        self._network.cut(host)

    def restore(self, host: int) -> None:
        """Restore the link of a host."""
        self._network.join(host)

    # What is left.

    def processes(self, host: int) -> list[int]:
        """Return the processes on a host."""
        return self._network.processes(host)

    def agents_left(self) -> list[str]:
        """Return the names of the agents that run."""
        return [name for name, agent in self._agents.items() if agent.poll() is None]

    def wait_for_agents(self, limit_s: float = 60.0) -> dict[str, int]:
        """Wait for the end of all agents, and return their exit statuses.

        Raises subprocess.TimeoutExpired.
        """
        return {name: agent.wait(limit_s) for name, agent in self._agents.items()}

    def leftovers(self) -> list[str]:
        """Describe what is left of runs that are over: processes on hosts, and files of
        agents. Folders of killed agents are those that the next agent removes.
        """
        left = [f"process {pid}" for host in range(self.count) for pid in self.processes(host)]
        scratch = self._directory / "scratch"
        if scratch.exists():
            remove_stale(str(scratch), FOLDER_PREFIX)
            left += [f"file {path}" for path in scratch.iterdir() if CACHE not in path.name]
        return left


def shared_memory() -> set[str]:
    """Return the files of shared memory that no process has open or mapped."""
    names = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    for entry in Path("/proc").iterdir():
        if names and entry.name.isdecimal():
            names -= _opened(entry, names)
    return names


def _opened(process: Path, names: set[str]) -> set[str]:
    found: set[str] = set()
    with contextlib.suppress(OSError):
        lines = (process / "maps").read_text(errors="replace").splitlines()
        found |= {line.split(maxsplit=5)[-1] for line in lines}
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # it is closed meanwhile
                found.add(os.readlink(link))
    return found & names


def mounts() -> list[str]:
    """Return the mounts that this process sees."""
    return Path("/proc/self/mounts").read_text().splitlines()
