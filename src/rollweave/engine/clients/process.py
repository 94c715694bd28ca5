"""An engine in a separate process, on this host or another: its messages are frames
over the connection that `io/child.Spawn` opens.
"""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from rollweave.engine.clients.client import OpenLink
from rollweave.io.child import Spawn
from rollweave.io.child import spawn as spawn_here
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.serving import EngineCommand, EngineReply, EngineSpec

_decode = decoder_of(EngineReply)


class ProcessLink:
    """`EngineLink` to `python -m module`, which receives an `EngineSpec` as its first
    frame.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        spawn: Spawn,
        module: str,
        log: Path,
        env: Mapping[str, str],
        model_ready: asyncio.Future[None],
        on_reply: Callable[[EngineReply], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._on_reply = on_reply
        self._child = spawn(
            name=spec.id, module=module, log=log, env=env, on_frame=self._on_frame, on_gone=on_lost
        )
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
    spec: EngineSpec,
    *,
    module: str,
    log: Path,
    env: Mapping[str, str],
    model_ready: asyncio.Future[None],
    spawn: Spawn = spawn_here,
) -> OpenLink:
    """Return how `EngineClient` starts an engine as a child process.

    The process starts at once and takes seconds to import its modules; it loads its
    model once `model_ready` is done.
    """
    return lambda on_reply, on_lost: ProcessLink(
        spec,
        spawn=spawn,
        module=module,
        log=log,
        env=env,
        model_ready=model_ready,
        on_reply=on_reply,
        on_lost=on_lost,
    )
