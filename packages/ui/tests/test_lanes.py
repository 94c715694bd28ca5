"""Lanes show what the trace has."""

import random
from pathlib import Path

import pytest

from rollweave.record.report.charts import busy_bins
from rollweave.record.report.data import TraceSpan
from rollweave.record.trace import ENGINES, ENVIRONMENTS, TRAINER, Trace
from rollweave_ui.lanes import MAX_BOXES, LaneIndex


def lane(
    index: LaneIndex, name: str, start: float, end: float, bins: int = 40
) -> dict[str, object]:
    return next(one for one in index.window(start, end, bins) if one["name"] == name)


def test_the_load_of_an_engine_is_the_mean_number_of_its_turns(tmp_path: Path) -> None:
    rng, trace = random.Random(3), Trace(tmp_path / "trace.json")
    spans = []
    for number in range(300):
        start = rng.uniform(0, 100)
        end = start + rng.expovariate(0.3)
        engine = rng.choice(["e0", "e1"])
        trace.span(ENVIRONMENTS, f"t{number}", f"turn 0 {engine}", start, end)
        spans.append(TraceSpan(ENVIRONMENTS, 1, f"turn 0 {engine}", start, end))
    trace.close()
    index = LaneIndex(tmp_path / "trace.json")
    assert index.advance(10.0)
    for start, end in ((0.0, 110.0), (40.0, 43.0), (-5.0, 500.0)):
        for engine in ("e0", "e1"):
            own = [span for span in spans if span.engine == engine]
            expected = busy_bins(own, start=start, end=end, bins=40)
            assert lane(index, engine, start, end)["load"] == pytest.approx(expected, abs=2e-3)


def test_boxes_have_their_times_and_names(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    trace.span(TRAINER, "trainer", "train 0.0", 1.0, 2.0)
    trace.span(ENGINES, "e0", "load v1", 2.5, 3.0)
    trace.span(ENVIRONMENTS, "g0.0/0", "step 0", 1.0, 1.5)
    trace.flush()
    index = LaneIndex(tmp_path / "trace.json")
    index.advance(10.0)
    assert lane(index, "trainer", 0.0, 4.0)["boxes"] == [[1.0, 2.0, "train 0.0"]]
    assert lane(index, "e0", 0.0, 4.0)["boxes"] == [[2.5, 3.0, "load v1"]]
    assert lane(index, "environment steps", 1.0, 2.0, 2)["load"] == [1.0, 0.0]
    assert lane(index, "trainer", 2.1, 4.0)["boxes"] == []
    trace.span(TRAINER, "trainer", "train 1.0", 4.0, 5.0)
    trace.close()
    assert index.advance(10.0)
    assert lane(index, "trainer", 3.0, 6.0)["boxes"] == [[4.0, 5.0, "train 1.0"]]
    assert index.end_s == 5.0


def test_what_is_sent_is_bounded(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    for number in range(5 * MAX_BOXES):
        trace.span(TRAINER, "trainer", f"train {number}.0", number, number + 0.9)
    trace.close()
    index = LaneIndex(tmp_path / "trace.json")
    index.advance(10.0)
    boxes = lane(index, "trainer", 0.0, 5.0 * MAX_BOXES)["boxes"]
    assert isinstance(boxes, list)
    assert 1 <= len(boxes) <= 2 * MAX_BOXES
    assert boxes[0][0] == 0.0
    assert boxes[-1][1] == 5 * MAX_BOXES - 0.1


def test_torn_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    event = b'{"name":"train 0.0","ph":"X","pid":3,"tid":1,"ts":0,"dur":1000000},\n'
    path.write_bytes(b"[\n{}]\nnonsense\n" + event + b'{"ph":"X","pid":"x"},\n' + event[:20])
    index = LaneIndex(path)
    assert index.advance(10.0)
    (only,) = index.window(0.0, 1.0, 10)
    assert only["boxes"] == [[0.0, 1.0, "train 0.0"]]
