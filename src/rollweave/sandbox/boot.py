"""The first program in a sandbox: take the limits of a process upon us, then become the server. Python 3.9, stdlib alone.

`python3 -I boot.py LIMITS WORKDIR SERVER ARGUMENT…`: LIMITS is JSON, SERVER a folder that can be run. The limits are set
inside, because the number of processes counts per user namespace, and inherited by all that the server starts.
"""

import json
import os
import resource
import runpy
import sys


def limit(limits: "dict[str, int]") -> None:
    """Set each limit, soft and hard, to the value or the hard limit that there is already."""
    for name, value in {**limits, "CORE": 0}.items():
        which = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(which)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (least, least))


def volunteer_for_oom() -> None:
    """Where the machine's memory ends all the same, the kernel shall end a sandbox first."""
    try:
        with open("/proc/self/oom_score_adj", "w") as out:
            out.write("1000")
    except OSError:
        pass  # a /proc that cannot be written: the machine is no worse off than before


if __name__ == "__main__":
    limit(json.loads(sys.argv[1]))
    volunteer_for_oom()
    os.makedirs(sys.argv[2], exist_ok=True)
    os.chdir(sys.argv[2])
    sys.argv = sys.argv[3:]
    runpy.run_path(sys.argv[0], run_name="__main__")
