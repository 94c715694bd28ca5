"""The commands about what serves a run: `rollweave host` offers this host to the
controller, and `rollweave engines` lists, adds and removes engines of a run while it
trains.
"""

import asyncio
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.table import Table

from rollweave.cli.console import err, out
from rollweave.cli.runs import find_run
from rollweave.runtime.control import ask
from rollweave.runtime.hosts.agent import HostAgent, Permissions
from rollweave.runtime.hosts.cluster import SECRET_VARIABLE
from rollweave.runtime.hosts.hosts import resources
from rollweave.runtime.signals import on_ending_signals
from rollweave.schema.base import EngineId
from rollweave.schema.errors import ConfigError, HostError
from rollweave.schema.hosts import wrong_name
from rollweave.schema.status import (
    AddEngines,
    ControlReply,
    ControlRequest,
    ListEngines,
    WithdrawEngine,
)
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


def engines(
    name: str, *, add: int | None, group: int, remove: str | None, now: bool, as_json: bool
) -> None:
    """Send the request to the run, and print its engines.

    Raises ConfigError if the run refuses the request, or does not run.
    """
    if add is not None and remove is not None:
        raise ConfigError("--add and --remove must not be given together")
    if group and add is None:
        raise ConfigError("--group must be used with --add")
    if now and remove is None:
        raise ConfigError("--now must be used with --remove")
    request: ControlRequest = ListEngines()
    if add is not None:
        request = AddEngines(count=add, group=group)
    elif remove is not None:
        request = WithdrawEngine(engine_id=EngineId(remove), drain=not now)
    reply = ask(find_run(name).control, request)
    if as_json:
        out.print(msgspec.json.encode(reply).decode(), soft_wrap=True, markup=False)
    elif reply.added or not reply.error:
        _show(reply)
    if reply.error:
        option = "--add" if add is not None else "--remove"
        raise ConfigError(f"{option}: {reply.error}")


def _show(reply: ControlReply) -> None:
    if reply.added:
        out.print(f"{', '.join(reply.added)}: starting")
    grouped = any(line.group for line in reply.engines)
    placed = any(line.host is not None for line in reply.engines)
    split = any(line.phase != "both" for line in reply.engines)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in (
        "engine",
        "status",
        "version",
        "busy",
        *(["phase"] if split else []),
        *(["group"] if grouped else []),
        *(["host"] if placed else []),
    ):
        table.add_column(
            heading, justify="left" if heading in ("engine", "status", "phase") else "right"
        )
    for line in reply.engines:
        version = str(line.version) if line.version >= 0 else "-"
        busy = f"{line.busy} of {line.slots}" if line.slots else "-"
        more = [
            *([line.phase] if split else []),
            *([str(line.group)] if grouped else []),
            *([str(line.host)] if placed else []),
        ]
        table.add_row(line.id, line.status, version, busy, *more)
    out.print(table)
