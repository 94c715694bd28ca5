"""Draw tasks from task sources, which are the user's code."""

import asyncio
import functools
from collections.abc import Callable

from rollweave.runtime.tasks import Tasks, on_thread
from rollweave.schema.commands import DrawTask
from rollweave.schema.events import DrawFailed, GroupSubmitted
from rollweave.schema.text import shortened
from rollweave.schema.work import Purpose, Task

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
