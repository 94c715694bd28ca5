"""The process of one engine: `python -m rollweave.runtime.entrypoints.engine`, started
by `engine/clients/client.py`.
"""

import os
import sys

from rollweave.io.extras import command
from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.serving import EngineCommand, EngineReply, EngineSpec

SWITCH_S = 0.0005
"""Python's switch interval, in seconds, in an engine that lends: the longest time for
which its computing thread waits for one that reads the weights of a run.
"""


def main() -> None:
    """Serve until `Shutdown`, or the end of the parent."""
    parent = Parent.from_arguments()
    spec = decoder_of(EngineSpec)(parent.receive())
    decode = decoder_of(EngineCommand)

    def send(reply: EngineReply) -> None:
        parent.send(encode(reply))

    # torch takes seconds to import
    from rollweave.engine.coserving.executor import CoServing
    from rollweave.engine.coserving.lender import LendingEngine
    from rollweave.engine.thread import EngineThread

    engine: EngineThread | LendingEngine
    if spec.lend is None:
        engine = EngineThread(spec, send)
    else:
        sys.setswitchinterval(SWITCH_S)
        engine = command("beside")(spec, send) if spec.lend.beside else CoServing(spec, send)
    parent.listen(lambda payload: engine.post(decode(payload)))
    engine.run()


if __name__ == "__main__":
    main()
    # nothing outlives the process, and the interpreter would take a second to unload
    # torch
    os._exit(0)
