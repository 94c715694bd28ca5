"""Ctrl-C: quiet until something has been begun and after it is over, an orderly end between.

Imports nothing of ours: it is the first thing.
"""

import os
import signal

INTERRUPTED = 130
"""Exit code: what shells give to a program that Ctrl-C ended."""


def quiet() -> None:
    """Ctrl-C ends the program at once, without a word: nothing has been begun yet, or all is over."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the caller has it ignored
        signal.signal(signal.SIGINT, _leave)


def begun() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt again: there is something to end in order."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    os._exit(INTERRUPTED)
