"""The process table of a run, as `rollweave train --dry-run` prints it."""

import itertools
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rollweave.runtime.preflight.layout import COMFORT, RELAY, Layout, Memory, Process
from rollweave.schema.hosts import Need
from rollweave.schema.text import human_bytes

BAR = 10
"""Number of characters of a bar that shows how full a memory is."""

UNKNOWN = "not known"


def show_layout(layout: Layout, console: Console) -> None:
    """Print the processes, the needs of one process of each kind, and how full each
    memory is.
    """
    known = all(process.host for process in layout.processes)
    _title(f"{len(layout.processes)} processes", console)
    console.print(_processes(layout))
    _title("memory of one process, estimated", console)
    console.print(_needs(layout))
    if layout.memories:
        _title("memory that all of them need", console)
        console.print(_memories(layout.memories))
        if any(need.in_turn for process in layout.processes for need in process.needs):
            console.print(
                "\n[dim]Engines and trainer ranks take turns: the larger of their needs counts.[/]"
            )
    console.print("\n[dim]Not included: environments, their sandboxes, and rewards.[/]")
    if not known:
        console.print(
            "[dim]The hosts of processes are known once hosts have joined; --hosts FILE "
            "describes them in advance.[/]"
        )


def _title(text: str, console: Console) -> None:
    console.print()
    console.print(Rule(f"[bold]{text}[/]", align="left", style="dim"))


def _processes(layout: Layout) -> Table:
    on_gpu = any(process.on_gpu for process in layout.processes)
    pools = any(process.pool for process in layout.processes)
    table = _table("host")
    table.add_column("process", overflow="fold")
    if pools:
        table.add_column("pool", overflow="fold")
    if on_gpu:
        table.add_column("devices", no_wrap=True)
        table.add_column("GPU memory", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    users = {
        (memory.host, memory.device.index): len(memory.users)
        for memory in layout.memories
        if memory.device is not None
    }
    host = None
    for alike in _alike(layout.processes):
        first, count = alike[0], len(alike)
        if host is not None and first.host != host:
            table.add_section()
        name = escape(first.host or UNKNOWN) if first.host != host else ""
        host = first.host
        row = [name, escape(_named(alike))]
        if pools:
            row.append(escape(first.pool) or "-")
        if on_gpu:
            shared = any(
                users.get((process.host, index), 0) > 1
                for process in alike
                for index in process.devices
            )
            in_turn = any(need.in_turn for need in first.needs)
            how = "in turn" if in_turn else "[yellow]shared[/]"
            row.append(f"{_devices(alike)} {how}" if shared else _devices(alike))
            row.append(_times(count, first.device_bytes))
        row.append(_times(count, first.host_bytes))
        table.add_row(*row)
    return table


def _needs(layout: Layout) -> Table:
    table = _table("process")
    table.add_column("where", no_wrap=True)
    table.add_column("each", justify="right", no_wrap=True)
    table.add_column("of which", overflow="fold")
    kinds: dict[tuple[str, int], list[Process]] = {}
    for process in layout.processes:
        kinds.setdefault((process.kind, process.group), []).append(process)
    for members in kinds.values():
        for on_device in (True, False):
            by_needs: dict[tuple[Need, ...], list[Process]] = {}
            for process in members:
                by_needs.setdefault(process.of(on_device=on_device), []).append(process)
            for needs, alike in by_needs.items():
                if len(needs) > 1:
                    table.add_row(
                        escape(_named(alike)),
                        "GPU" if on_device else "host",
                        human_bytes(sum(need.nbytes for need in needs if not need.at_restart)),
                        _Items([_item(need) for need in needs]),
                    )
    return table


def _item(need: Need) -> str:
    beside = " (beside engines, not in this sum)" if need.at_restart else ""
    return f"{need.what} {human_bytes(need.nbytes)}{beside}"


class _Items:
    """Items in as many lines as needed; no item is broken."""

    def __init__(self, items: Sequence[str]) -> None:
        self._items = [f"{item}," for item in items[:-1]] + [items[-1]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for item in self._items:
            if line and len(line) + 1 + len(item) > options.max_width:
                yield Text(line)
                line = item
            else:
                line = f"{line} {item}".strip()
        yield Text(line)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(len, self._items)), len(" ".join(self._items)))


