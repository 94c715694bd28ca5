"""Reset what a process inherits from its parent and must not keep: ignored and blocked signals.

A shell without job control starts background jobs with SIGINT and SIGQUIT ignored, and supervisors and test runners block or
ignore others; `exec` passes both on. Every entry point calls `reset_signals` first. Imports none of our modules, because it
runs before everything else. `sandbox/inside` has its own version, because this package does not exist in sandboxes.
"""

import signal
from collections.abc import Container

PYTHONS = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that the interpreter ignores by itself; `subprocess` restores them in children."""


def reset_signals(*, keep: Container[int] = ()) -> None:
    """Give each ignored signal except those in `keep` its default disposition, and unblock all. For the main thread."""
    for number in signal.valid_signals():
        if number not in PYTHONS and number not in keep and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
