"""Runs a command of another interpreter as long as whoever started us holds our
standard input open.

Invariants: the command has a process group of its own, and nothing of that group is
left when we end; we end when the command does, or when the other end of our standard
input closes, which it does however our parent ends. Run as a file by an interpreter
that need not have this package, so only the standard library is here.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

GRACE_S = 5.0
"""Seconds that the command has to clear up what it shares (files in /dev/shm), and then
again its children.
"""


def main() -> None:
    """`python guard.py *arguments`: run `python *arguments`, and end with its exit
    status (128 and the signal's number).
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
    """Send a signal to all of the group; False where nobody is left of it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)
        return True
    return False


if __name__ == "__main__":
    main()
