"""The first code of a child that `io/child.py` starts: it binds the child to its parent
before the imports, which take seconds.

Invariants: from here on the child ends with its parent, even while it is stopped,
because SIGKILL does not wait for it to continue; no signal is ignored or blocked
because the parent ignores or blocks it. No import here is slow.
"""

import ctypes
import gc
import os
import runpy
import signal
import sys

from rollweave.io.process_setup import reset_signals

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
ORPHANED = 75
"""Exit status of a child whose parent is gone (EX_TEMPFAIL)."""

COMMAND = (sys.executable, "-c", "from rollweave.io.boot import boot; boot()")
"""Command of a child; `-m <module> <fds> <our pid>` and the module's other arguments
follow. The descriptors are the socket and, if the connection has a seal, a pipe with
its keys.
"""


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
    the parent needs them. On systems other than Linux, the end of the socket has the
    same effect later.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(ORPHANED)
