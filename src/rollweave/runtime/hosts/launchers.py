"""Start the agents of a run in place of the user: on this machine, or by a launcher of
another distribution: in this repository `rollweave-ray`, on the nodes of a Ray cluster.
A distribution announces a launcher by an entry point of the group
`rollweave.launchers`, which has its name in `cluster.launcher`, and leads to a
`LauncherKind`.

Invariants: an agent that ends before the run is started again; agents end with the
controller, even if it is killed.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from rollweave.io.child import ChildProcess, spawn
from rollweave.io.extras import announced
from rollweave.io.wire import encode
from rollweave.runtime.hosts.hosts import LOOPBACK, resources
from rollweave.schema.config.engines import ClusterConfig
from rollweave.schema.errors import ConfigError, HostError
from rollweave.schema.hosts import JOIN_S, AgentSpec, Programs, Resources

GROUP = "rollweave.launchers"

DISTRIBUTION = "rollweave-ray"
"""The distribution in this repository that announces launchers."""

RETRY_S = 1.0
"""Seconds between the end of an agent on this machine and its next start."""

CLOSE_S = 10.0
"""Maximum seconds for agents to end once the run is over."""


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


class LauncherKind(Protocol):
    """Makes the launcher of a run."""

    def __call__(
        self,
        cluster: ClusterConfig,
        logs: Path,
        programs: Programs,
        *,
        labels: Sequence[str],
        on_status: Callable[[str], None],
        fail: Callable[[str], None],
    ) -> Launcher:
        """Return the launcher, whose processes have their output in the folder `logs`.

        `programs` are the modules that agents start, and `labels` resources that hosts
        should have. `on_status` receives lines for the user, and `fail` the reason why
        an agent cannot be started.
        """


def kind_of(cluster: ClusterConfig) -> LauncherKind | None:
    """Return the kind of launcher that the configuration names; None if the user starts
    the agents. Raises ConfigError as `announced` does.
    """
    name = cluster.launcher.partition(":")[0]
    if name in ("manual", "local"):
        return LocalLauncher if name == "local" else None
    found = announced(GROUP, name, field="cluster.launcher", distribution=DISTRIBUTION)
    return cast(LauncherKind, found)


class LocalLauncher:
    """Starts several agents on this machine, and divides its cores and GPUs among
    them.
    """

    def __init__(self, cluster: ClusterConfig, logs: Path, programs: Programs, **_: object) -> None:
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
        await end(list(self._agents.values()), CLOSE_S)

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


async def end(processes: Sequence[ChildProcess], within_s: float) -> None:
    """Wait until these processes have ended; kill those that take too long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await asyncio.gather(*(process.gone() for process in processes))
    for process in processes:
        process.kill()
    await asyncio.gather(*(process.gone() for process in processes))
