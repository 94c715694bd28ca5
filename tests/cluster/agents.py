"""Hosts whose agents are started by hand, as `docs/CLUSTER.md` describes it."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cluster.hosts import MEGABITS, Hosts
from rollweave.runtime.hosts.cluster import SECRET_VARIABLE

APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Runs a command in a namespace of processes."""

SECRET = "a secret of all hosts"
"""The secret of all runs."""


class HostsByHand(Hosts):
    """Hosts with an agent for each run. Their output is in `directory`."""

    def __init__(
        self,
        count: int,
        directory: Path,
        *,
        megabits: float | None = MEGABITS,
        far: int = 0,
    ) -> None:
        super().__init__(count, megabits=megabits, far=far)
        self._directory = directory
        self._agents: dict[str, subprocess.Popen[bytes]] = {}

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.wait_for_agents()

    def environment(self) -> dict[str, str]:
        return {**super().environment(), SECRET_VARIABLE: SECRET}

    def start(
        self,
        *hosts: int,
        port: int,
        run: str = "",
        options: Sequence[str] = (),
        apart: bool = False,
    ) -> None:
        """Start an agent on each of these hosts for the run at this port of the
        controller's address. `run` tells agents of several runs apart. Processes of
        hosts that are `apart` do not see each other, so that they share no memory.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        for host in hosts:
            name = self.name(host, run)
            command = [
                *(APART if apart else ()),
                *(sys.executable, "-m", "rollweave.cli.main", "host"),
                *("--join", f"{self.controller}:{port}", "--name", name),
                *("--user-code", *options),
            ]
            with (self._directory / f"agent-{name}.out").open("ab") as output:
                self._agents[name] = self.launch(host, command, output)

    def name(self, host: int, run: str = "") -> str:
        """Return the name under which an agent of this host joins."""
        return f"{chr(ord('a') + host)}{run}"

    def number(self, name: str) -> int:
        """Return the number of the host of this name."""
        return ord(name[0]) - ord("a")

    def started_by_agents(self, host: int) -> set[int]:
        """Return the processes on a host, without agents."""
        return {*self.processes(host)} - {agent.pid for agent in self._agents.values()}

    def kill_agent(self, host: int) -> None:
        """Kill a host's agent alone; what it has started must end by itself."""
        self._agents[self.name(host)].kill()

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
        agents.
        """
        left = [f"process {pid}" for host in range(self.count) for pid in self.processes(host)]
        return left + [f"file {name}" for name in self.files_left()]


def shared_memory() -> set[str]:
    """Return the files of shared memory that no process has open or mapped, without
    semaphores, which runs do not use but other programs on this machine may.
    """
    names = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if not name.startswith("sem.")}
    for entry in Path("/proc").iterdir():
        if names and entry.name.isdecimal():
            names -= _opened(entry, names)
    return names


def _opened(process: Path, names: set[str]) -> set[str]:
    opened: set[str] = set()
    with contextlib.suppress(OSError):
        lines = (process / "maps").read_text(errors="replace").splitlines()
        opened |= {line.split(maxsplit=5)[-1] for line in lines}
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # it is closed meanwhile
                opened.add(os.readlink(link))
    return opened & names


def mounts() -> list[str]:
    """Return the mounts that this process sees."""
    return Path("/proc/self/mounts").read_text().splitlines()
