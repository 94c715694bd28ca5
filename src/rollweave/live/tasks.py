"""Every task of the live world has one owner: this group.

Invariants: a task that raises is our own bug and ends the whole group with that error; `cancel_all` ends every task and
leaves the group usable by nobody.
"""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self


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
        """Cancel every task, those that are spawned from now on too. The caller itself must not be one of them."""
        self._closing = True
        for task in list(self._live):
            task.cancel()

    def __len__(self) -> int:
        return len(self._live)

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._group.__aexit__(kind, error, traceback)
