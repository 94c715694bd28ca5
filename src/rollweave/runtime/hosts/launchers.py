"""Start the agents of a run in place of the user: on this machine, or on the nodes of a
Ray cluster.

Invariants: an agent that ends before the run is started again; agents end with the
controller, even if it is killed.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollweave.io.child import ChildProcess, spawn
from rollweave.io.extras import how_to_install, missing_from
from rollweave.io.wire import decoder_of, encode
from rollweave.runtime.hosts.hosts import LOOPBACK, resources
from rollweave.schema.config.engines import ClusterConfig
from rollweave.schema.errors import ConfigError, FieldError, HostError
from rollweave.schema.hosts import (
    JOIN_S,
    AgentEnded,
    AgentPending,
    AgentSpec,
    ConnectRay,
    Programs,
    RayConnected,
    RayFailed,
    RayReport,
    Resources,
    StartAgents,
    StopAgents,
)

RETRY_S = 1.0
"""Seconds between the end of an agent on this machine and its next start."""

CLOSE_S = 10.0
"""Maximum seconds for agents to end once the run is over."""

RAY_CONNECT_S = 90.0
"""Maximum seconds to import Ray and to connect to its cluster."""

_decode = decoder_of(RayReport)


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The hosts that a launcher can reach: `hosts` is their number at present,
    `address` that at which they reach the controller.
    """

    address: str
    hosts: int


class Launcher(Protocol):
    """Starts the agents of a run."""

    async def open(self) -> Reach:
        """Find the hosts. Raises ConfigError."""

    def start(self, controller: tuple[str, int], secret: bytes) -> None:
        """Start the agents, and keep them running."""

    async def close(self) -> None:
        """Wait until all agents, which the controller has released, have ended."""


def launcher_of(
    cluster: ClusterConfig,
    *,
    labels: Sequence[str] = (),
    programs: Programs,
    logs: Path,
    on_status: Callable[[str], None],
    fail: Callable[[str], None],
) -> Launcher | None:
    """Return the launcher that the configuration names; None if the user starts the
    agents.

    `labels` are resources that hosts should have, and `programs` the modules that
    agents start. `on_status` receives lines for the user, and `fail` the reason why an
    agent cannot be started. Raises ConfigError.
    """
    match cluster.launcher.partition(":")[0]:
        case "local":
            return LocalLauncher(cluster, logs, programs)
        case "ray":
            check_launcher(cluster)
            return RayLauncher(
                cluster, logs, programs, labels=labels, on_status=on_status, fail=fail
            )
        case _:
            return None


def check_launcher(cluster: ClusterConfig) -> None:
    """Raise FieldError if the launcher needs a package that is not installed."""
    if cluster.on_ray and missing_from("ray"):
        raise FieldError(
            "cluster.launcher", f"be installed ({how_to_install('ray')})", cluster.launcher
        )


class LocalLauncher:
    """Starts several agents on this machine, and divides its cores and GPUs among
    them.
    """

    def __init__(self, cluster: ClusterConfig, logs: Path, programs: Programs) -> None:
        assert cluster.hosts is not None, "it is checked with the configuration"
        self._variables, self._programs = cluster.env, programs
        self._count, self._logs = cluster.hosts, logs
        self._resources: Resources | None = None
        self._agents: dict[int, ChildProcess] = {}
        self._retries: dict[int, asyncio.TimerHandle] = {}
        self._closing = False

    async def open(self) -> Reach:
        """List this machine's GPUs. Raises ConfigError."""
        try:
            self._resources = await asyncio.to_thread(resources)
        except HostError as error:
            raise ConfigError(str(error)) from None
        return Reach(address=str(LOOPBACK), hosts=self._count)

    def start(self, controller: tuple[str, int], secret: bytes) -> None:
        """Start all agents."""
        assert self._resources is not None, "it is open"
        devices = [device.index for device in self._resources.devices]
        for number in range(self._count):
            spec = AgentSpec(
                name=f"local-{number}",
                address=str(LOOPBACK),
                controller=controller,
                secret=secret,
                join_s=JOIN_S,
                cpus=max(1, self._resources.cpus // self._count),
                devices=tuple(devices[number :: self._count]),
                variables=self._variables,
                programs=self._programs,
            )
            self._spawn(number, spec)

    async def close(self) -> None:
        """Wait until all agents have ended, and kill those that do not."""
        self._closing = True
        for retry in self._retries.values():
            retry.cancel()
        await _end(list(self._agents.values()))

    def _spawn(self, number: int, spec: AgentSpec) -> None:
        def on_gone(reason: str) -> None:
            del self._agents[number]
            if not self._closing:
                loop = asyncio.get_running_loop()
                self._retries[number] = loop.call_later(RETRY_S, self._spawn, number, spec)

        self._agents[number] = spawn(
            name=f"agent {spec.name}",
            module="rollweave.runtime.entrypoints.agent",
            log=self._logs / f"agent-{number}.log",
            env={},
            on_frame=lambda _: None,
            on_gone=on_gone,
        )
        self._agents[number].send(encode(spec))


class RayLauncher:
    """Lets Ray start agents on its nodes, through a child process that is
    Ray's driver (`runtime/hosts/on_ray`).

    The controller itself does not connect to Ray, which would end it with its node.
    """

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
        self._driver: ChildProcess | None = None
        self._reach: asyncio.Future[Reach] = asyncio.get_running_loop().create_future()
        self._closing = False

    async def open(self) -> Reach:
        """Connect to the cluster. Raises ConfigError."""
        self._driver = spawn(
            name="ray",
            module="rollweave.runtime.entrypoints.ray",
            log=self._logs / "ray.log",
            env={},
            on_frame=self._on_frame,
            on_gone=self._on_gone,
        )
        self._driver.send(encode(ConnectRay(address=self._cluster.ray)))
        try:
            async with asyncio.timeout(RAY_CONNECT_S):
                return await self._reach
        except TimeoutError:
            raise ConfigError(self._unreachable(f"no answer in {RAY_CONNECT_S:g} s")) from None

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
        self._driver.send(encode(start))

    async def close(self) -> None:
        """Leave the cluster; Ray then ends the agents that are left."""
        self._closing = True
        if self._driver is not None:
            self._driver.send(encode(StopAgents()))
            await _end([self._driver])

    def _unreachable(self, reason: str) -> str:
        return (
            "cluster.launcher must name a Ray cluster that has a node on this machine, got "
            f"{self._cluster.ray}: {reason}"
        )

    def _on_frame(self, payload: bytes) -> None:
        match _decode(payload):
            case RayConnected(address=address, hosts=hosts) if not self._reach.done():
                self._reach.set_result(Reach(address=address, hosts=hosts))
            case RayFailed(error=error) if not self._reach.done():
                self._reach.set_exception(ConfigError(self._unreachable(error)))
            case AgentPending(host=host, reason=reason):
                self._on_status(f"host {host}: {reason}")
            case AgentEnded(host=host, error=error):
                self._fail(f"host {host}: {error}")

    def _on_gone(self, reason: str) -> None:
        if not self._reach.done():
            self._reach.set_exception(ConfigError(self._unreachable(reason)))
        elif not self._closing:
            self._fail(f"the connection to Ray is lost, and with it all hosts: {reason}")


async def _end(processes: list[ChildProcess]) -> None:
    """Wait until these processes have ended; kill those that take too long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            await asyncio.gather(*(process.gone() for process in processes))
    for process in processes:
        process.kill()
    await asyncio.gather(*(process.gone() for process in processes))
