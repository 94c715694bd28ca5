"""Resolve the task of a request: from its payload, or drawn by the handler's own code.

Invariants: only one task is drawn at a time, also when the client has disconnected,
because task sources are not thread-safe; a draw that takes too long is abandoned.
"""

import asyncio
import functools

import msgspec

from rollweave.envs.tasks import TaskSource
from rollweave.runtime.tasks import DRAW_S, on_thread
from rollweave.schema.errors import ConfigError, RollweaveError
from rollweave.schema.packing import DEPTH, is_deep
from rollweave.schema.service import RequestedLimits, RolloutRequest
from rollweave.schema.work import Limits, Purpose, Task


class TaskResolver:
    def __init__(self, source: TaskSource) -> None:
        self._source = source
        self._drawing = asyncio.Lock()
        self._draws: set[asyncio.Task[Task]] = set()

    async def resolve(self, request: RolloutRequest) -> Task:
        """Return the task of `request`, with its limits.

        Raises ConfigError for a payload that is too deep or an index that cannot be
        drawn.
        """
        if request.payload is not None:
            if is_deep(request.payload):
                raise ConfigError(f"payload must be at most {DEPTH} levels deep")
            payload = msgspec.json.encode(request.payload).decode()
            task = self._source.task_of(request.handler, payload=payload, seed=request.seed)
        else:
            task = await self._draw_alone(request)
        return msgspec.structs.replace(task, limits=_tightened(task.limits, request.limits))

    async def _draw_alone(self, request: RolloutRequest) -> Task:
        """Draw the task while no other is drawn. If the client disconnects, the draw
        still finishes before the next one begins.
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
            # mark the exception as retrieved: the client may have disconnected
            drawing.exception()


def _tightened(limits: Limits, requested: RequestedLimits) -> Limits:
    """Return the handler's limits, lowered where the request asks for less."""
    lowered = {
        name: min(value, getattr(limits, name))
        for name in requested.__struct_fields__
        if (value := getattr(requested, name)) is not None
    }
    return msgspec.structs.replace(limits, **lowered)
