"""The start of an SGLang server: `python sglang_launcher.py PARENT ARGUMENT…`.

This program runs in the interpreter of the user's SGLang, and imports nothing of
Rollweave, whose requirements are not installed there. Invariants: no process of the
server outlives the engine that started it, since SGLang's processes end with the first
one; every request needs the engine's token, which no command line shows.
"""

import ctypes
import os
import runpy
import signal
import sys

TOKEN = "ROLLWEAVE_SGLANG_TOKEN"
"""The environment variable with the token that requests must present."""

SERVER = "sglang.launch_server"
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
ORPHANED = 75  # as in io/boot


def main() -> None:
    """Run the server with the arguments behind the id of the process that starts it."""
    parent, *arguments = sys.argv[1:]
    end_with_parent(int(parent))
    token = os.environ[TOKEN]
    # the first is for requests, the second for the routes that change the server; a
    # token may begin with a hyphen
    sys.argv = [SERVER, *arguments, f"--api-key={token}", f"--admin-api-key={token}"]
    sys.path.pop(0)  # the folder of this file
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(ORPHANED)


if __name__ == "__main__":
    main()
