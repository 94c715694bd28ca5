"""The task group that owns every task of a live world.

Invariants: an exception in a task is a bug of ours or a disk failure, and ends the
group with that exception; several exceptions end it with an exception group, except
that disk errors of several tasks are reported as one; `cancel_all` ends every task, and
each one that is spawned later.

Also what tasks of a world do by themselves: they draw tasks from task sources, which
are the user's code, and name long waits while they last (`core/policy/waiting` decides
when).
"""

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

from rollweave.core.policy.waiting import LongWaits, Wait, wait_lines
from rollweave.schema.commands import DrawTask
from rollweave.schema.errors import DiskError
from rollweave.schema.events import DrawFailed, GroupSubmitted
from rollweave.schema.text import shortened
from rollweave.schema.work import Purpose, Task

T = TypeVar("T")


class Tasks:
    """An `asyncio.TaskGroup` whose members can all be cancelled without an error."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._live: set[asyncio.Task[Any]] = set()
        self._closing = False

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `coroutine` as a task of this group."""
        task = self._group.create_task(coroutine, name=name)
        self._live.add(task)
        task.add_done_callback(self._live.discard)
        if self._closing:
            task.cancel()
        return task

    def cancel_all(self) -> None:
        """Cancel every task, and each one that is spawned from now on.

        The caller must not be one of them.
        """
        self._closing = True
        for task in list(self._live):
            task.cancel()

    def __len__(self) -> int:
        return len(self._live)

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._group.__aexit__(kind, error, traceback)
        except BaseExceptionGroup as group:
            same_cause = all(isinstance(raised, DiskError) for raised in group.exceptions)
            if len(group.exceptions) == 1 or same_cause:
                raise group.exceptions[0] from None
            raise


async def until_set(event: asyncio.Event, every_s: float, act: Callable[[], None]) -> None:
    """Call `act` now and every `every_s` seconds, until the event is set."""
    while not event.is_set():
        act()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(every_s):
                await event.wait()


def on_thread(call: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run the user's `call` on a daemon thread: if it never returns, it blocks neither
    the event loop nor the end of the process.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def deliver(settle: Callable[[], None]) -> None:
        if not result.done():
            settle()

    def work() -> None:
        try:
            value = call()
        except BaseException as raised:
            # a future cannot carry StopIteration
            error = (
                RuntimeError(f"StopIteration: {raised}")
                if isinstance(raised, StopIteration)
                else raised
            )
            settle: Callable[[], None] = lambda: result.set_exception(error)  # noqa: E731
        else:
            settle = lambda: result.set_result(value)  # noqa: E731
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(deliver, settle)

    threading.Thread(target=work, name=name, daemon=True).start()
    return result


CHECK_S = 1.0
"""Seconds between two checks of the waits."""


async def name_long_waits(
    waits: Callable[[], Iterable[Wait]],
    *,
    clock: Callable[[], float],
    report: Callable[[str, str], None],
) -> None:
    """Report the component and the line of each long wait, until this task is
    cancelled.
    """
    long_waits = LongWaits()
    while True:
        for component, line in wait_lines(long_waits.due(clock(), waits())):
            report(component, line)
        await asyncio.sleep(CHECK_S)


DRAW_S = 60.0
"""Maximum seconds to draw one task: a task source may download data, but must not stop
the run.
"""


class TaskDrawer:
    """Draws tasks on a thread, one at a time: a task source may be slow, and need not
    be thread-safe.
    """

    def __init__(
        self,
        draw: Callable[[str, int, Purpose], Task],
        *,
        tasks: Tasks,
        post: Callable[[GroupSubmitted | DrawFailed], None],
    ) -> None:
        """`draw(name, index, purpose)` returns task `index` of domain `name`."""
        self._draw_task, self._tasks, self._post = draw, tasks, post
        self._lock = asyncio.Lock()

    def draw(self, command: DrawTask) -> None:
        self._tasks.spawn(self._draw(command), f"draw {command.group_id}")

    async def _draw(self, command: DrawTask) -> None:
        async with self._lock:
            try:
                async with asyncio.timeout(DRAW_S):
                    draw = functools.partial(
                        self._draw_task, command.name, command.index, command.purpose
                    )
                    task = await on_thread(draw, f"draw {command.group_id}")
            except Exception as error:
                text = f"{command.name} #{command.index}: {type(error).__name__}: {error}"
                self._post(DrawFailed(group_id=command.group_id, error=shortened(text)))
                return
        self._post(GroupSubmitted(group_id=command.group_id, task=task))
