"""The process of a worker of one of the user's roles: `python -m
rollweave.runtime.entrypoints.role`, started by `runtime/roles/role.py`.
"""

import os
import sys

from rollweave.runtime.roles.serving import load, serve_worker

if __name__ == "__main__":
    serve_worker(load)
    # nothing outlives the process, and the interpreter may take long to unload
    sys.stdout.flush()
    os._exit(0)
