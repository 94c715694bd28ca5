"""`rollweave engines`: lists, adds and removes engines of a run while it trains."""

import msgspec
from rich.table import Table

from rollweave.cli.console import out
from rollweave.cli.runs import find_run
from rollweave.runtime.control import ask
from rollweave.schema.base import EngineId
from rollweave.schema.control import (
    AddEngines,
    ControlReply,
    ControlRequest,
    ListEngines,
    WithdrawEngine,
)
from rollweave.schema.errors import ConfigError


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
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in (
        "engine",
        "status",
        "version",
        "busy",
        *(["group"] if grouped else []),
        *(["host"] if placed else []),
    ):
        table.add_column(heading, justify="left" if heading in ("engine", "status") else "right")
    for line in reply.engines:
        version = str(line.version) if line.version >= 0 else "-"
        busy = f"{line.busy} of {line.slots}" if line.slots else "-"
        more = [*([str(line.group)] if grouped else []), *([str(line.host)] if placed else [])]
        table.add_row(line.id, line.status, version, busy, *more)
    out.print(table)
