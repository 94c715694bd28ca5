"""The run's clock: seconds of life of this run, over all its lives.

Invariants: never goes back, whatever happens to the wall clock; a resumed run goes on
where its journal ends, and the time in which it was dead does not count.
"""

import time


class RunClock:
    """`now()` is `start` plus the seconds since this object was made."""

    def __init__(self, start: float = 0.0) -> None:
        self._start = start
        self._made = time.monotonic()

    def now(self) -> float:
        return self._start + (time.monotonic() - self._made)
