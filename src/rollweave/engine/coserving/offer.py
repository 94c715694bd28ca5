"""The offer of a serving engine to a run: its use of KV memory over the last hour, by
which the run chooses among engines (ROSE §4), and whether the run must give it back.
"""

from collections import deque

from rollweave.schema.hosts import LenderState
from rollweave.schema.serving import EngineStats

WINDOW_S = 3600.0
"""Seconds over which the use of KV memory is averaged."""

BUCKET_S = 10.0
"""Seconds of samples that are kept as one mean."""

BUSY_S = 60.0
"""Seconds over which a high use of KV memory recalls the engine, and a low use offers
it again.
"""

BUSY_USE, IDLE_USE = 0.8, 0.4
"""Mean shares of KV memory over `BUSY_S` above which the engine is recalled, and below
which it is offered again. The paper gives no numbers: these are our choice.
"""


class Offer:
    """The offer of one engine, from samples of its state."""

    def __init__(self) -> None:
        self._means: deque[tuple[float, float, int]] = deque()
        """Time of the first sample, sum and number of samples of each `BUCKET_S`."""
        self._takes = True
        self._busy = self._taken_back = False

    def observe(self, now: float, stats: EngineStats) -> None:
        """Add a sample of the engine's state at `now` (seconds of any clock)."""
        use = min(1.0, stats.kv_used_tokens / max(1, stats.kv_total_tokens))
        if not self._means or now - self._means[-1][0] >= BUCKET_S:
            self._means.append((now, use, 1))
        else:
            began, total, count = self._means[-1]
            self._means[-1] = (began, total + use, count + 1)
        while now - self._means[0][0] > WINDOW_S:
            self._means.popleft()
        self._takes = stats.lending is None or stats.lending.budget_pages > 0
        if now - self._means[0][0] >= BUSY_S - BUCKET_S:
            recent = self._mean(now - BUSY_S)
            self._busy = recent > (IDLE_USE if self._busy else BUSY_USE)

    def recall(self) -> None:
        """Take the engine back for good."""
        self._taken_back = True

    def state(self) -> LenderState:
        """Return what the run is told."""
        return LenderState(
            kv_use=self._mean(-float("inf")),
            takes=self._takes,
            recalled=self._busy or self._taken_back,
        )

    def _mean(self, since: float) -> float:
        """Return the mean use of the samples since then; 0 without samples."""
        means = [(total, count) for began, total, count in self._means if began >= since]
        return sum(total for total, _ in means) / max(1, sum(count for _, count in means))
