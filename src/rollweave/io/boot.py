"""The first moment of a child that `io/child.py` starts: bound to its parent before it
imports what takes seconds.

Invariants: from here on the child ends with its parent, even while it is stopped,
because SIGKILL does not wait for it to continue; no signal is ignored or blocked
because the parent ignores or blocks it. Imports nothing that is slow.
"""

import ctypes
import os
import runpy
import signal
import sys

from rollweave.io.process_setup import reset_signals

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
ORPHANED = 75
"""Exit status of a child whose parent is gone (EX_TEMPFAIL)."""

COMMAND = (sys.executable, "-c", "from rollweave.io.boot import boot; boot()")
"""To be followed by `-m <module> <socket fd> <our pid>` and the module's other
arguments.
"""


def boot() -> None:
    """Be what `python -m <module> …` would be, bound to the parent."""
    reset_signals()
    _, _, module, *arguments = sys.argv
    die_with(int(arguments[1]))
    sys.path[0] = os.getcwd()  # as `-m` has it: not wherever an environment may go
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def die_with(parent_pid: int) -> None:
    """Ask the kernel to kill us when our parent's thread ends, the one that started us;
    at once if that has happened.

    A parent starts its children on the thread of its event loop, which lives as long as
    it needs them. Elsewhere than on Linux the end of the socket does the same, later.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(ORPHANED)
