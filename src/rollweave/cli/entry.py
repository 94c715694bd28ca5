"""Where the program `rollweave` begins. Imports nothing of ours at first, so that Ctrl-C is quiet from the first moment on."""

import os
import signal

INTERRUPTED = 130
"""Exit code: what shells give to a program that Ctrl-C ended."""


def leave(*_: object) -> None:
    """End at once: nothing has been begun yet."""
    os._exit(INTERRUPTED)


def main() -> None:
    """Run the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the caller has it ignored
        signal.signal(signal.SIGINT, leave)
    from rollweave.cli.main import app

    app()


def begun() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt again: there is something to end in order."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
