"""Serverless functions of a run or a role: a child process deploys them on Ray Serve
before they are called, and removes them in the end.
"""

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from rollweave.core.policy.waiting import Wait
from rollweave.io.extras import how_to_install, missing_from
from rollweave.runtime.hosts import user_files
from rollweave.runtime.hosts.launchers import RayDriver
from rollweave.runtime.tasks import name_long_waits
from rollweave.schema.config.engines import ClusterConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.errors import ConfigError, FieldError
from rollweave.schema.roles import (
    DeployedFunction,
    DeployedRole,
    DeployFailed,
    DeployFunctions,
    FunctionsDeployed,
    RemoveFunctions,
)

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
