"""The process of one engine: `python -m rollweave.runtime.entrypoints.engine`, started
by `engine/clients/process.py`.

On a host that lends a serving engine, `LENT_SOCKET` is set, and the engine is in that
engine's process (`engine/coserving`): this one passes on frames, and ends with either
side.
"""

import contextlib
import os
import socket
import sys

from rollweave.io.parent import Parent
from rollweave.io.wire import FrameDecoder, decoder_of, encode, frame
from rollweave.schema.serving import LENT_SOCKET, EngineCommand, EngineReply, EngineSpec

RECEIVE_BYTES = 1 << 18

SWITCH_S = 0.0005
"""Python's switch interval, in seconds, in an engine that lends: the longest time for
which its computing thread waits for one that reads the weights of a run.
"""


def main() -> None:
    """Serve until `Shutdown`, or the end of the parent."""
    parent = Parent.from_arguments()
    payload = parent.receive()
    spec = decoder_of(EngineSpec)(payload)
    lender = os.environ.get(LENT_SOCKET)
    if lender and spec.lend is None:
        _borrow(lender, parent, payload)
        return
    decode = decoder_of(EngineCommand)

    def send(reply: EngineReply) -> None:
        parent.send(encode(reply))

    # torch takes seconds to import
    from rollweave.engine.coserving.executor import CoServing
    from rollweave.engine.loop import EngineLoop

    engine: EngineLoop | CoServing
    if spec.lend is None:
        engine = EngineLoop(spec, send)
    else:
        sys.setswitchinterval(SWITCH_S)
        engine = CoServing(spec, send)
    parent.listen(lambda payload: engine.post(decode(payload)))
    engine.run()


def _borrow(path: str, parent: Parent, spec: bytes) -> None:
    """Pass on frames between the parent and the engine that lends at `path`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError as error:
        print(f"EngineError: the engine that lends at {path}: {error}", file=sys.stderr)
        return

    def forward(payload: bytes) -> None:
        with contextlib.suppress(OSError):  # the loan is over, as `recv` notices
            connection.sendall(b"".join(frame(payload)))

    forward(spec)
    parent.listen(forward)
    decoder = FrameDecoder()
    with contextlib.suppress(OSError):
        while data := connection.recv(RECEIVE_BYTES):
            parent.send_all(decoder.feed(data))
    print("EngineError: the engine that lends has ended the loan", file=sys.stderr)


if __name__ == "__main__":
    main()
    # nothing outlives the process, and the interpreter would take a second to unload
    # torch
    os._exit(0)
