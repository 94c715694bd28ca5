"""Hosts that are nodes of a real Ray cluster, whose head is on the controllers' host.

Invariants: those of `benchmarks/cluster/hosts.py`; another Ray cluster on this machine
is not touched, as Ray's files and processes are those of these hosts alone; the
processes of a node end with its `ray start`, and that with the thread that started it.
(If this process is killed, two helpers of each node end only when Ray's head has not
answered them for a minute.)
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from benchmarks.cluster.hosts import CONTROLLERS, MEGABITS, Hosts, command_of
from rollweave.io.extras import how_to_install_distribution
from rollweave.schema.errors import RollweaveError

PORT = 6379

START_S = 200.0
"""Maximum seconds for a node to start on a busy machine."""

UP = "This command will now block forever"
"""A part of the line that `ray start` prints once its node is up."""

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # nodes for which no mode is named do not agree on one
    "RAY_raylet_start_wait_time_s": "150",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # of 5 s: a busy machine needs more
}

RAY = Path(sys.executable).parent / "ray"

FOLDER = "ray"
"""Folder of the head's files among the temporary ones, in which programs on its host
look for them; the beginning of the names of all of Ray's files there.
"""

ENTRYPOINTS = "-m rollweave.runtime.entrypoints."
"""Substring of the command lines of a run's processes."""

AGENT = "ray::AgentActor"
"""The beginning of the command line of Ray's process in which an agent is, or was."""


class RayHosts(Hosts):
    """A node with one CPU and its own resources on each host, from `__enter__` on. The
    head offers nothing.
    """

    def __init__(
        self, resources: Sequence[Mapping[str, float]], *, megabits: float | None = MEGABITS
    ) -> None:
        super().__init__(len(resources), megabits=megabits)
        self._resources = resources
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._missing = ""

    def __enter__(self) -> Self:
        super().__enter__()
        if self.why_not:
            return self
        try:
            if importlib.util.find_spec("ray") is None:
                self.__exit__()
                advice = how_to_install_distribution("rollweave-ray")
                self._missing = f"ray is not installed ({advice})"
            else:
                self._start_head()
                self.start_nodes(*range(self.count))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if not self._missing:
            super().__exit__(*error)
        for node in self._nodes.values():
            node.wait()

    @property
    def why_not(self) -> str:
        return self._missing or super().why_not

    @property
    def cluster(self) -> str:
        """The address of the Ray cluster."""
        return f"{self.controller}:{PORT}"

    def environment(self) -> dict[str, str]:
        """Return the environment of processes on the hosts.

        Without compiled modules, a node does not start in Ray's own time limit.
        """
        inherited = {**super().environment(), **ENVIRONMENT}
        for name in ("PYTHONDONTWRITEBYTECODE", "RAY_ADDRESS", "RAY_TMPDIR"):
            inherited.pop(name, None)
        return inherited

    def start_nodes(self, *hosts: int) -> None:
        """Start the nodes of these hosts, and wait until they are up.

        Raises RollweaveError for one that does not start.
        """
        for host in hosts:
            named = json.dumps(dict(self._resources[host]))
            self._start(host, f"--address={self.cluster}", "--num-cpus=1", f"--resources={named}")
        for host in hosts:
            self._wait_until_up(host)

    def name(self, host: int) -> str:
        """Return the name under which the agent of this host joins. For a while after
        it came back, Ray counts on its former node of that name, too; a dash and the
        new node's number then follow.
        """
        return self.address(host)

    def number(self, name: str) -> int:
        """Return the number of the host with this name."""
        return [self.name(host) for host in range(self.count)].index(name.partition("-")[0])

    def run(self, host: int, *command: str, timeout_s: float = 120.0) -> str:
        """Run a program on a host, and return its output. Raises RollweaveError if it
        fails.
        """
        with self.inside(host):
            done = subprocess.run(
                command, env=self.environment(), capture_output=True, timeout=timeout_s, check=False
            )
        if done.returncode:
            raise RollweaveError(f"{' '.join(command)}: {done.stderr.decode(errors='replace')}")
        return done.stdout.decode()

    def status(self) -> str:
        """Return what Ray says of its nodes and resources."""
        return self.run(CONTROLLERS, str(RAY), "status", f"--address={self.cluster}")

    def agents(self) -> dict[int, list[int]]:
        """Return the hosts that have processes in which an agent is, or was, and
        these.
        """
        pids_of = {
            host: [pid for pid in self.processes(host) if command_of(pid).startswith(AGENT)]
            for host in range(self.count)
        }
        return {host: pids for host, pids in pids_of.items() if pids}

    def started_by_agents(self, host: int) -> set[int]:
        """Return the processes of runs on a host."""
        return {pid for pid in self.processes(host) if ENTRYPOINTS in command_of(pid)}

    def kill_agent(self, host: int) -> None:
        """Kill a host's agent alone; what it has started must end by itself, and Ray
        starts another one.
        """
        for pid in self.agents().get(host, []):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_for_agents(self, limit_s: float = 60.0) -> None:
        """Wait for the end of all agents. Raises RollweaveError."""
        deadline = time.monotonic() + limit_s
        while left := self.agents():
            if time.monotonic() > deadline:
                raise RollweaveError(f"agents must end within {limit_s:g} s, got {left}")
            time.sleep(0.05)

    def leftovers(self) -> list[str]:
        """Describe what is left of runs that are over: agents, other processes of ours,
        and files.
        """
        left = [
            f"process {pid}: {command}"
            for host in (*range(self.count), CONTROLLERS)
            for pid in self.processes(host)
            if (command := command_of(pid)).startswith(AGENT) or "-m rollweave." in command
        ]
        return left + [f"file {name}" for name in self.files_left() if not name.startswith(FOLDER)]

    def _start_head(self) -> None:
        self._start(
            CONTROLLERS,
            *("--head", f"--port={PORT}", "--include-dashboard=false", "--num-cpus=0"),
            folder=FOLDER,
        )
        self._wait_until_up(CONTROLLERS)

    def _start(self, host: int, *options: str, folder: str = "") -> None:
        """Start a node with files in a separate folder: those of nodes that start at
        the same time would have the same names.
        """
        command = [
            *(str(RAY), "start", "--block", *options),
            f"--node-ip-address={self.address(host)}",
            f"--temp-dir={self.scratch / (folder or f'{FOLDER}-{host}')}",
            *("--object-store-memory=80000000", "--disable-usage-stats"),
        ]
        if host in self._nodes:
            self._nodes[host].wait()
        with self._output(host).open("wb") as output:
            self._nodes[host] = self.launch(host, command, output)

    def _wait_until_up(self, host: int) -> None:
        deadline = time.monotonic() + START_S
        while UP not in (printed := self._output(host).read_text(errors="replace")):
            status = self._nodes[host].poll()
            if status is not None or time.monotonic() > deadline:
                state = "does not start" if status is None else f"ended with {status}"
                raise RollweaveError(f"the Ray node of host {host} {state}:\n{printed}")
            time.sleep(0.05)

    def _output(self, host: int) -> Path:
        return self.scratch / f"{FOLDER}-{host}.out"
