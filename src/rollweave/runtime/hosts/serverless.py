"""The interface to a platform that executes serverless functions, and the functions of
a run that are deployed there (RollArt §5.3).

A platform is a distribution of its own: in this repository `rollweave-ray`, for Ray
Serve. It is announced by the entry point `DEFAULT` of the group `rollweave.serverless`,
which leads to a `Platform`.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol, cast

from rollweave.io.extras import announced
from rollweave.runtime.hosts import user_files
from rollweave.runtime.hosts.launchers import DISTRIBUTION
from rollweave.schema.config.engines import ClusterConfig
from rollweave.schema.config.root import RunConfig
from rollweave.schema.roles import DeployedFunction, DeployedRole

GROUP = "rollweave.serverless"

DEFAULT = "default"
"""Name of the entry point, since no setting chooses among platforms."""


class Platform(Protocol):
    """Deploys functions."""

    def __call__(
        self,
        functions: Sequence[DeployedFunction | DeployedRole],
        *,
        deploy_s: float,
        cluster: ClusterConfig | None,
        files: user_files.UserFiles,
        owner: str,
        log: Path,
        on_status: Callable[[str], None],
        on_lost: Callable[[str], None],
    ) -> AbstractAsyncContextManager[Mapping[str, str]]:
        """Deploy functions for the time of the context, which gets their URLs by their
        names: on the hosts of `cluster`, if the platform can use them, else on this
        machine. To start the platform, and to deploy, takes at most `deploy_s` seconds.

        A URL has a secret part. A POST of a `RewardCall` in JSON to that of a function
        is answered as `rewards.url` is; one of a `CallMethod`, with the header
        `IDEMPOTENCY_KEY`, to that of a role by `Returned` or `Raised`. `owner`
        distinguishes the functions of runs and programs, `files` are the user's
        modules, and `log` is a file for the output of the platform. `on_status`
        receives a line about what is under way, `on_lost` one if the platform is lost.

        Raises ConfigError.
        """


def platform(needing: str) -> Platform:
    """Return the platform, which `needing` needs. Raises ConfigError as `announced`
    does.
    """
    found = announced(
        GROUP, DEFAULT, field="serverless platform", distribution=DISTRIBUTION, needing=needing
    )
    return cast(Platform, found)


def check_platform(config: RunConfig) -> None:
    """Raise ConfigError if functions are to be deployed, and there is no platform."""
    for number, reward in enumerate(config.rewards):
        if reward.deployed:
            platform(f"rewards.{number}.run {reward.run} of a function")


def deployed(
    config: RunConfig,
    *,
    run_id: str,
    log: Path,
    on_status: Callable[[str], None],
    on_lost: Callable[[str], None],
) -> AbstractAsyncContextManager[Mapping[str, str]]:
    """Return a context in which the functions of a run are deployed, and which gets the
    URL of each by the name of its reward. Like `Platform`. Raises ConfigError.
    """
    functions = tuple(
        DeployedFunction(name=one.name, function=one.function, timeout_s=one.timeout_s)
        for one in config.rewards
        if one.deployed and one.function is not None
    )
    if not functions:
        return contextlib.nullcontext({})
    return platform("rewards.run serverless")(
        functions,
        deploy_s=config.watchdog.start_s,
        cluster=config.cluster,
        files=user_files.of_rewards(config),
        owner=run_id,
        log=log,
        on_status=on_status,
        on_lost=on_lost,
    )
