"""The task of a request: its payload, or drawn by the handler's own code.

Invariants: one task is drawn at a time, also when whoever asked has left: task sources
are not thread-safe; a draw that does not end is given up.
"""

import asyncio
import functools

import msgspec

from rollweave.envs.tasks import TaskSource
from rollweave.runtime.effects import DRAW_S
from rollweave.runtime.tasks import on_thread
from rollweave.schema.errors import ConfigError, RollweaveError
from rollweave.schema.packing import DEPTH, is_deep
from rollweave.schema.service import AskedLimits, RolloutRequest
from rollweave.schema.work import Limits, Purpose, Task


class Tasks:
    def __init__(self, source: TaskSource) -> None:
        self._source = source
        self._drawing = asyncio.Lock()
        self._draws: set[asyncio.Task[Task]] = set()

    async def of(self, request: RolloutRequest) -> Task:
        """Raises ConfigError for one that cannot be had."""
        if request.payload is not None:
            if is_deep(request.payload):
                raise ConfigError(f"payload must be at most {DEPTH} levels deep")
            payload = msgspec.json.encode(request.payload).decode()
            task = self._source.asked(request.handler, payload=payload, seed=request.seed)
        else:
            task = await self._drawn(request)
        return msgspec.structs.replace(task, limits=_bounded(task.limits, request.limits))

    async def _drawn(self, request: RolloutRequest) -> Task:
        """Drawn by the handler's own code, which is not thread-safe: a client that
        leaves does not let the next one in.
        """
        await self._drawing.acquire()
        drawing = asyncio.create_task(self._draw(request), name=f"draw {request.handler}")
        self._draws.add(drawing)
        drawing.add_done_callback(self._forget_draw)
        return await asyncio.shield(drawing)

    async def _draw(self, request: RolloutRequest) -> Task:
        assert request.index is not None, "index or payload"
        draw = functools.partial(self._source.draw, request.handler, request.index, Purpose.SERVE)
        try:
            async with asyncio.timeout(DRAW_S):
                return await on_thread(draw, f"draw {request.handler}")
        except TimeoutError as error:
            raise ConfigError(
                f"index must be of a task that is drawn within {DRAW_S:g} s, got {request.index}"
            ) from error
        except RollweaveError as error:
            raise ConfigError(
                f"index must be of a task that can be drawn, got {request.index}: {error}"
            ) from error
        finally:
            self._drawing.release()

    def _forget_draw(self, drawing: asyncio.Task[Task]) -> None:
        self._draws.discard(drawing)
        if not drawing.cancelled():
            drawing.exception()  # of whoever asked; who may have left


def _bounded(limits: Limits, asked: AskedLimits) -> Limits:
    """The handler's limits, where less was asked for that."""
    least = {
        name: min(value, getattr(limits, name))
        for name in asked.__struct_fields__
        if (value := getattr(asked, name)) is not None
    }
    return msgspec.structs.replace(limits, **least)
