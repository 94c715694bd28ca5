"""Ray Serve as the platform of serverless functions: `Platform` of Rollweave's
`runtime/hosts/serverless.py`.
"""

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from rollweave.core.policy.waiting import Wait
from rollweave.runtime.hosts import user_files
from rollweave.runtime.hosts.serverless import Platform
from rollweave.runtime.tasks import name_long_waits
from rollweave.schema.config.engines import ClusterConfig
from rollweave.schema.errors import ConfigError
from rollweave.schema.roles import DeployedFunction, DeployedRole
from rollweave_ray.driver import RayDriver
from rollweave_ray.launcher import address_of
from rollweave_ray.messages import DeployFunctions, DriverAnswer, DriverFailed, FunctionsDeployed

REMOVE_S = 20.0
"""Maximum seconds to remove the functions; then the process is killed."""


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
    """Deploy functions on the Ray cluster of `cluster`, if it is one, else on this
    machine. The platform is lost if the process that keeps the functions is.

    Raises ConfigError.
    """
    names = ", ".join(one.name for one in functions)
    on_status(f"deploying {names} on Ray Serve")
    archive = user_files.pack(files, ())
    ray = cluster if cluster is not None and cluster.on_ray else None
    command = DeployFunctions(
        address=None if ray is None else address_of(ray),
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
        on_lost=lambda reason: on_lost(f"{names}: the connection to Ray is lost: {reason}"),
    )
    try:
        match await _answer(driver, names, limit_s=deploy_s, on_status=on_status):
            case FunctionsDeployed(urls=urls):
                yield urls
            case DriverFailed(error=error):
                raise ConfigError(f"{names} must be deployed on Ray Serve: {error}")
            case answer:
                raise AssertionError(f"{answer} answers another command")
    finally:
        await driver.close(REMOVE_S)


async def _answer(
    driver: RayDriver, names: str, *, limit_s: float, on_status: Callable[[str], None]
) -> DriverAnswer:
    """Return the driver's answer, and name a long wait for it."""
    loop = asyncio.get_running_loop()
    wait = Wait(
        component=f"Ray Serve with {names}", what="starting", since=loop.time(), limit_s=limit_s
    )
    naming = loop.create_task(
        name_long_waits(lambda: [wait], clock=loop.time, report=lambda _, line: on_status(line)),
        name="name the wait for Ray Serve",
    )
    try:
        return await driver.answer(limit_s)
    finally:
        naming.cancel()


PLATFORM: Platform = on_ray_serve
