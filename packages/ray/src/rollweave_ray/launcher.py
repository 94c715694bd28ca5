"""The launcher `ray` of agents: Ray starts them on its nodes. `LauncherKind` of
Rollweave's `runtime/hosts/launchers.py`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from rollweave.runtime.hosts.launchers import CLOSE_S, LauncherKind, Reach
from rollweave.schema.config.engines import ClusterConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.hosts import JOIN_S, Programs
from rollweave_ray.driver import RayDriver
from rollweave_ray.messages import (
    AgentEnded,
    AgentPending,
    AgentReport,
    ConnectRay,
    DriverFailed,
    RayConnected,
    StartAgents,
)

CONNECT_S = 90.0
"""Maximum seconds to import Ray and to connect to its cluster."""


def address_of(cluster: ClusterConfig) -> str:
    """Return the address of the Ray cluster; "auto" for that of the node here."""
    return cluster.launcher.partition(":")[2] or "auto"


class RayLauncher:
    """Lets Ray start agents on its nodes, through its driver."""

    def __init__(
        self,
        cluster: ClusterConfig,
        logs: Path,
        programs: Programs,
        *,
        labels: Sequence[str],
        on_status: Callable[[str], None],
        fail: Callable[[str], None],
    ) -> None:
        self._cluster, self._logs, self._on_status, self._fail = cluster, logs, on_status, fail
        self._labels, self._programs = tuple(labels), programs
        self._driver: RayDriver | None = None

    async def open(self) -> Reach:
        """Connect to the cluster. Raises ConfigError."""
        address = address_of(self._cluster)
        self._driver = RayDriver(
            name="ray",
            log=self._logs / "ray.log",
            command=ConnectRay(address=address),
            on_report=self._on_report,
            on_lost=self._on_lost,
        )
        match await self._driver.answer(CONNECT_S):
            case RayConnected(address=here, hosts=hosts):
                return Reach(address=here, hosts=hosts)
            case DriverFailed(error=error):
                raise ConfigError(
                    "cluster.launcher must name a Ray cluster that has a node on this machine, "
                    f"got {address}: {error}"
                )
            case answer:
                raise AssertionError(f"{answer} answers another command")

    def start(self, controller: tuple[str, int], secret: bytes) -> None:
        """Start an agent on every node, and on each that joins the cluster, or on
        `cluster.hosts` of them.
        """
        assert self._driver is not None, "it is open"
        start = StartAgents(
            controller=controller,
            secret=secret,
            join_s=JOIN_S,
            hosts=self._cluster.hosts,
            labels=self._labels,
            variables=self._cluster.env,
            programs=self._programs,
        )
        self._driver.send(start)

    async def close(self) -> None:
        """Leave the cluster; Ray then ends the agents that are left."""
        if self._driver is not None:
            await self._driver.close(CLOSE_S)

    def _on_report(self, report: AgentReport) -> None:
        match report:
            case AgentPending(host=host, reason=reason):
                self._on_status(f"host {host}: {reason}")
            case AgentEnded(host=host, error=error):
                self._fail(f"host {host}: {error}")

    def _on_lost(self, reason: str) -> None:
        self._fail(f"the connection to Ray is lost, and with it all hosts: {reason}")


LAUNCHER: LauncherKind = RayLauncher
