"""The process of one engine with an inference server: `python -m
rollweave.runtime.entrypoints.server_engine`, started by `engine/clients/client.py`.
"""

import asyncio
import os

from rollweave.engine.server_kinds import kind_of
from rollweave.io.parent import Outbox, Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.errors import ConfigError
from rollweave.schema.serving import EngineCommand, EngineFatal, EngineReply, EngineSpec


def main() -> None:
    """Serve until `Shutdown`, or the end of the parent."""
    parent = Parent.from_arguments()
    asyncio.run(_serve(parent, decoder_of(EngineSpec)(parent.receive())))


async def _serve(parent: Parent, spec: EngineSpec) -> None:
    loop, decode = asyncio.get_running_loop(), decoder_of(EngineCommand)
    commands: asyncio.Queue[EngineCommand] = asyncio.Queue()
    outbox = Outbox(parent)

    def send(reply: EngineReply) -> None:
        outbox.send(encode(reply))

    def receive(payload: bytes) -> None:
        loop.call_soon_threadsafe(commands.put_nowait, decode(payload))

    parent.listen(receive)
    assert spec.server is not None, "an engine without a server"
    try:
        await kind_of(spec.server.kind).serve(spec, commands, send)
    except ConfigError as error:  # this host may lack the kind's package
        send(EngineFatal(error=str(error)))
    outbox.close()


if __name__ == "__main__":
    main()
    os._exit(0)  # nothing outlives the process
