"""One request between `Add` and its result: what was sampled of it, and the time that it had a slot or waited for one.

Two clocks: waiting is counted on the engine's, having a slot on that of its steps, which stands still while the engine is
suspended. A turn's budget is time in a slot, so neither rank nor a change of weights ever costs a request its budget.
"""

import math

from rollweave.engine.detokenize import StopStrings
from rollweave.policy.batching import Entry
from rollweave.schema.serving import GenerateRequest, VersionSpan


class Live:
    """Made when its request is added, at `now`. `enter` and `leave` follow its slot."""

    __slots__ = (
        "_generate_s",
        "_queue_s",
        "_since",
        "_slot_since",
        "deadline",
        "entry",
        "limit",
        "logprobs",
        "prompt",
        "request",
        "served",
        "spans",
        "stop_ids",
        "watch",
    )

    def __init__(self, request: GenerateRequest, *, entry: Entry, limit: int, stop_ids: frozenset[int], now: float) -> None:
        self.request = request
        self.entry = entry
        self.limit = limit
        self.stop_ids = stop_ids
        self.prompt = len(request.tokens)
        self.logprobs: list[float] = []
        self.spans: list[tuple[int, int]] = []
        """(start, version) of each run of output tokens sampled by one version."""
        self.watch: StopStrings | None = None
        self.served = False
        """It has had a slot."""
        self.deadline = math.inf
        """When, on the clock of the steps, its budget ends if it keeps the slot that it has."""
        self._queue_s = self._generate_s = 0.0
        self._since = now
        self._slot_since: float | None = None

    def enter(self, now: float, step_clock: float) -> None:
        """It takes a slot."""
        self.served = True
        self._queue_s += now - self._since
        self._slot_since = step_clock
        if self.request.budget_s:
            self.deadline = step_clock + self.request.budget_s - self._generate_s

    def leave(self, now: float, step_clock: float) -> None:
        """It gave its slot up, and waits again."""
        self._generate_s = self.generate_s(step_clock)
        self._since, self._slot_since, self.deadline = now, None, math.inf

    def queue_s(self, now: float) -> float:
        """Seconds without a slot so far."""
        return self._queue_s + (now - self._since if self._slot_since is None else 0.0)

    def generate_s(self, step_clock: float) -> float:
        """Seconds in a slot so far, without those in which the engine was suspended."""
        return self._generate_s + (step_clock - self._slot_since if self._slot_since is not None else 0.0)

    def versions(self) -> tuple[VersionSpan, ...]:
        """Which version sampled what."""
        starts = [start for start, _ in self.spans]
        ends = [*starts[1:], len(self.logprobs)]
        return tuple(
            VersionSpan(start=start, end=end, version=version)
            for (start, version), end in zip(self.spans, ends[: len(starts)], strict=True)
        )
