"""The first steps of a process: reset inherited signals, make the user's modules
importable, and bind a child that `io/child.py` starts to its parent before the imports,
which take seconds.

A shell without job control starts background jobs with SIGINT and SIGQUIT ignored, and
supervisors and test runners block or ignore others; `exec` passes both on. Every entry
point calls `reset_signals` first. `rollweave_sandbox/inside` has its own version,
because this package does not exist in sandboxes.

Invariants: from `boot` on the child ends with its parent, even while it is stopped,
because SIGKILL does not wait for it to continue; no signal is ignored or blocked
because the parent ignores or blocks it. This module imports none of our modules,
because it runs before everything else, and no import here is slow.
"""

import ctypes
import gc
import os
import runpy
import signal
import sys
from collections.abc import Container

INTERRUPTED = 130
"""Exit status of a program that Ctrl-C ended, by the convention of shells."""

PYTHONS = (signal.SIGPIPE, signal.SIGXFSZ)
"""Signals that the interpreter ignores by itself; `subprocess` restores them in
children.
"""

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
ORPHANED = 75
"""Exit status of a child whose parent is gone (EX_TEMPFAIL)."""

COMMAND = (sys.executable, "-c", "from rollweave.io.boot import boot; boot()")
"""Command of a child; `-m <module> <fds> <our pid>` and the module's other arguments
follow. The descriptors are the socket and, if the connection has a seal, a pipe with
its keys.
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


def boot() -> None:
    """Run the module as `python -m <module> …` does, bound to the parent.

    Garbage is collected only after the module's imports (`io/parent.py`): traversing
    their objects again and again would take a sixth of its start.
    """
    gc.disable()
    reset_signals()
    _, _, module, *arguments = sys.argv
    die_with(int(arguments[1]))
    sys.path[0] = os.getcwd()  # as `-m` sets it, independent of later changes of directory
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def serve_parent(parent_pid: int) -> None:
    """Have this process, a worker in a pool of the parent, end with it, and leave
    Ctrl-C to it.
    """
    die_with(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when the parent's thread that started it ends.
    End immediately if the parent has ended already.

    A parent starts its children on the thread of its event loop, which lives as long as
    the parent needs them.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(ORPHANED)
