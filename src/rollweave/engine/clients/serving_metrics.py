"""The experience of a serving engine's clients, as metrics in Prometheus' text format.

`rollweave_serving_ttft_seconds` is the time from a request's arrival at the engine to
its first token, `_tpot_seconds` the mean time per further token, `_queue_seconds` the
time without a slot and, with `--prefill-at`, until the prompt's KV has arrived, and
`_request_seconds` the whole turn. All are histograms, so their percentiles over any
window are `histogram_quantile` of their rates.
"""

import bisect
import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rollweave.io.http.exposition import Sample
from rollweave.schema.serving import EngineStats, GenerateResult

BUCKETS: Final = tuple(
    round(scale * step, 4)
    for scale in (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)
    for step in (1.0, 1.5, 2.0, 3.0, 5.0, 7.5)
)
"""Upper bounds of the histograms, in seconds: a percentile that is read off them is at
most 1.7 times the true one.
"""


class Histogram:
    """Counts of values up to each of `BUCKETS`."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Count one value."""
        self._counts[bisect.bisect_left(BUCKETS, seconds)] += 1
        self._sum += seconds

    def samples(self, name: str) -> Iterator[Sample]:
        """Yield the samples of the histogram."""
        total = 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self._counts, strict=True):
            total += count
            yield Sample("histogram", f"{name}_bucket", total, {"le": bound})
        yield Sample("histogram", f"{name}_sum", self._sum)
        yield Sample("histogram", f"{name}_count", total)


@dataclass
class Outcome:
    """The end of a request: `answered`, `refused`, `failed` or `cancelled`.

    `sampled` is true once its turn is complete: a stream that has begun may still fail.
    """

    name: str = "cancelled"
    sampled: bool = False


class ServingMetrics:
    """The metrics of one engine's clients, since its server started."""

    def __init__(self) -> None:
        self._histograms = {name: Histogram() for name in ("ttft", "tpot", "queue", "request")}
        self._outcomes: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._in_flight = 0

    @contextlib.contextmanager
    def request(self) -> Iterator[Outcome]:
        """Count a request while it is in flight, and its outcome; one that leaves with
        an exception was cancelled.
        """
        self._in_flight += 1
        outcome = Outcome()
        try:
            yield outcome
        finally:
            self._in_flight -= 1
            self._outcomes[outcome.name] += 1

    def turn(self, result: GenerateResult, *, prompt_tokens: int, seconds: float) -> None:
        """Add a turn that took `seconds`."""
        count = len(result.tokens)
        self._histograms["queue"].add(result.queue_s)
        self._histograms["request"].add(seconds)
        if count:
            self._histograms["ttft"].add(result.first_token_s)
        if count > 1:
            self._histograms["tpot"].add(max(0.0, seconds - result.first_token_s) / (count - 1))
        self._tokens["prompt"] += prompt_tokens
        self._tokens["cached"] += result.cached_tokens
        self._tokens["output"] += count

    def samples(self, stats: EngineStats) -> Iterator[Sample]:
        """Yield the metrics, with a sample of the engine's state."""
        for name, histogram in self._histograms.items():
            yield from histogram.samples(f"serving_{name}_seconds")
        for outcome in ("answered", "refused", "failed", "cancelled"):
            labels = {"outcome": outcome}
            yield Sample("counter", "serving_requests_total", self._outcomes[outcome], labels)
        for kind in ("prompt", "cached", "output"):
            yield Sample("counter", "serving_tokens_total", self._tokens[kind], {"kind": kind})
        gauges: dict[str, float] = {
            "in_flight": self._in_flight,
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_used_tokens": stats.kv_used_tokens,
            "kv_total_tokens": stats.kv_total_tokens,
        }
        if stats.lending is not None:
            gauges["lent"] = int(stats.lending.lent)
            gauges["rollout_pages"] = stats.lending.rollout_pages
            delay_s = stats.lending.delay_s
            yield Sample("counter", "serving_rollout_delay_seconds_total", delay_s)
        for name, value in gauges.items():
            yield Sample("gauge", f"serving_{name}", value)
