"""Real Ray nodes, each on a host of a `Network`, which end with it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.network import Network

PORT = 6379
START_S = 200.0
"""Maximum seconds for a node to start on a busy machine."""

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # nodes for which no mode is named do not agree on one
    "RAY_raylet_start_wait_time_s": "60",
}

RAY = Path(sys.executable).parent / "ray"


class RayCluster:
    """A Ray cluster whose head, on host 0, offers no CPUs; nodes on other hosts do."""

    def __init__(self, network: Network, directory: Path) -> None:
        self.network, self._directory = network, directory
        self.address = f"{network.address(0)}:{PORT}"

    def environment(self) -> dict[str, str]:
        """Return the environment of a program that uses the cluster.

        Without compiled modules, a node does not start in Ray's own time limit.
        """
        inherited = {**os.environ, **ENVIRONMENT}
        inherited.pop("PYTHONDONTWRITEBYTECODE", None)
        return inherited

    def start_head(self) -> None:
        """Start the head."""
        self._start(
            0,
            *("--head", f"--port={PORT}", "--include-dashboard=false", "--num-cpus=0"),
            f"--temp-dir={self._directory}",
        )

    def start_node(self, host: int, resources: Mapping[str, float]) -> None:
        """Start a node with one CPU and these resources."""
        named = json.dumps(dict(resources))
        self._start(host, f"--address={self.address}", "--num-cpus=1", f"--resources={named}")

    def run(self, host: int, *command: str, timeout_s: float = 120.0) -> str:
        """Run a program on a host, and return its output."""
        with self.network.inside(host):
            done = subprocess.run(
                command, env=self.environment(), capture_output=True, timeout=timeout_s, check=False
            )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def status(self) -> str:
        """Return what Ray says of its nodes and resources."""
        return self.run(0, str(RAY), "status", f"--address={self.address}")

    def kill(self, host: int) -> None:
        """End everything on a host at once."""
        deadline = time.monotonic() + 10
        while self.network.processes(host) and time.monotonic() < deadline:
            self.network.signal_all(host, signal.SIGKILL)
            time.sleep(0.05)

    def agents(self, host: int) -> list[int]:
        """Return the processes of Ray on a host in which an agent is, or was."""
        return [
            pid
            for pid in self.network.processes(host)
            if command_of(pid).startswith("ray::AgentActor")
        ]

    def _start(self, host: int, *options: str) -> None:
        self.run(
            host,
            *(str(RAY), "start", *options, f"--node-ip-address={self.network.address(host)}"),
            *("--object-store-memory=80000000", "--disable-usage-stats"),
            timeout_s=START_S,
        )


def command_of(pid: int) -> str:
    """Return the command line of a process; "" if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
    return ""


def until(condition: Callable[[], bool], what: str, within_s: float = 120.0) -> float:
    """Wait for a condition, and return how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + within_s, f"waited {within_s:g} s for {what}"
        time.sleep(0.05)
    return time.monotonic() - began


@contextlib.contextmanager
def ray_cluster(hosts: int) -> Iterator[RayCluster]:
    """Start a network of `hosts` hosts with the head of a Ray cluster on the first one;
    remove everything afterwards.
    """
    # its sockets' names must be short
    directory = Path(tempfile.mkdtemp(prefix="ray-"))
    try:
        with Network(hosts) as network:
            assert not network.why_not, network.why_not
            cluster = RayCluster(network, directory)
            try:
                cluster.start_head()
                yield cluster
            finally:
                for host in range(hosts):
                    cluster.kill(host)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
