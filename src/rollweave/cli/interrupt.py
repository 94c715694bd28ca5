"""Ctrl-C: ends the program silently before a command begins and after the command has
ended, and in order while the command runs.

Imports nothing that is slow, because it runs before everything else.
"""

import os
import signal

from rollweave.io.boot import INTERRUPTED, reset_signals


def install_signals() -> None:
    """Set the program's signals, regardless of its parent's: SIGINT and SIGTERM end the
    program, and so does SIGHUP unless `nohup` ignores it.
    """
    reset_signals(keep=(signal.SIGHUP,))
    exit_on_interrupt()


def exit_on_interrupt() -> None:
    """Let Ctrl-C end the program immediately and silently, because no command runs."""
    # a program that calls us keeps its own handler
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, so that a command can end in order."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(*_: object) -> None:
    os._exit(INTERRUPTED)
