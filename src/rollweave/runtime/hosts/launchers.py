"""Start the agents of a run in place of the user: on this machine, or on the nodes of a
Ray cluster; and deploy serverless functions of a run or a role on Ray Serve for the
time in which they are called. A child process is Ray's driver in both cases.

Invariants: an agent that ends before the run is started again; agents end with the
controller, even if it is killed.
"""

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollweave.core.policy.waiting import Wait
from rollweave.io.child import ChildProcess, spawn
from rollweave.io.extras import how_to_install, missing_from
from rollweave.io.wire import decoder_of, encode
from rollweave.runtime.hosts import user_files
from rollweave.runtime.hosts.hosts import LOOPBACK, resources
from rollweave.runtime.tasks import name_long_waits
from rollweave.schema.base import Struct
from rollweave.schema.config.engines import ClusterConfig
from rollweave.schema.config.root import RunConfig
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
from rollweave.schema.roles import (
    DeployedFunction,
    DeployedRole,
    DeployFailed,
    DeployFunctions,
    FunctionsDeployed,
    RemoveFunctions,
    ServeReport,
)

RETRY_S = 1.0
"""Seconds between the end of an agent on this machine and its next start."""

CLOSE_S = 10.0
"""Maximum seconds for agents to end once the run is over."""

RAY_CONNECT_S = 90.0
"""Maximum seconds to import Ray and to connect to its cluster."""


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


_decode = decoder_of(RayReport | ServeReport)


class RayDriver:
    """The process of Ray's driver (`runtime/entrypoints/ray`). This process itself does
    not connect to Ray, which would end it with its node.

    Its first report is the `answer`, or an instance of `failed` if the process is lost
    first; `on_report` receives further ones, and `on_lost` why a driver that has
    answered is lost.
    """

    def __init__(
        self,
        *,
        name: str,
        log: Path,
        command: Struct,
        failed: Callable[..., Any],
        on_report: Callable[[Any], None] = lambda _: None,
        on_lost: Callable[[str], None],
    ) -> None:
        """Start the process, and send it its first command."""
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._failed, self._on_report, self._on_lost = failed, on_report, on_lost
        self._closing = False
        self._process = spawn(
            name=name,
            module="rollweave.runtime.entrypoints.ray",
            log=log,
            env={},
            on_frame=self._on_frame,
            on_gone=self._on_gone,
        )
        self.send(command)

    def send(self, command: Struct) -> None:
        """Send a further command."""
        self._process.send(encode(command))

    async def close(self, stop: Struct, within_s: float) -> None:
        """Ask the process to end, and kill it if it does not."""
        self._closing = True
        self.send(stop)
        await end([self._process], within_s)

    def _on_frame(self, payload: bytes) -> None:
        report = _decode(payload)
        if self.answer.done():
            self._on_report(report)
        else:
            self.answer.set_result(report)

    def _on_gone(self, reason: str) -> None:
        if not self.answer.done():
            self.answer.set_result(self._failed(error=reason))
        elif not self._closing:
            self._on_lost(reason)


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
        self._driver = RayDriver(
            name="ray",
            log=self._logs / "ray.log",
            command=ConnectRay(address=self._cluster.ray),
            failed=RayFailed,
            on_report=self._on_report,
            on_lost=self._on_lost,
        )
        try:
            async with asyncio.timeout(RAY_CONNECT_S):
                answer = await self._driver.answer
        except TimeoutError:
            answer = RayFailed(error=f"no answer in {RAY_CONNECT_S:g} s")
        if isinstance(answer, RayConnected):
            return Reach(address=answer.address, hosts=answer.hosts)
        raise ConfigError(
            "cluster.launcher must name a Ray cluster that has a node on this machine, got "
            f"{self._cluster.ray}: {answer.error}"
        )

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
            await self._driver.close(StopAgents(), CLOSE_S)

    def _on_report(self, report: RayReport) -> None:
        match report:
            case AgentPending(host=host, reason=reason):
                self._on_status(f"host {host}: {reason}")
            case AgentEnded(host=host, error=error):
                self._fail(f"host {host}: {error}")

    def _on_lost(self, reason: str) -> None:
        self._fail(f"the connection to Ray is lost, and with it all hosts: {reason}")


