"""Setup of a process at its start: reset inherited signals, and make the user's modules
importable.

A shell without job control starts background jobs with SIGINT and SIGQUIT ignored, and
supervisors and test runners block or ignore others; `exec` passes both on. Every entry
point calls `reset_signals` first. This module imports none of our modules, because it
runs before everything else. `sandbox/inside` has its own version, because this package
does not exist in sandboxes.
"""

import os
import signal
import sys
from collections.abc import Container

INTERRUPTED = 130
"""Exit status of a program that Ctrl-C ended, by the convention of shells."""

PYTHONS = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that the interpreter ignores by itself; `subprocess` restores them in
children.
"""


def reset_signals(*, keep: Container[int] = ()) -> None:
    """Give each ignored signal that is not in `keep` its default disposition, and
    unblock all signals. Must be called on the main thread.
    """
    for number in signal.valid_signals():
        if (
            number not in PYTHONS
            and number not in keep
            and signal.getsignal(number) is signal.SIG_IGN
        ):
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def import_from_working_directory() -> None:
    """Add the working directory to the import path, as in child processes, so that
    `package.module:Class` in a configuration may name a module in this directory.
    """
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
