"""What a process inherits: signals that it must not keep ignored or blocked, and the
path to the user's modules.

A shell without job control starts background jobs with SIGINT and SIGQUIT ignored, and
supervisors and test runners block or ignore others; `exec` passes both on. Every entry
point calls `reset_signals` first. Imports none of our modules, because it runs before
everything else. `sandbox/inside` has its own version, because this package does not
exist in sandboxes.
"""

import os
import signal
import sys
from collections.abc import Container

PYTHONS = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that the interpreter ignores by itself; `subprocess` restores them in
children.
"""


def reset_signals(*, keep: Container[int] = ()) -> None:
    """Give each ignored signal except those in `keep` its default disposition, and
    unblock all. For the main thread.
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
    """Let `package.module:Class` in a configuration mean a module of the working
    directory, as in the child processes.
    """
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