async def end(processes: Sequence[ChildProcess], within_s: float) -> None:
    """Wait until these processes have ended; kill those that take too long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await asyncio.gather(*(process.gone() for process in processes))
    for process in processes:
        process.kill()
    await asyncio.gather(*(process.gone() for process in processes))


REMOVE_S = 20.0
"""Maximum seconds to remove the functions; then the process is killed."""


def check_platform(config: RunConfig) -> None:
    """Raise FieldError if functions are to be deployed, and Ray Serve is not
    installed.
    """
    for number, reward in enumerate(config.rewards):
        if reward.deployed and missing_from("serverless"):
            raise FieldError(
                f"rewards.{number}.run",
                f"be left out without Ray Serve ({how_to_install('serverless')})",
                f"{reward.run} of a function",
            )


@contextlib.asynccontextmanager
async def deployed(
    config: RunConfig,
    *,
    run_id: str,
    log: Path,
    on_status: Callable[[str], None],
    on_lost: Callable[[str], None],
) -> AsyncIterator[Mapping[str, str]]:
    """Deploy the functions of a run for the time of the context, which gets the URL of
    each by the name of its reward. Like `on_ray_serve`. Raises ConfigError.
    """
    functions = tuple(
        DeployedFunction(name=one.name, function=one.function, timeout_s=one.timeout_s)
        for one in config.rewards
        if one.deployed and one.function is not None
    )
    if not functions:
        yield {}
        return
    check_platform(config)
    async with on_ray_serve(
        functions,
        deploy_s=config.watchdog.start_s,
        cluster=config.cluster,
        files=user_files.of_rewards(config),
        owner=run_id,
        log=log,
        on_status=on_status,
        on_lost=on_lost,
    ) as urls:
        yield urls


@contextlib.asynccontextmanager
async def on_ray_serve(
    functions: Sequence[DeployedFunction | DeployedRole],
    *,
    deploy_s: float,
    cluster: ClusterConfig | None,
    files: user_files.UserFiles,
    owner: str,
    log: Path,
    on_status: Callable[[str], None],
    on_lost: Callable[[str], None],
) -> AsyncIterator[Mapping[str, str]]:
    """Deploy functions for the time of the context, which gets their URLs by their
    names: on the Ray cluster of `cluster`, if it is one, else on this machine. To start
    Ray and Ray Serve, and to deploy, takes at most `deploy_s` seconds.
    `on_status` receives a line about what is under way, `on_lost` one if the process
    that keeps the functions is lost.

    Raises ConfigError.
    """
    names = ", ".join(one.name for one in functions)
    on_status(f"deploying {names} on Ray Serve")
    archive = user_files.pack(files, ())
    ray = cluster if cluster is not None and cluster.on_ray else None
    command = DeployFunctions(
        address=None if ray is None else ray.ray,
        owner=owner,
        secret=secrets.token_urlsafe(16),
        functions=tuple(functions),
        archive=archive,
        digest=hashlib.sha256(archive).digest(),
        # agents reserve all CPUs of the nodes that they are on
        cpus=0.0 if ray is not None and ray.hosts is None else 1.0,
    )
    driver = RayDriver(
        name="serverless",
        log=log,
        command=command,
        failed=DeployFailed,
        on_lost=lambda reason: on_lost(f"{names}: the connection to Ray is lost: {reason}"),
    )
    try:
        report = await _answer(driver, names, limit_s=deploy_s, on_status=on_status)
        if isinstance(report, DeployFailed):
            raise ConfigError(f"{names} must be deployed on Ray Serve: {report.error}")
        yield report.urls
    finally:
        await driver.close(RemoveFunctions(), REMOVE_S)


async def _answer(
    driver: RayDriver, names: str, *, limit_s: float, on_status: Callable[[str], None]
) -> FunctionsDeployed | DeployFailed:
    """Return the answer about the functions, or a failure after `limit_s` seconds. A
    long wait is named.
    """
    loop = asyncio.get_running_loop()
    wait = Wait(
        component=f"Ray Serve with {names}", what="starting", since=loop.time(), limit_s=limit_s
    )
    naming = loop.create_task(
        name_long_waits(lambda: [wait], clock=loop.time, report=lambda _, line: on_status(line)),
        name="name the wait for Ray Serve",
    )
    try:
        async with asyncio.timeout(limit_s):
            answer: FunctionsDeployed | DeployFailed = await driver.answer
            return answer
    except TimeoutError:
        return DeployFailed(error=f"no answer in {limit_s:g} s")
    finally:
        naming.cancel()
