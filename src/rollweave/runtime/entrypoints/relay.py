"""The process of one relay: `python -m rollweave.runtime.entrypoints.relay`, started by
`runtime/supervisors/relays.py`.
"""

import asyncio
import os

from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.runtime.tasks import until_set
from rollweave.schema.weights import (
    HEARTBEAT_S,
    FetchVersion,
    RelayCommand,
    RelayHeartbeat,
    RelayReady,
    RelayReply,
    RelaySpec,
    ServePart,
    StopRelay,
)
from rollweave.weights.relay import Relay
from rollweave.weights.tcp import transport_of


async def serve(parent: Parent, spec: RelaySpec) -> None:
    """Serve until `StopRelay`, or the end of the parent."""
    loop = asyncio.get_running_loop()
    decode = decoder_of(RelayCommand)
    stopped = asyncio.Event()

    def send(message: RelayReply) -> None:
        parent.send(encode(message))

    relay = Relay(transport_of(spec.transport, host=spec.host), send)

    def execute(command: RelayCommand) -> None:
        match command:
            case StopRelay():
                stopped.set()
            case ServePart():
                relay.serve_part(command)
            case FetchVersion():
                relay.fetch(command)

    send(RelayReady(address=await relay.listen(spec.host)))

    def on_frame(payload: bytes) -> None:
        loop.call_soon_threadsafe(execute, decode(payload))

    parent.listen(on_frame)

    def beat() -> None:
        received, whole = relay.progress()
        send(RelayHeartbeat(received=received, whole=whole))

    await until_set(stopped, HEARTBEAT_S, beat)
    await relay.close()


def main() -> None:
    """Serve as the parent specifies."""
    parent = Parent.from_arguments()
    asyncio.run(serve(parent, decoder_of(RelaySpec)(parent.receive())))


if __name__ == "__main__":
    main()
    os._exit(0)  # nothing outlives the process
