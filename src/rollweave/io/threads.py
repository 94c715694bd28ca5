"""Priorities of threads."""

import contextlib
import os
import threading

NICENESS = 10
"""Niceness of a thread that yields, in addition to the niceness of its process: the
thread gets a tenth of a core that another thread wants.
"""


def yield_to_others() -> None:
    """Lower the priority of this thread for good, on systems on which threads have
    priorities (Linux).
    """
    with contextlib.suppress(AttributeError, OSError):
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + NICENESS)
