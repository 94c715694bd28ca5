"""A lender for tests: `python lending_program.py SOCKET PATIENCE_S` takes the baton as
often as it may. It writes a line as a rollout step begins, and the interval of the step
as it ends.
"""

import sys
import threading
import time

from rollweave_servers.baton import Baton


def main(path: str, patience_s: float) -> None:
    """Compute steps until standard input ends."""
    wake = threading.Condition()
    baton = Baton(path, patience_s=patience_s, wake=wake)
    sys.stdout.write("connected\n")
    sys.stdout.flush()
    while True:
        signals = baton.signals
        if baton.take() is None:
            with wake:
                if baton.signals == signals:
                    wake.wait(0.05)
            continue
        began = time.monotonic_ns()
        sys.stdout.write("step\n")
        sys.stdout.flush()
        time.sleep(0.003)
        sys.stdout.write(f"{began} {time.monotonic_ns()}\n")
        sys.stdout.flush()
        baton.release()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
