"""Supervise child processes: one living process per name, replaced by epochs. The
interface of all links to processes, and the common part of those to relays and to
rollout workers.

An epoch is one process from its start to its loss. Invariants: a process starts only
after the process of the former epoch is closed; every epoch ends in exactly one call of
`_on_lost`, unless the supervisor ended it on purpose. `ready` of a link raises once the
process is lost; `lost` is done, with the reason, once the process has ended, for
whatever reason, and is reaped.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rollweave.io.child import Spawn
from rollweave.io.wire import encode
from rollweave.record.trace import Trace
from rollweave.runtime.tasks import Tasks
from rollweave.schema.base import Struct
from rollweave.schema.errors import RollweaveError
from rollweave.schema.events import Event

R = TypeVar("R")


class Link(Protocol):
    """The link to a process, or to a thread in place of one.

    All calls belong to the event loop's thread; none blocks.
    """

    @property
    def lost(self) -> asyncio.Future[str]:
        """The reason of the loss; done once the process is gone."""

    def kill(self) -> None:
        """End the process now, without waiting; `lost` follows."""

    async def close(self) -> None:
        """Ask the process to end, kill it if it does not, and return once it is
        gone.
        """


class ProcessLink(Generic[R]):
    """The link to a process, to which the first frame is `spec`. The process reports
    by a message of type `R` that it is ready.

    A subclass handles the frames. `_timer` first bounds the start; the subclass
    restarts it to measure silence.
    """

    def __init__(
        self,
        kind: str,
        name: str,
        spec: Struct,
        *,
        spawn: Spawn,
        log: Path,
        start_s: float,
        stop: Struct,
        close_s: float,
        lost_error: type[RollweaveError],
    ) -> None:
        """Start the process, which must be ready within `start_s` seconds.

        The message `stop` asks it to end, which may take `close_s` seconds. `kind` and
        `name` identify it in errors. Raises OSError.
        """
        self._label, self._lost_error = f"{kind} {name}", lost_error
        self._stop, self._close_s = stop, close_s
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = self._loop.create_future()
        self._ready: asyncio.Future[R] = self._loop.create_future()
        self._reason = ""
        self._child = spawn(name=name, log=log, on_frame=self._on_frame, on_gone=self._on_gone)
        self._timer = self._loop.call_later(
            start_s, self._give_up, f"was not ready within {start_s:g} s"
        )
        self._child.send(encode(spec))

    @property
    def pid(self) -> int:
        return self._child.pid

    async def ready(self) -> R:
        return await asyncio.shield(self._ready)

    def kill(self) -> None:
        self._give_up("was killed")

    async def close(self) -> None:
        self._reason = self._reason or "was closed"
        self._child.send(encode(self._stop))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._close_s):
                await self._child.gone()
        self._child.kill()
        await self._child.gone()

    def _on_frame(self, payload: bytes) -> None:
        raise NotImplementedError

    def _give_up(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._child.kill()

    def _on_gone(self, reason: str) -> None:
        self._timer.cancel()
        own = f" {self._reason}" if self._reason else ""
        reason = f"{self._label}{own}: {reason}"
        if not self.lost.done():
            self.lost.set_result(reason)
        if not self._ready.done():
            self._ready.set_exception(self._lost_error(reason))
            self._ready.exception()  # mark it as retrieved: a waiter is not required


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


class Supervisor(Generic[S, R]):
    """The newest epoch of each process, by name. A subclass says how a process starts,
    and what its loss means.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._processes: dict[str, S] = {}
        self._ending: dict[str, S] = {}
        """The last epochs of removed processes, until they are closed."""

    async def _start(self, process: S) -> R:
        """Open the process's `link`, and wait until it is ready. What this raises
        (`RollweaveError`, `OSError`) counts as a loss.
        """
        raise NotImplementedError

    def _on_ready(self, process: S, ready: R) -> None:
        """Report the ready process."""

    async def _until_lost(self, process: S) -> str:
        """Wait until a ready process is gone, and return the reason."""
        assert process.link is not None, "it is ready"
        reason: str = await asyncio.shield(process.link.lost)
        return reason

    def _on_lost(self, process: S, error: Exception | str) -> None:
        """Report the loss of a process."""
        raise NotImplementedError

    def _begin(self, process: S) -> None:
        """Start an epoch, and kill the one that it replaces."""
        former = self._processes.get(process.name) or self._ending.get(process.name)
        self._processes[process.name] = process
        if former is not None:
            _retire(former)
        self._tasks.spawn(
            self._supervise(process, former), f"supervise {process.name}.{process.epoch}"
        )

    def _remove(self, name: str, *, in_order: bool = False) -> S | None:
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

    def _lose(self, process: S, error: Exception | str) -> None:
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
                self._lose(process, error)
                return
            self._on_ready(process, ready)
            self._lose(process, await self._until_lost(process))
        finally:
            if process.link is not None:
                process.link.kill()
            process.closed.set()
            if self._ending.get(process.name) is process:
                del self._ending[process.name]


class TracedSupervisor(Supervisor[S, R]):
    """A supervisor whose processes have lanes in the row `category` of the trace."""

    category: int

    def __init__(
        self,
        *,
        tasks: Tasks,
        post: Callable[[Event], None],
        clock: Callable[[], float],
        trace: Trace,
    ) -> None:
        super().__init__(tasks)
        self._post, self._clock, self._trace = post, clock, trace

    async def _start(self, process: S) -> R:
        process.started_at = self._clock()
        return await self._open(process)

    async def _open(self, process: S) -> R:
        """Open the process's `link`, as `_start` does."""
        raise NotImplementedError

    def _on_ready(self, process: S, ready: R) -> None:
        self._span(process.name, "start", process.started_at, epoch=process.epoch)

    def _on_lost(self, process: S, error: Exception | str) -> None:
        self._mark(process.name, "lost")

    def _span(self, lane: str, name: str, start: float, **details: Any) -> None:
        """Record in the trace what has lasted from `start` until now."""
        self._trace.span(self.category, lane, name, start, self._clock(), **details)

    def _mark(self, lane: str, name: str) -> None:
        """Record in the trace what happens now."""
        self._trace.instant(self.category, lane, name, self._clock())


def _retire(process: Supervised[Any]) -> None:
    process.retired = True
    if process.link is not None:
        process.link.kill()
