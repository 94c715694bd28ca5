"""An engine in a thread of this process: for debugging, and for tests.

It shares the interpreter, and cannot be killed by force.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from rollweave.engine.clients.client import OpenLink
from rollweave.schema.serving import EngineCommand, EngineReply, EngineSpec, Shutdown

T = TypeVar("T")

JOIN_S = 5.0
"""Maximum seconds that the thread gets to finish its current step."""


class LoopLike(Protocol):
    """An engine on a thread (`engine/thread`)."""

    def post(self, command: EngineCommand) -> None:
        """Queue a command, from any thread."""

    def run(self) -> None:
        """Serve until `Shutdown`, on the calling thread."""


MakeLoop = Callable[[EngineSpec, Callable[[EngineReply], None]], LoopLike]


class ThreadLink:
    """`EngineLink` to a loop on a daemon thread.

    After `kill` its replies are ignored, even while it still computes.
    """

    def __init__(
        self,
        spec: EngineSpec,
        make_loop: MakeLoop,
        model_ready: asyncio.Future[None],
        on_reply: Callable[[EngineReply], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_reply, self._on_lost = on_reply, on_lost
        self._killed = False
        self._engine = make_loop(spec, self._from_thread)
        self._thread = threading.Thread(target=self._main, name=f"engine-{spec.id}", daemon=True)
        model_ready.add_done_callback(self._start)

    def send(self, command: EngineCommand) -> None:
        if not self._killed:
            self._engine.post(command)

    def kill(self) -> None:
        if not self._killed:
            self._killed = True
            self._engine.post(Shutdown())
            self._loop.call_soon(self._on_lost, "killed")

    async def wait_closed(self) -> None:
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, JOIN_S)

    def _start(self, _: asyncio.Future[None]) -> None:
        if not self._killed:
            self._thread.start()

    def _main(self) -> None:
        reason = "ended"
        try:
            self._engine.run()
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
        self._call(self._on_lost, reason)

    def _from_thread(self, reply: EngineReply) -> None:
        self._call(self._deliver, reply)

    def _deliver(self, reply: EngineReply) -> None:
        if not self._killed:
            self._on_reply(reply)

    def _call(self, function: Callable[[T], None], argument: T) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(function, argument)


def in_thread(
    spec: EngineSpec, make_loop: MakeLoop, *, model_ready: asyncio.Future[None]
) -> OpenLink:
    """Return how `EngineClient` starts an engine in a thread of this process, once
    `model_ready` is done.
    """
    return lambda on_reply, on_lost: ThreadLink(spec, make_loop, model_ready, on_reply, on_lost)
