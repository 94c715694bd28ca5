"""The trace is readable JSON when closed, readable lines when killed, and bounded."""

import json
from pathlib import Path

from rollweave.record.trace import ENVIRONMENTS, TRAINER, Trace


def events(path: Path) -> list[dict[str, object]]:
    return [event for event in json.loads(path.read_text()) if event]


def test_spans_have_microseconds_and_separate_lines(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    trace.span(TRAINER, "trainer", "train 0", 1.0, 1.5, groups=4)
    trace.span(ENVIRONMENTS, "g0.0/0", "init", 0.0, 0.25)
    trace.close()
    spans = [event for event in events(tmp_path / "trace.json") if event["ph"] == "X"]
    expected = [("train 0", 1_000_000, 500_000), ("init", 0, 250_000)]
    assert [(span["name"], span["ts"], span["dur"]) for span in spans] == expected
    assert spans[0]["args"] == {"groups": 4}
    assert spans[0]["pid"] != spans[1]["pid"]


def test_released_line_is_reused(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    for number in range(5):
        trace.span(ENVIRONMENTS, f"g{number}", "init", 0.0, 1.0)
        trace.release(ENVIRONMENTS, f"g{number}")
    trace.span(ENVIRONMENTS, "a", "init", 0.0, 1.0)
    trace.span(ENVIRONMENTS, "b", "init", 0.0, 1.0)
    trace.close()
    lines = {event["tid"] for event in events(tmp_path / "trace.json") if event["ph"] == "X"}
    assert lines == {1, 2}


def test_killed_run_continues_after_its_last_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = Trace(path)
    trace.span(TRAINER, "trainer", "first", 0.0, 1.0)
    trace.flush()
    killed = path.read_text()
    trace.close()
    path.write_text(killed + '{"name":"torn","ph"')
    trace = Trace(path)
    trace.span(TRAINER, "trainer", "second", 1.0, 2.0)
    trace.close()
    trace = Trace(path)  # an ended run may continue, too
    trace.span(TRAINER, "trainer", "third", 2.0, 3.0)
    trace.close()
    names = [event["name"] for event in events(path) if event["ph"] == "X"]
    assert names == ["first", "second", "third"]


def test_a_trace_is_bounded(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json", limit=20)
    for number in range(100):
        trace.span(TRAINER, "trainer", str(number), 0.0, 1.0)
    trace.close()
    assert len(events(tmp_path / "trace.json")) == 20
    assert trace.dropped == 100 + 7 - 20  # six rows and one line are named first


def test_a_renewed_trace_has_the_newest_events_and_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for life in range(3):
        trace = Trace(path, limit=20, renew=True)
        for number in range(100):
            trace.span(ENVIRONMENTS, f"g{number}", f"{life}/{number}", 0.0, 1.0)
            trace.release(ENVIRONMENTS, f"g{number}")
        trace.close()
        assert trace.dropped == 0
        assert sorted(part.name for part in tmp_path.iterdir()) == ["trace.json", "trace.old.json"]
        parts = [events(tmp_path / name) for name in ("trace.old.json", "trace.json")]
        assert all(len(part) <= 20 for part in parts)
        for part in parts:  # each can be looked at by itself
            named = {event["tid"] for event in part if event["name"] == "thread_name"}
            assert {event["tid"] for event in part if event["ph"] == "X"} <= named
        names = [event["name"] for part in parts for event in part if event["ph"] == "X"]
        assert names == [f"{life}/{number}" for number in range(100)][-len(names) :]
        assert len(names) >= 12
