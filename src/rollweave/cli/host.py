"""`rollweave host`: offers this host to the controller of a run."""

import asyncio
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollweave.cli.console import err
from rollweave.runtime.hosts.agent import HostAgent, Permissions
from rollweave.runtime.hosts.cluster import SECRET_VARIABLE
from rollweave.runtime.hosts.hosts import resources
from rollweave.runtime.signals import on_ending_signals
from rollweave.schema.errors import ConfigError, HostError
from rollweave.schema.hosts import wrong_name
from rollweave.schema.text import whole


@dataclass(frozen=True, kw_only=True)
class Joining:
    """The options of `rollweave host`. `option` is the name of the controller's
    address.
    """

    controller: str
    name: str | None
    address: str | None
    secret_file: Path | None
    labels: Sequence[str]
    join_s: float
    permissions: Permissions = field(default_factory=Permissions)
    option: str = "--join"


def host(joining: Joining) -> None:
    """Serve the run until it is over, or until SIGINT or SIGTERM.

    Raises ConfigError for wrong options, and for a host that the controller refuses.
    """
    agent = agent_for(joining)
    try:
        asyncio.run(_until_signal(agent))
    except HostError as error:
        raise ConfigError(str(error)) from None


def agent_for(joining: Joining) -> HostAgent:
    """Return the agent of this host. Raises ConfigError for wrong options."""
    name = joining.name or socket.gethostname()
    if wrong := wrong_name(name):
        raise ConfigError(f"--name {wrong}")
    return HostAgent(
        name=name,
        controller=_address(joining.controller, joining.option),
        secret=_secret(joining.secret_file),
        resources=resources(_labels(joining.labels)),
        join_s=joining.join_s,
        address=joining.address,
        permissions=joining.permissions,
        on_change=lambda line: err.print(line, markup=False, soft_wrap=True),
    )


async def _until_signal(agent: HostAgent) -> None:
    serving = asyncio.ensure_future(agent.run())
    with on_ending_signals(serving.cancel):
        try:
            await serving
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None


def _address(text: str, option: str) -> tuple[str, int]:
    name, _, digits = text.rpartition(":")
    port = whole(digits)
    if not name or not port or port >= 1 << 16:
        raise ConfigError(f"{option} must be HOST:PORT of the controller, got {text}")
    return name.strip("[]"), port


def _secret(file: Path | None) -> bytes:
    if file is None:
        text, field = os.environ.get(SECRET_VARIABLE, ""), SECRET_VARIABLE
    else:
        field = f"--secret-file {file}"
        try:
            text = file.read_text()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{field} must be a readable file: {error}") from None
    if not text.strip():
        raise ConfigError(f"{field} must hold the secret of the run, got nothing")
    return text.strip().encode()


def _labels(texts: Sequence[str]) -> dict[str, float]:
    labels: dict[str, float] = {}
    for text in texts:
        name, limited, count = text.partition("=")
        try:
            labels[name] = float(count) if limited else math.inf
        except ValueError:
            labels[name] = 0
        if not name or not (0 < labels[name] < math.inf or not limited):
            raise ConfigError(f"--resource must be NAME or NAME=COUNT, got {text}")
    return labels
