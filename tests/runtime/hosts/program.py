"""A small process for the tests of hosts: it answers each frame, and obeys a few
words.
"""

import os
import signal
import sys

from rollweave.io.parent import Parent


def main() -> None:
    """Serve until the frame "end", or the end of the parent."""
    parent = Parent.from_arguments()
    print("begun", flush=True)
    frames = parent.queue()
    while True:
        match frames.get():
            case b"end":
                return
            case b"fail":
                print("a reason on standard error", file=sys.stderr, flush=True)
                os._exit(3)
            case b"die":
                os.kill(os.getpid(), signal.SIGKILL)
            case b"environment":
                names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "ROLLWEAVE_USER_CODE")
                parent.send(" ".join(os.environ.get(name, "-") for name in names).encode())
            case b"log":
                print("\x1b[2J\x9bred\r\n" + 400_000 * "line\n" + "last", flush=True)
                parent.send(b"logged")
            case b"large":
                parent.send(bytes(32 << 20))
            case b"directory":
                parent.send(os.getcwd().encode())
            case other:
                parent.send(b"echo " + other)


if __name__ == "__main__":
    main()
    os._exit(0)
