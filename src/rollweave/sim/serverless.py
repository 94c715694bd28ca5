"""Instances that compute rewards, one call at a time: on a serverless platform they
start on demand and stop after an idle period; dedicated ones are always there.
"""

import heapq
from typing import Protocol

COLD_S = 2.7
"""Seconds that a first call waits for its instance: 2.2 to 3.2 s measured with Ray
Serve 2.60 from zero, without a model to load.
"""

WARM_S = 0.0045
"""Seconds that a call to a running instance takes beyond its work: 4 to 5 ms measured
there.
"""

KEEP_S = 60.0
"""Seconds for which an idle instance is kept. Assumption: the shortest period that
common platforms offer.
"""


class Judges(Protocol):
    """Instances that compute rewards; issue `call`s in the order of time."""

    def call(self, now: float, seconds: float) -> float:
        """Begin a call that works for `seconds`.

        Returns the seconds until its answer.
        """

    def utilization(self) -> float:
        """Return the share of the instances' time in which they worked."""


class Dedicated:
    """A fixed number of instances; calls wait for a free one in the order of time."""

    def __init__(self, count: int) -> None:
        self._free_at = [0.0] * count
        self._busy_s = 0.0

    def call(self, now: float, seconds: float) -> float:
        """Begin a call that works for `seconds`.

        Returns the seconds until its answer.
        """
        end = max(now, self._free_at[0]) + seconds
        heapq.heapreplace(self._free_at, end)
        self._busy_s += seconds
        return end - now

    def utilization(self) -> float:
        """Return the share of the time until the last answer in which they worked."""
        until = max(self._free_at)
        return self._busy_s / (until * len(self._free_at)) if until else 0.0


class Serverless:
    """A pool of instances; issue `call`s in the order of time.

    `busy_s` over `alive_s` is the utilization of the instances.
    """

    def __init__(self) -> None:
        self._idle: list[float] = []  # start of each instance's idleness, ascending
        self._ends: list[float] = []  # end times of running calls
        self.busy_s = self.alive_s = 0.0
        self.cold = self.warm = 0

    def call(self, now: float, seconds: float) -> float:
        """Begin a call that works for `seconds`.

        Returns the seconds until its answer.
        """
        for end in [end for end in self._ends if end <= now]:
            self._ends.remove(end)
            self._idle.append(end)
        self._idle.sort()
        while self._idle and now - self._idle[0] > KEEP_S:
            del self._idle[0]
            self.alive_s += KEEP_S
        if self._idle:
            self.alive_s += now - self._idle.pop()
            self.warm += 1
            wait = WARM_S + seconds
        else:
            self.cold += 1
            wait = COLD_S + seconds
        self.busy_s += seconds
        self.alive_s += wait
        self._ends.append(now + wait)
        return wait

    def utilization(self) -> float:
        """Return the share of the instances' time in which they worked; each is kept
        for `KEEP_S` after its last call.
        """
        alive = self.alive_s + KEEP_S * (len(self._idle) + len(self._ends))
        return self.busy_s / alive if alive else 0.0
