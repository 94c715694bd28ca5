"""Run a command of another interpreter for as long as the parent holds this process's
standard input open.

Invariants: the command has its own process group, and no process of that group survives
this process; this process ends when the command does, or when the other end of its
standard input closes, which happens however the parent ends. This file runs in an
interpreter that may lack this package, so it uses the standard library only.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

GRACE_S = 5.0
"""Seconds for the command to clean up shared files (in /dev/shm), and again for its
children.
"""


def main() -> None:
    """Run `python *arguments` and exit with its status (128 plus the signal's number):
    `python subprocess_guard.py *arguments`.
    """
    command = [sys.executable, *sys.argv[1:]]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_with_input, args=(process.pid,), daemon=True).start()
    status = process.wait()
    until = time.monotonic() + GRACE_S
    while _signalled(process.pid, signal.SIGTERM) and time.monotonic() < until:
        time.sleep(0.05)
    _signalled(process.pid, signal.SIGKILL)
    os._exit(status if status >= 0 else 128 - status)


def _end_with_input(group: int) -> None:
    sys.stdin.buffer.read()
    _signalled(group, signal.SIGTERM)
    time.sleep(GRACE_S)
    _signalled(group, signal.SIGKILL)


def _signalled(group: int, number: signal.Signals) -> bool:
    """Send a signal to the entire group. Returns False for an empty group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
        return True
    return False


if __name__ == "__main__":
    main()
