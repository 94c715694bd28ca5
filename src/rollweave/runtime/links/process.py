"""The interface of all links to processes, and the common part of those to relays and
to rollout workers: the start of a process that becomes ready, and its end.

Invariants: `ready` raises once the process is lost; `lost` is done, with the reason,
once the process has ended, for whatever reason, and is reaped.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from rollweave.io.child import Spawn
from rollweave.io.wire import encode
from rollweave.schema.base import Struct
from rollweave.schema.errors import RollweaveError

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
