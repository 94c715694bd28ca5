"""An engine in a separate process, on this host or another: its messages are frames
over the connection that `io/child.Spawn` opens.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from rollweave.engine.clients.client import OpenLink
from rollweave.io.child import Spawn
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.serving import EngineCommand, EngineReply, EngineSpec

_decode = decoder_of(EngineReply)


class ProcessLink:
    """`EngineLink` to a process, which receives an `EngineSpec` as its first frame."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        spawn: Spawn,
        log: Path,
        model_ready: asyncio.Future[None],
        on_reply: Callable[[EngineReply], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._on_reply = on_reply
        self._child = spawn(name=spec.id, log=log, on_frame=self._on_frame, on_gone=on_lost)
        model_ready.add_done_callback(lambda _: self._child.send(encode(spec)))

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, command: EngineCommand) -> None:
        self._child.send(encode(command))

    def kill(self) -> None:
        self._child.kill()

    async def wait_closed(self) -> None:
        await self._child.gone()

    def _on_frame(self, payload: bytes) -> None:
        self._on_reply(_decode(payload))


def in_process(
    spec: EngineSpec, *, spawn: Spawn, log: Path, model_ready: asyncio.Future[None]
) -> OpenLink:
    """Return how `EngineClient` starts an engine as a process.

    The process starts at once and takes seconds to import its modules; it loads its
    model once `model_ready` is done.
    """
    return lambda on_reply, on_lost: ProcessLink(
        spec,
        spawn=spawn,
        log=log,
        model_ready=model_ready,
        on_reply=on_reply,
        on_lost=on_lost,
    )
