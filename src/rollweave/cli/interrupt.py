"""Ctrl-C: quiet until something has been begun and after it is over, an orderly end
between.

Imports nothing that is slow, because it runs before everything else.
"""

import os
import signal

from rollweave.io.process_setup import reset_signals

INTERRUPTED = 130
"""Exit code: what shells give to a program that Ctrl-C ended."""


def enter() -> None:
    """Set the program's signals: SIGINT and SIGTERM end it however it was started,
    SIGHUP unless `nohup` ignores it.
    """
    reset_signals(keep=(signal.SIGHUP,))
    quiet()


def quiet() -> None:
    """Ctrl-C ends the program at once, without a word: nothing has been begun yet, or
    all is over.
    """
    # a program that calls us keeps its own
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def begun() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt again: there is something to end in
    order.
    """
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(*_: object) -> None:
    os._exit(INTERRUPTED)
