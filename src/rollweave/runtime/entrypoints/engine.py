"""The process of one engine: `python -m rollweave.runtime.entrypoints.engine`, started
by `engine/clients/process.py`.
"""

import os

from rollweave.engine.loop import EngineLoop
from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.serving import EngineCommand, EngineReply, EngineSpec


def main() -> None:
    """Serve until `Shutdown`, or the end of the parent."""
    parent = Parent.from_arguments()
    spec = decoder_of(EngineSpec)(parent.receive())
    decode = decoder_of(EngineCommand)

    def send(reply: EngineReply) -> None:
        parent.send(encode(reply))

    engine = EngineLoop(spec, send)
    parent.listen(lambda payload: engine.post(decode(payload)))
    engine.run()


if __name__ == "__main__":
    main()
    # nothing outlives the process, and the interpreter would take a second to unload
    # torch
    os._exit(0)
