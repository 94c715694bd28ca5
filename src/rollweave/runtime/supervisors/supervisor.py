"""Supervise child processes: one living process per name, replaced by epochs.

An epoch is one process from its start to its loss. Invariants: a process starts only
after the process of the former epoch is closed; every epoch ends in exactly one call of
`on_lost`, unless the supervisor ended it on purpose.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rollweave.runtime.links.process import Link
from rollweave.runtime.tasks import Tasks
from rollweave.schema.errors import RollweaveError

L = TypeVar("L", bound=Link)


@dataclass(slots=True, eq=False, kw_only=True)
class Supervised(Generic[L]):
    """One epoch of a process."""

    name: str
    epoch: int
    link: L | None = None
    """None until the process is started."""
    started_at: float = 0.0
    """Run time at which the start began."""
    retired: bool = False
    """True once the supervisor ends the process on purpose, or has reported its
    loss.
    """
    closed: asyncio.Event = field(default_factory=asyncio.Event)


S = TypeVar("S", bound=Supervised[Any])
R = TypeVar("R")


class Supervisor(Generic[S, R]):
    """The newest epoch of each process, by name.

    `start` opens the process's `link` and waits until it is ready; what it raises
    (`RollweaveError`, `OSError`) counts as a loss. `watch` reports the ready process,
    waits for its loss and returns the reason. `on_lost` receives that error or reason.
    """

    def __init__(
        self,
        *,
        tasks: Tasks,
        start: Callable[[S], Awaitable[R]],
        watch: Callable[[S, R], Awaitable[str]],
        on_lost: Callable[[S, Exception | str], None],
    ) -> None:
        self._tasks, self._start, self._watch, self._on_lost = tasks, start, watch, on_lost
        self._processes: dict[str, S] = {}
        self._ending: dict[str, S] = {}
        """The last epochs of removed processes, until they are closed."""

    def __len__(self) -> int:
        return len(self._processes)

    def __iter__(self) -> Iterator[S]:
        return iter(list(self._processes.values()))

    def get(self, name: str) -> S | None:
        """Return the newest epoch of a process; None after `remove` and `close`."""
        return self._processes.get(name)

    def begin(self, process: S) -> None:
        """Start an epoch, and kill the one that it replaces."""
        former = self._processes.get(process.name) or self._ending.get(process.name)
        self._processes[process.name] = process
        if former is not None:
            _retire(former)
        self._tasks.spawn(
            self._supervise(process, former), f"supervise {process.name}.{process.epoch}"
        )

    def remove(self, name: str, *, in_order: bool = False) -> S | None:
        """Kill a process for good, or let it end `in_order`, and return its last
        epoch.
        """
        process = self._processes.pop(name, None)
        if process is None:
            return None
        if not process.closed.is_set():
            self._ending[name] = process
        if in_order and process.link is not None:
            process.retired = True
            self._tasks.spawn(process.link.close(), f"close {name}.{process.epoch}")
        else:
            _retire(process)
        return process

    def lose(self, process: S, error: Exception | str) -> None:
        """Report the loss of a process, unless its end is known already."""
        if not process.retired:
            process.retired = True
            self._on_lost(process, error)

    async def close(self) -> None:
        """End all processes, in order if they can."""
        processes = [*self._processes.values(), *self._ending.values()]
        self._processes.clear()
        for process in processes:
            process.retired = True
        await asyncio.gather(
            *(process.link.close() for process in processes if process.link is not None)
        )

    async def _supervise(self, process: S, former: S | None) -> None:
        """Run one epoch from its start to its loss."""
        try:
            if former is not None:
                await former.closed.wait()
            if process.retired:
                return
            try:
                ready = await self._start(process)
            except (RollweaveError, OSError) as error:
                self.lose(process, error)
                return
            self.lose(process, await self._watch(process, ready))
        finally:
            if process.link is not None:
                process.link.kill()
            process.closed.set()
            if self._ending.get(process.name) is process:
                del self._ending[process.name]


def _retire(process: Supervised[Any]) -> None:
    process.retired = True
    if process.link is not None:
        process.link.kill()


async def until_lost(link: Link) -> str:
    """Wait until the process is gone, and return the reason."""
    return await asyncio.shield(link.lost)