def _memories(memories: Sequence[Memory]) -> Table:
    table = _table("host")
    table.columns[0].no_wrap = True
    table.add_column("memory", no_wrap=True)
    kinds = any(memory.device is not None and memory.device.kind for memory in memories)
    if kinds:
        table.add_column("kind", overflow="fold")
    table.add_column("needed of all", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    host = None
    for alike in _equal(memories):
        first = alike[0]
        if host is not None and first.host != host:
            table.add_section()
        row = [escape(first.host) if first.host != host else ""]
        host = first.host
        indices = [memory.device.index for memory in alike if memory.device is not None]
        row.append(_gpus(indices) if indices else "host")
        if kinds:
            row.append(escape(_kind(first)))
        color = "red" if first.share > 1 else "yellow" if first.share > COMFORT else "green"
        filled = min(BAR, round(first.share * BAR))
        row += [
            f"{human_bytes(first.needed)} of {human_bytes(first.nbytes) if first.nbytes else '?'}",
            f"[{color}]{'█' * filled}[/][dim]{'░' * (BAR - filled)}[/]",
            f"{first.share:.0%}" if first.nbytes else "?",
        ]
        table.add_row(*row)
    return table


def _kind(memory: Memory) -> str:
    return "" if memory.device is None else memory.device.kind.removeprefix("NVIDIA ")


def _table(first: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first, overflow="fold")
    return table


def _alike(processes: Iterable[Process]) -> Iterator[list[Process]]:
    """Group neighbors that differ only in their names and devices."""

    def key(process: Process) -> tuple[object, ...]:
        return (
            process.host,
            process.kind,
            process.pool,
            process.group,
            process.device_bytes,
            process.host_bytes,
        )

    return (list(group) for _, group in itertools.groupby(processes, key))


def _equal(memories: Iterable[Memory]) -> Iterator[list[Memory]]:
    """Group neighboring GPUs of a host that are equally full."""

    def key(memory: Memory) -> tuple[object, ...]:
        kind = memory.device.kind if memory.device is not None else None
        return memory.host, kind, memory.nbytes, memory.needed

    return (list(group) for _, group in itertools.groupby(memories, key))


def _named(processes: Sequence[Process]) -> str:
    kind = processes[0].kind
    names = [process.name for process in processes]
    if len(names) == 1:
        return f"{kind} {names[0]}".strip() if kind != RELAY else kind
    if kind == RELAY:
        return f"{len(names)} relays"
    return f"{kind}s {_ranges(names)}"


def _devices(processes: Sequence[Process]) -> str:
    return _gpus(sorted({index for process in processes for index in process.devices}))


def _gpus(indices: Sequence[int]) -> str:
    if not indices:
        return "-"
    return f"GPU{'s' if len(indices) > 1 else ''} {_ranges([str(index) for index in indices])}"


def _ranges(names: Sequence[str]) -> str:
    """Shorten names with consecutive numbers, such as `e0–e3, e7`."""
    runs: list[list[str]] = []
    for name in names:
        if runs and _follows(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def _follows(name: str, other: str) -> bool:
    """Return whether `other` has the next number after the same letters."""
    letters = name.rstrip("0123456789")
    digits = name.removeprefix(letters)
    return bool(digits) and other == f"{letters}{int(digits) + 1}"


def _times(count: int, nbytes: int) -> str:
    if not nbytes:
        return "-"
    return f"{count} × {human_bytes(nbytes)}" if count > 1 else human_bytes(nbytes)
