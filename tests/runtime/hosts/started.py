"""A process that was started on this host or another, with what it reports."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from rollweave.io.child import ChildProcess, Spawn
from rollweave.runtime.hosts.remote import RemoteHost
from rollweave.schema.hosts import Program, Share

PROGRAM = "tests.runtime.hosts.program"


class Started:
    """A process with what it has reported."""

    def __init__(self, start: Spawn, log: Path) -> None:
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        self.reasons: list[str] = []
        self.ended = asyncio.Event()
        self.log = log
        self.process: ChildProcess = start(
            name="one", log=log, on_frame=self._on_frame, on_gone=self._on_gone
        )

    def _on_frame(self, payload: bytes) -> None:
        assert not self.reasons, "no frame follows the end"
        self.frames.put_nowait(payload)

    def _on_gone(self, reason: str) -> None:
        self.reasons.append(reason)
        self.ended.set()

    async def ask(self, payload: bytes) -> bytes:
        self.process.send(payload)
        return await asyncio.wait_for(self.frames.get(), 30)

    async def end(self) -> str:
        await asyncio.wait_for(self.process.gone(), 30)
        assert len(self.reasons) == 1
        return self.reasons[0]


def on(host: RemoteHost) -> Spawn:
    """Return what starts the small program on a host."""
    return host.starting(Program.ROLE, Share(threads=3))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.01)
