"""The first program in a sandbox: it sets per-process limits, then runs the server.
Needs Python 3.9 and its standard library alone.

`python3 -I -S boot.py LIMITS WORKDIR SERVER ARGUMENT…`: LIMITS is JSON, SERVER a folder
that can be run. A back end that sets the limits before any program of the image runs
passes no limits here.
"""

import json
import os
import resource
import runpy
import sys

_PR_SET_DUMPABLE = 4


def limit(limits: "dict[str, int]") -> None:
    """Set each limit, soft and hard, to the smaller of the value and the present hard
    limit.
    """
    for name, value in {**limits, "CORE": 0}.items():
        which = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(which)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (least, least))


def hide() -> None:
    """Prevent programs that the server starts from reading or changing the server's
    memory and descriptors through /proc.
    """
    try:
        import ctypes
    except ImportError:  # without ctypes in the image's Python, prctl cannot be called
        return
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


if __name__ == "__main__":
    limit(json.loads(sys.argv[1]))
    hide()
    os.makedirs(sys.argv[2], exist_ok=True)
    os.chdir(sys.argv[2])
    sys.argv = sys.argv[3:]
    runpy.run_path(sys.argv[0], run_name="__main__")
