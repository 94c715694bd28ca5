"""A child process that does nothing until it is killed. With an argument, it has a
child that does the same, and writes its id.
"""

import signal
import subprocess
import sys

if __name__ == "__main__":
    if len(sys.argv) > 3:
        print(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid)
        sys.stdout.flush()
    signal.pause()
