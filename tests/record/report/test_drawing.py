"""The arithmetic behind the charts agrees with plain references."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.record.report.charts import MAX_BOXES, busy_bins, choose_window
from rollweave.record.report.data import TraceSpan
from rollweave.record.report.svg import Frame, nice_ticks, number, smoothed, stacked
from rollweave.record.trace import ENVIRONMENTS, TRAINER
from tests.support.properties import examples

numbers = st.floats(-1e6, 1e6)


@given(numbers, st.floats(1e-3, 1e6), st.integers(2, 10))
@settings(max_examples=examples(100))
def test_ticks_are_round_inside_and_not_too_many(low: float, width: float, count: int) -> None:
    ticks = nice_ticks(low, low + width, count)
    slack = width * 1e-6
    assert all(low - slack <= tick <= low + width + slack for tick in ticks)
    assert ticks == sorted(set(ticks))
    assert 1 <= len(ticks) <= count + 1 or width < 1e-6 * abs(low)


def test_ticks_of_nothing() -> None:
    assert nice_ticks(3.0, 3.0) == [3.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (1234.5, "1,234"), (0.25, "0.25"), (3.14159, "3.14"), (0.00002, "2.0e-05")),
        (-2000, "-2,000"),
    ],
)
def test_numbers_for_people(value: float, text: str) -> None:
    assert number(value) == text


@given(st.lists(st.floats(-100, 100), max_size=50), st.integers(1, 10))
@settings(max_examples=examples(60))
def test_smoothing_is_the_mean_of_the_last_values(values: list[float], window: int) -> None:
    expected = [
        sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))
    ]
    assert smoothed(values, window) == pytest.approx(expected, abs=1e-9)


spans = st.lists(st.tuples(st.floats(0, 10), st.floats(0.001, 5)), max_size=20).map(
    lambda drawn_spans: [
        TraceSpan(ENVIRONMENTS, 1, "turn 0 e0", start, start + length)
        for start, length in drawn_spans
    ]
)


@given(spans, st.integers(1, 30))
@settings(max_examples=examples(60))
def test_bins_hold_all_the_time_of_all_spans(drawn_spans: list[TraceSpan], bins: int) -> None:
    end = max((span.end for span in drawn_spans), default=1.0)
    binned = busy_bins(drawn_spans, start=0.0, end=end, bins=bins)
    assert len(binned) == bins
    assert sum(binned) * end / bins == pytest.approx(
        sum(span.end - span.start for span in drawn_spans)
    )
    for index, value in enumerate(binned):
        low, high = index * end / bins, (index + 1) * end / bins
        covered = sum(max(0.0, min(span.end, high) - max(span.start, low)) for span in drawn_spans)
        assert value == pytest.approx(covered / (end / bins), abs=1e-6)


@pytest.mark.extended
def test_close_up_is_in_the_middle_of_training_and_bounded() -> None:
    training = [
        TraceSpan(TRAINER, 1, f"train {step}.0", float(step), step + 0.5) for step in range(100)
    ]
    dense = [
        TraceSpan(ENVIRONMENTS, 1, "turn 0 e0", at / 1000, at / 1000 + 0.001)
        for at in range(100_000)
    ]
    window = choose_window([*training, *dense])
    assert window is not None
    assert window[0] < 50 < window[1]
    inside = [span for span in dense if span.start < window[1] and span.end > window[0]]
    assert len(inside) <= MAX_BOXES
    assert choose_window(dense) is None


def test_a_frame_maps_its_corners() -> None:
    frame = Frame(x=(0, 10), y=(0, 1))
    assert (frame.x(0), frame.x(10)) == (frame.left, frame.right)
    assert (frame.y(0), frame.y(1)) == (frame.bottom, frame.top)
    flat = Frame(x=(3, 3), y=(0, 0))
    assert math.isfinite(flat.x(3))
    assert math.isfinite(flat.y(0))


def test_a_stacked_bar_omits_causes_without_time() -> None:
    drawn = stacked(
        {"trainer": {"busy": 3.0, "batch": 1.0, "saving": 0.0}},
        {"busy": "--a", "batch": "--b", "saving": "--c"},
    )
    assert "trainer: busy 3.0 s (75.0%)" in drawn
    assert "trainer: batch 1.0 s (25.0%)" in drawn
    assert "saving" not in drawn
