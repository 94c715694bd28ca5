"""Bench `coserve`: its load, and what is computed from what was measured."""

import math

import pytest

from packages.sim.benchmarks.coserve import figures
from packages.sim.benchmarks.coserve.bench import BURST_FROM_S
from packages.sim.benchmarks.coserve.load import (
    BURST,
    LoadReport,
    Served,
    Watched,
    bursty,
    with_burst,
)
from rollweave_sim.traffic import SECOND_PEAKS


def test_a_bursty_load_has_its_mean_and_its_peaks() -> None:
    seconds, rate = 3000.0, 4.0
    times = [one.at for one in bursty(rate, seconds, seed=0)]
    assert times == sorted(times)
    assert len(times) / seconds == pytest.approx(rate, rel=0.05)
    width = seconds / len(SECOND_PEAKS) / 20
    counts = [
        max(sum(at <= time < at + width for time in times) for at in range(first, first + 1000, 10))
        for first in (0, 1000, 2000)
    ]
    for count, peak in zip(counts, SECOND_PEAKS, strict=True):
        assert count / (rate * width) == pytest.approx(peak, rel=0.25)


def test_a_burst_is_ten_times_the_load() -> None:
    arrivals = with_burst(5.0, before_s=100.0, burst_s=100.0, after_s=100.0, seed=1)
    thirds = [sum(at <= one.at < at + 100 for one in arrivals) for at in (0, 100, 200)]
    assert thirds[0] == pytest.approx(500, rel=0.2)
    assert thirds[1] == pytest.approx(500 * BURST, rel=0.1)
    assert thirds[2] == pytest.approx(500, rel=0.2)


@pytest.mark.parametrize(
    ("watched", "expected"),
    [
        ([(0.9, 0.5), (1.1, 0.01), (1.3, 0.15)], 150.0),  # the last step ended at 1.15
        ([(1.2, 0.5)], 0.0),  # it had ended before the burst
        ([(1.1, 0.01), (1.2, 0.02)], None),
        ([], None),
    ],
)
def test_rollouts_are_out_of_the_way(
    watched: list[tuple[float, float]], expected: float | None
) -> None:
    seen = tuple(Watched(at=at, age_s=age, delay_s=0.0) for at, age in watched)
    found = figures.yield_ms(LoadReport(served=(), watched=seen), since=BURST_FROM_S)
    assert found == (None if expected is None else pytest.approx(expected))


def test_the_delay_of_a_burst_is_that_between_its_ends() -> None:
    seen = tuple(
        Watched(at=at, age_s=0.0, delay_s=delay)
        for at, delay in ((0.9, 0.5), (1.1, 0.51), (3.9, 0.52), (4.1, 0.7))
    )
    report = LoadReport(served=(), watched=seen)
    assert figures.delay_ms(report, since=1.0, until=4.0) == pytest.approx(20.0)
    assert figures.delay_ms(LoadReport(served=()), since=1.0, until=4.0) == 0.0
    assert figures.largest([1.0, 3.0, 2.0]) == 3.0
    assert figures.largest([1.0, None]) is None


def served(first_s: float, *, tokens: int = 5) -> Served:
    return Served(at=0.0, late_s=0.0, first_s=first_s, last_s=first_s + 1, tokens=tokens)


def test_an_unanswered_request_counts_as_infinitely_late() -> None:
    assert figures.ttft_p99([served(0.1), served(0.2)]) == 0.2
    assert figures.ttft_p99([served(0.1), served(0.0, tokens=0)]) == math.inf
    assert served(0.1).tpot_s == pytest.approx(0.25)
    assert served(0.1, tokens=1).tpot_s is None
    assert figures.quantile(list(range(1, 101)), 0.99) == 99
