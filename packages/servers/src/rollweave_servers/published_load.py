"""The load that a serving engine beside the lender has published, as the admission of
rollouts sees it, and the profile that the engine's own steps yield.

A server is not measured before it serves: its users' steps are its profile. Before the
first of them, a prompt of `FIRST_PROMPT` tokens is assumed to take half of the limit of
the time to the first token, and a decode step half of the limit per token.
"""

import math
import statistics
from collections import deque

from rollweave.core.policy.admission import (
    FIRST_MARGIN,
    Admission,
    Curve,
    Decoding,
    Profile,
    Slo,
)
from rollweave.engine.batching import StepWork
from rollweave.engine.coserving.serving_load import FIRST_PROMPT, ServingLoad
from rollweave_servers.lending.rollweave_lending import Row, Snapshot, Step

FIRST_STEPS = 8
"""Number of an engine's first steps that do not count: kernels are compiled in them."""

KEPT = 32
"""Number of the latest steps of a size, of which the median counts."""

ASSUMED = 0.5
"""Share of a limit that serving is assumed to need before any of its steps was seen."""


class _Measured:
    """Seconds by size, from steps that were seen, or assumed ones before the first."""

    def __init__(self, size: int, assumed_s: float) -> None:
        self._first = (size, assumed_s)
        self._seconds: dict[int, deque[float]] = {}
        """The latest seconds of each power of two, up to the next one."""

    def __bool__(self) -> bool:
        return bool(self._seconds)

    def add(self, size: int, seconds: float) -> None:
        """Add a step. It counts as one of the largest power of two up to its size."""
        self._seconds.setdefault(1 << (size.bit_length() - 1), deque(maxlen=KEPT)).append(seconds)

    def curve(self) -> Curve:
        """Return the medians. No size takes less time than a smaller one."""
        points, least = [], 0.0
        for size, seconds in sorted(self._seconds.items()):
            least = max(least, statistics.median(seconds))
            points.append((size, least))
        return Curve(tuple(points) or (self._first,))


class PublishedLoad:
    """The latest snapshot of a serving engine, and what its steps have shown. It
    computes prompts in chunks of up to `chunk_tokens`.
    """

    def __init__(self, slo: Slo, *, chunk_tokens: int) -> None:
        self._slo = slo
        self._serving = ServingLoad()
        self.busy_s = 0.0
        """Seconds of the steps that were seen, of all engines."""
        self.begin(chunk_tokens=chunk_tokens)

    def begin(self, *, chunk_tokens: int) -> None:
        """Forget what the steps have shown: the next snapshots are another engine's."""
        self._chunk_tokens = chunk_tokens
        self._rows: list[Row] | None = []
        self._done = 0
        ttft_s, tpot_s = (min(limit, 1e6) for limit in (self._slo.ttft_s, self._slo.tpot_s))
        self._prefill = _Measured(FIRST_PROMPT, ASSUMED * ttft_s / FIRST_MARGIN)
        self._decode = _Measured(1, ASSUMED * tpot_s)
        self._note_profile()

    def _note_profile(self) -> None:
        prefill = self._prefill.curve()
        self.profile = Profile(mono=prefill, chunked=prefill, decode=self._decode.curve())

    @property
    def serves(self) -> bool:
        """True if the engine has requests."""
        return self._rows is None or bool(self._rows)

    def observe(self, snapshot: Snapshot, admission: Admission | None) -> None:
        """Learn from a snapshot, and correct the estimates of `admission`."""
        self._rows = snapshot.rows
        first = snapshot.done - len(snapshot.steps)
        fresh = [
            step
            for number, step in enumerate(snapshot.steps, first)
            if number >= max(self._done, FIRST_STEPS)
        ]
        self._done = snapshot.done
        for step in fresh:
            self._learn(step)
        if fresh:
            self._note_profile()
        if admission is not None:
            admission.profile = self.profile
            for step in fresh:
                self._serving.measured(admission, _work(step), step.ns / 1e9)

    def _learn(self, step: Step) -> None:
        seconds = step.ns / 1e9
        self.busy_s += seconds
        if not step.prefill_tokens:
            self._decode.add(step.decode, seconds)
            return
        if step.decode and self._decode:
            seconds -= self._decode.curve().seconds(step.decode)
        if seconds > 0:
            self._prefill.add(step.prefill_tokens, seconds)

    def slack(self, admission: Admission, now: float) -> float:
        """Return the smallest slack of all requests and of one that arrives now."""
        if self._rows is None:
            return -math.inf
        requests = [(row.arrived / 1e9, row.missing, _decoding(row)) for row in self._rows]
        return self._serving.slack_of(requests, admission, now, chunk_tokens=self._chunk_tokens)

    def longest_s(self, admission: Admission) -> float:
        """Return the seconds that the prompt of the next request may take."""
        return self._serving.longest_s(admission)


def _decoding(row: Row) -> Decoding | None:
    if not row.tokens:
        return None
    return Decoding(first=row.first / 1e9, newest=row.newest / 1e9, tokens=row.tokens)


def _work(step: Step) -> StepWork:
    return StepWork(
        prefill_tokens=step.prefill_tokens,
        prefill_context=0,
        decode=step.decode,
        decode_context=0,
        longest_prompt=step.longest_prompt,
    )
