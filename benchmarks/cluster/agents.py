"""Hosts whose agents are started by hand, as `docs/CLUSTER.md` describes it."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cluster.hosts import MEGABITS, Hosts
from benchmarks.soak.run_under_test import die_with_us
from rollweave.runtime.hosts.cluster import SECRET_VARIABLE

JOIN_S = 120.0
"""Maximum seconds that an agent searches for a controller."""

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

    def start(self, *hosts: int, port: int, run: str = "", options: Sequence[str] = ()) -> None:
        """Start an agent on each of these hosts for the run at this port of the
        controller's address. `run` tells agents of several runs apart.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        for host in hosts:
            name = self.name(host, run)
            command = [
                *(sys.executable, "-m", "rollweave.cli.main", "host"),
                *("--join", f"{self.controller}:{port}", "--name", name),
                *("--join-s", f"{JOIN_S:g}", *options),
            ]
            with (
                (self._directory / f"agent-{name}.out").open("ab") as output,
                self.inside(host),
            ):
                self._agents[name] = subprocess.Popen(
                    command,
                    env=self.environment(),
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

    def kill_agent(self, name: str) -> None:
        """Kill an agent alone; what it has started must end by itself."""
        self._agents[name].kill()

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
