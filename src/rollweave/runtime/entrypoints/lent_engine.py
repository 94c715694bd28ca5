"""The process between a run and the engine that a host lends to it: `python -m
rollweave.runtime.entrypoints.lent_engine`, started by the agent of that host.

The engine is in the process of the serving engine (`engine/coserving`). This one passes
on frames, and ends with either side.
"""

import contextlib
import os
import socket
import sys

from rollweave.io.parent import Parent
from rollweave.io.wire import FrameDecoder, frame

RECEIVE_BYTES = 1 << 18


def main() -> None:
    """Pass on frames between the parent and the engine that lends at the socket of the
    command line.
    """
    parent = Parent.from_arguments()
    path = sys.argv[3]
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(path)
    except OSError as error:
        print(f"EngineError: the engine that lends at {path}: {error}", file=sys.stderr)
        return

    def forward(payload: bytes) -> None:
        with contextlib.suppress(OSError):  # the loan is over, as `recv` notices
            connection.sendall(b"".join(frame(payload)))

    parent.listen(forward)
    decoder = FrameDecoder()
    with contextlib.suppress(OSError):
        while data := connection.recv(RECEIVE_BYTES):
            parent.send_all(decoder.feed(data))
    print("EngineError: the engine that lends has ended the loan", file=sys.stderr)


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # nothing outlives the process
