"""Each figure of the page and of `/metrics` is the one that the run has written: small
runs with numbers that differ, whose figures are known.
"""

import asyncio
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from rollweave.record.rundir import RunDir
from rollweave.record.trace import CONTROLLER, ENGINES, ENVIRONMENTS, RELAYS, TRAINER, Trace
from rollweave.schema.status import EngineState, RunStatus, WaitStatus
from rollweave_ui import lanes, server, view
from rollweave_ui.lanes import LaneIndex
from rollweave_ui.runs import Runs, prometheus_text
from rollweave_ui.server import _Readers, serving
from rollweave_ui.view import LOG_LINES, RECENT_STEPS, RunView, is_long
from tests.support.busy_runs import write_status


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    path = tmp_path / "runs" / "small"
    path.mkdir(parents=True)
    return RunDir(path)


def write(run: RunDir, lines: Sequence[dict[str, Any]]) -> RunView:
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunView(run.path)


def step(number: int, at: float, **more: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, "at": at, "reward": {}, "success": {}} | more


def changed(run: RunDir, status: RunStatus, **changes: Any) -> None:
    status = msgspec.structs.replace(status, **changes)
    run.status.write_bytes(msgspec.json.encode(status))


# Prometheus


FIGURES = {
    "name": "r",
    "state": "running",
    "step": 3,
    "steps": 40,
    "at": 12.5,
    "warnings": 2,
    "last": {
        "reward": {"lake": 0.5, "sums": None},
        "success": {"lake": 0.25},
        "tokens_per_s": 900.0,
        "wall_s": 1.5,
        "trainer": {"loss": -0.125, "note": "text"},
    },
    "evaluation": {"reward": {"lake": 0.75}, "success": {"lake": 0.875}},
    "idle": {"engines": {"busy": 7.0, "window": 1.0}, "trainer": {"busy": 6.0}},
    "stops": {"finished": 11},
    "status": RunStatus(
        at=12.5,
        phase="running",
        step=3,
        steps=40,
        attempts={"queued": 4, "running": 16},
        buffered=5,
        queued_turns=6,
        engines=(
            EngineState(id="e0", status="serving", seconds=1.0, version=8, busy=7, slots=9),
            EngineState(id="e1", status="serving", seconds=1.0, version=-1, busy=0, lent=True),
        ),
        waits=tuple(
            WaitStatus(waiter=waiter, target="t", what="", seconds=seconds)
            for waiter, seconds in (("a", 2.0), ("a", 3.0), ("b", 1.0), ("a", 0.5))
        ),
    ),
}
OF_RUN = """
evaluation_reward{run="r",task="lake"} 0.75
evaluation_success{run="r",task="lake"} 0.875
attempts_ended_total{run="r",stop_reason="finished"} 11
reward{run="r",task="lake"} 0.5
seconds{run="r"} 12.5
step_seconds{run="r"} 1.5
steps_configured{run="r"} 40
steps_total{run="r"} 3
success{run="r",task="lake"} 0.25
time_seconds_total{run="r",part="engines",cause="busy"} 7
time_seconds_total{run="r",part="engines",cause="window"} 1
time_seconds_total{run="r",part="trainer",cause="busy"} 6
tokens_per_second{run="r"} 900
trainer{run="r",name="loss"} -0.125
warnings_total{run="r"} 2
"""
OF_STATUS = """
attempts{run="r",stage="queued"} 4
attempts{run="r",stage="running"} 16
engine_lent{run="r",engine="e0"} 0
engine_lent{run="r",engine="e1"} 1
engine_slots{run="r",engine="e0"} 9
engine_slots{run="r",engine="e1"} 0
engine_turns{run="r",engine="e0"} 7
engine_turns{run="r",engine="e1"} 0
engine_weights_version{run="r",engine="e0"} 8
engine_weights_version{run="r",engine="e1"} -1
groups_buffered{run="r"} 5
turns_queued{run="r"} 6
wait_seconds{run="r",waiter="a",target="t"} 3
wait_seconds{run="r",waiter="b",target="t"} 1
"""


def samples(text: str) -> set[str]:
    return {
        line.removeprefix("rollweave_run_") for line in text.splitlines() if line[:1] not in "#"
    }


@pytest.mark.parametrize("state", ["running", "finished", "silent"])
def test_prometheus_gets_each_figure_under_its_name(state: str) -> None:
    """The state of parts of a run is that of a living run alone."""
    text = prometheus_text([FIGURES | {"state": state}])
    lives = state == "running"
    expected = OF_RUN + OF_STATUS * lives + f'up{{run="r",state="{state}"}} {int(lives)}'
    assert samples(text) == set(expected.split("\n")) - {""}
    kinds = {line.split()[2]: line.split()[3] for line in text.splitlines() if "# TYPE" in line}
    assert all((kind == "counter") == name.endswith("_total") for name, kind in kinds.items())


def test_a_run_without_figures_has_only_its_state() -> None:
    empty = {key: type(value)() for key, value in FIGURES.items() if isinstance(value, dict)}
    bare = FIGURES | empty | {"status": None, "steps": 0, "idle": {}}
    damaged = {"name": "bad", "state": "damaged", "text": "no"}
    found = samples(prometheus_text([damaged, bare]))
    assert {line for line in found if '"bad"' in line} == {'up{run="bad",state="damaged"} 0'}
    assert {line.split("{")[0] for line in found if '"r"' in line} == {
        *("up", "steps_total", "seconds", "warnings_total")
    }


# The list of runs


def test_the_run_that_was_written_last_comes_first(run: RunDir) -> None:
    second = 10**9
    for number, name in enumerate(("a", "b", "c")):
        path = run.path.parent / name
        path.mkdir()
        (path / "metrics.jsonl").touch()
        newest = path / ("status.json", "config.toml", "metrics.jsonl")[number]
        newest.touch()
        for file in path.iterdir():
            os.utime(file, ns=(0, 123_456_789 + second * (number % 2)))
        os.utime(newest, ns=(0, 123_456_789 + second * (5 + (number + 1) % 3)))
    rows = Runs(run.path.parent).overview()["runs"]
    assert [row["name"] for row in rows] == ["b", "a", "c"]
    assert [row["changed"] for row in rows] == [7.123, 6.123, 5.123]


def test_a_run_that_cannot_be_read_is_one_row(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    view = write(run, [step(0, 1.0)])

    def fail(self: RunView, budget_s: float) -> dict[str, Any]:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(RunView, "line", fail)
    (row,) = Runs(run.path.parent).overview()["runs"]
    stamp = row.pop("changed")
    assert stamp == pytest.approx(run.metrics.stat().st_mtime, abs=1e-3)
    path = str(view.run.path)
    assert row == {"name": "small", "path": path, "state": "damaged", "text": "two lines"}


def test_runs_share_the_time_of_their_list(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that is a loop of links is none of them."""
    (run.path.parent / "loop").symlink_to("loop")
    for name in ("a", "b", "c"):
        (run.path.parent / name).mkdir()
        (run.path.parent / name / "config.toml").touch()
    budgets, now = list[float](), 0.0

    def line(self: RunView, budget_s: float) -> dict[str, Any]:
        nonlocal now
        budgets.append(budget_s)
        now += 0.625 * view.BUDGET_S
        return {"name": self.name}

    monkeypatch.setattr(RunView, "line", line)
    monkeypatch.setattr("rollweave_ui.runs.time", SimpleNamespace(monotonic=lambda: now))
    rows = Runs(run.path.parent).overview()["runs"]
    assert {row["name"] for row in rows} == {"a", "b", "c"}
    assert budgets == pytest.approx([view.BUDGET_S, 0.375 * view.BUDGET_S, 0.0])


# One run


def test_processes_of_other_machines_are_not_looked_for(run: RunDir) -> None:
    status = write_status(run, pid=2**30)
    assert RunView(run.path).line(1.0)["state"] == "killed"
    changed(run, status, machine="elsewhere", phase="serving")
    line = RunView(run.path).line(1.0)
    assert (line["state"], line["text"]) == ("running", "serving rollouts")
    changed(run, status, machine="elsewhere", phase="other", written_at=status.written_at - 99.0)
    line = RunView(run.path).line(1.0)
    assert (line["state"], line["text"]) == ("silent", f"nothing heard for 99 s (process {2**30})")


def test_the_head_of_a_run_is_from_its_settings_and_its_state(run: RunDir) -> None:
    rates = [{"tokens_per_s": float(number)} for number in range(RECENT_STEPS + 5)]
    lines = [step(number, 2.0 * number, **more) for number, more in enumerate(rates)]
    tasks = '[[tasks]]\nenv = "lake"\n[[tasks]]\nenv = "sums"\nname = "adding"\n'
    run.config.write_text(
        f'[run]\nsteps = 50\n[rollout]\nmode = "m"\n[model]\npath = "/a/b"\n{tasks}'
    )
    status = write_status(run, pid=os.getpid())
    head = write(run, [*lines, lines[-1]]).line(1.0)
    assert (head["step"], head["steps"], head["at"]) == (15, 50, 412.0)
    assert (head["mode"], head["model"], head["tasks"]) == ("m", "b", ["lake", "adding"])
    assert (head["version"], head["complete"], head["warnings"]) == (12, True, 0)
    assert head["tokens_per_s"] == pytest.approx(sum(range(5, 15)) / 10)
    changed(run, status, step=31)
    run.config.write_text("[model.scratch]\nhidden = 8\n")
    head = RunView(run.path).line(1.0)
    assert (head["step"], head["steps"], head["model"], head["mode"]) == (
        31,
        40,
        "from scratch",
        "",
    )
    run.status.unlink()
    head = RunView(run.path).line(1.0)
    assert (head["step"], head["steps"], head["at"], head["eta_s"]) == (15, 0, 28.0, None)
    assert head["version"] == -1


@pytest.mark.parametrize(
    ("times", "steps", "now", "left"),
    [
        ([400.0], 40, 412.0, None),
        ([400.0, 410.0], 40, 412.0, 380.0),
        ([0.0, 100.0, 400.0, 410.0], 0, 412.0, None),
        ([float(10 * n) for n in range(12)], 20, 110.0, 80.0),
        ([0.0, *(900.0 + 2 * n for n in range(RECENT_STEPS))], 21, 920.0, 20.0),
        ([400.0, 410.0], 2, 412.0, 0.0),
        ([400.0, 410.0], 1, 412.0, 0.0),
        ([400.0, 410.0], 40, 470.0, 380.0),
        ([400.0, 410.0], 40, 470.5, None),
        ([300.0, 400.0], 40, 900.0, 3800.0),
        ([300.0, 400.0], 40, 900.5, None),
    ],
)
def test_the_time_left_is_that_of_the_latest_steps(
    run: RunDir, times: list[float], steps: int, now: float, left: float | None
) -> None:
    """A run without a step for a minute, or for five steps, has no pace."""
    status = write_status(run, pid=os.getpid())
    changed(run, status, at=now, steps=steps, step=0)
    reader = write(run, [step(number, at) for number, at in enumerate(times)])
    assert reader.line(1.0)["eta_s"] == (None if left is None else pytest.approx(left))


def test_the_signals_of_steps_are_drawn_under_their_titles(run: RunDir) -> None:
    trainer = {name: 10.0 + place for place, (name, _) in enumerate(view.SIGNALS)}
    lines = [
        step(0, 1.0, tokens_per_s=5.0, wall_s=6.0, staleness={"0": 1, "2": 3}, trainer=trainer),
        step(1, 2.0, staleness={}, trainer={"entropy": None}),
    ]
    overview = write(run, lines).overview()
    drawn = {curve["name"]: curve["points"] for curve in overview["signals"]}
    titles = ("tokens/s", "seconds per step", "mean staleness of a batch")
    values = dict(zip(titles, (5.0, 6.0, 1.5), strict=True))
    values |= {title: trainer[name] for name, title in view.SIGNALS}
    assert drawn == {name: [[0, 1.0, value, value, value]] for name, value in values.items()}
    assert overview["staleness"] == {"0": 1, "2": 3}


def test_the_newest_evaluation_or_else_the_newest_step_has_the_measures(run: RunDir) -> None:
    first = step(4, 1.0, reward={"lake": 0.5}, success={"lake": 0.25})
    held = {"kind": "evaluation", "step": 8, "at": 3.0, "episodes": {"lake": 9}, "other": 1}
    held |= {"reward": {"lake": 0.75}, "success": {}}
    for lines, kind, value, where in (
        ([first], "success", 0.25, "training, step 4"),
        ([first, held], "reward", 0.75, "held out, step 8"),
        ([held, held | {"final": True}, first], "reward", 0.75, "final evaluation"),
    ):
        overview = write(run, lines).overview()
        assert overview["measures"] == {"lake": {"kind": kind, "value": value, "where": where}}
    assert overview["evaluations"][0] == {
        "step": 8,
        "at": 3.0,
        "final": None,
        "success": {},
        "reward": {"lake": 0.75},
        "episodes": {"lake": 9},
    }
    assert write(run, []).overview()["measures"] == {}


def test_the_newest_warnings_and_waits_come_first(run: RunDir) -> None:
    count = LOG_LINES + 5
    warnings = [
        {"kind": "warning", "at": float(n), "component": "c", "message": str(n)}
        for n in range(count)
    ]
    waits = [{"kind": "waiting", "at": float(n)} for n in range(3 * count)]
    overview = write(run, [*warnings, *waits]).overview()
    assert [line["message"] for line in overview["warnings"]] == [
        str(n) for n in range(count - 1, 4, -1)
    ]
    assert overview["warning_count"] == count
    newest = [line["at"] for line in overview["waited"]]
    assert newest == [float(n) for n in range(3 * count - 1, 3 * count - 1 - LOG_LINES, -1)]


def test_the_present_shares_of_time_are_those_of_the_latest_steps(run: RunDir) -> None:
    lines = [
        step(n, float(n), idle={"engines": {"busy": 1.0 + n}, "trainer": {"batch": 2.0}})
        for n in range(RECENT_STEPS + 2)
    ]
    overview = write(run, lines).overview()
    assert overview["recent"] == {
        "engines": {"busy": sum(range(3, RECENT_STEPS + 3))},
        "trainer": {"batch": 2.0 * RECENT_STEPS},
    }
    assert overview["idle"]["trainer"] == {"batch": 2.0 * (RECENT_STEPS + 2)}


def test_only_the_longest_unusual_waits_of_a_living_run_are_listed(run: RunDir) -> None:
    status = write_status(run, pid=os.getpid())
    waits = tuple(
        WaitStatus(waiter=name, target="t", what="", seconds=seconds, usual_s=usual_s)
        for name, seconds, usual_s in (
            *(("a", 11.0, 5.0), ("b", 10.0, 0.0), ("c", 30.0, 15.0)),
            *(("d", 12.0, 0.0), ("e", 31.0, 15.0)),
        )
    )
    changed(run, status, waits=waits)
    reader = write(run, [])
    assert [wait["waiter"] for wait in reader.line(1.0)["waits"]] == ["e", "d"]
    changed(run, status, waits=waits, written_at=status.written_at - 16.0)
    assert reader.line(1.0)["waits"] == []
    assert is_long(10.5, 5.0)
    assert not is_long(10.5, 5.5)


def test_metrics_that_are_replaced_are_read_anew(run: RunDir) -> None:
    warning = {"kind": "warning", "at": 0.0, "component": "c", "message": "m"}
    reader = write(run, [step(0, 1.0, reward={"lake": 1.0}), warning, {"kind": "waiting"}])
    reader.overview()
    run.metrics.rename(run.path / "old")
    write(run, [step(0, 1.0, reward={"lake": 0.5}), warning])
    overview = reader.overview()
    (curve,) = overview["reward"]
    assert (curve["points"], overview["warning_count"]) == ([[0, 1.0, 0.5, 0.5, 0.5]], 1)
    assert overview["waited"] == []


# Lanes


def test_the_window_of_lanes_is_the_whole_trace_by_default(run: RunDir) -> None:
    trace = Trace(run.trace)
    trace.span(TRAINER, "trainer", "train 0.0", 1.0, 2.0)
    trace.span(RELAYS, "relay 1", "fetch v1", 2.0, 7.5)
    trace.span(CONTROLLER, "controller", "hidden", 2.0, 3.0)
    trace.span(ENGINES, "e0", "load v1", 3.0, 3.5)
    trace.span(ENVIRONMENTS, "g0.0/0", "turn 0 e0", 1.0, 2.0)
    trace.span(ENVIRONMENTS, "g0.0/0", "turn 0 e7", 2.0, 3.0)
    trace.span(ENVIRONMENTS, "g0.0/0", "other 1", 2.0, 3.0)
    trace.close()
    write_status(run, pid=os.getpid())
    reader = RunView(run.path)
    whole = reader.lanes(None, None, 3)
    assert (whole["start"], whole["end"], whole["last"], whole["complete"]) == (0.0, 7.5, 7.5, True)
    assert whole["hosts"] == {"e0": "gpu-1", "e1": "gpu-2"}
    found = {(lane["kind"], lane["name"]): lane for lane in whole["lanes"]}
    assert found.keys() == {
        *(("trainer", "trainer"), ("relay", "relay 1"), ("engine", "e0"), ("engine", "e7"))
    }
    assert found["engine", "e0"]["load"] == [0.4, 0.0, 0.0]
    assert found["engine", "e7"] == {
        "kind": "engine",
        "name": "e7",
        "boxes": [],
        "load": [0.2, 0.2, 0.0],
    }
    part = reader.lanes(2.0, 2.5, 1)
    assert (part["start"], part["end"], part["last"]) == (2.0, 2.5, 7.5)
    boxes = {lane["name"]: lane["boxes"] for lane in part["lanes"]}
    assert boxes == {"trainer": [], "relay 1": [[2.0, 7.5, "fetch v1"]], "e0": [], "e7": []}
    assert reader.lanes(2.0, 2.0, 1)["lanes"] == []


def test_close_boxes_of_one_kind_are_merged_where_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "MAX_BOXES", 4)
    trace = Trace(tmp_path / "trace.json")
    spans = (("train 0", 0.0, 3.0), ("train 1", 1.0, 2.0), ("train 2", 4.0, 5.0))
    spans += (("save", 5.0, 6.0), ("train 3", 6.5, 7.0), ("train 4", 8.5, 9.0))
    for name, start, end in spans:
        trace.span(TRAINER, "trainer", name, start, end)
    trace.close()
    index = LaneIndex(tmp_path / "trace.json")
    index.advance(10.0)
    (all_of_it,) = index.window(0.0, 4.0 * 1.25, 1)
    assert all_of_it["boxes"] == [[start, end, name] for name, start, end in spans[:3]]
    (lane,) = index.window(0.0, 9.0, 1)  # boxes with at most 9 / 4 s between them
    assert lane["boxes"] == [[0.0, 5.0, "train 0"], [5.0, 6.0, "save"], [6.5, 9.0, "train 3"]]
    (lane,) = index.window(0.0, 10.0 / 2.5 * 1.5, 1)
    assert lane["boxes"] == [[0.0, 3.0, "train 0"], *all_of_it["boxes"][1:], [5.0, 6.0, "save"]]


def test_a_trace_is_read_in_parts_of_the_time_that_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "BATCH", 3)
    trace = Trace(tmp_path / "trace.json")
    for number in range(6):
        trace.span(TRAINER, "trainer", f"train {number}", number, number + 1.0)
    trace.close()
    index, ends = LaneIndex(tmp_path / "trace.json"), list[float]()
    while not index.advance(0.0):
        ends.append(index.end_s)
    assert ends == sorted(ends)
    assert len(set(ends)) > 2, "each call reads a part"
    assert index.end_s == 6.0
    assert LaneIndex(tmp_path / "trace.json").advance(10.0), "or all, if there is time"


# The server


async def test_each_parameter_reaches_its_answer(tmp_path: Path) -> None:
    asked = list[Any]()

    def note(name: str) -> Any:
        def answer(*arguments: Any, **more: Any) -> dict[str, str]:
            asked.append((name, *arguments, more))
            return {}

        return answer

    own = SimpleNamespace(**{name: note(name) for name in ("lanes", "attempts", "attempt")})
    runs: Any = SimpleNamespace(get=lambda name: asked.append(name) or own)
    headers = {"Authorization": "Bearer t"}
    conditions = "domain=d&stop=s&purpose=p&text=x&least=0.25&most=0.75&version=3"
    async with (
        serving(runs, token="t", port=0) as address,
        aiohttp.ClientSession(headers=headers) as session,
    ):
        for path in (
            *("lanes?run=r&from=1.5&to=2.5&bins=7", "lanes?run=r", "attempts?run=r"),
            *("lanes?run=r&bins=1000", "lanes?run=r&bins=1", "attempts?run=r&offset=0&limit=200"),
            f"attempts?run=r&{conditions}&order=best&offset=4&limit=5",
            *("attempt?run=r&id=g1.0&attempt=2", "attempt?run=r&id=g1.0"),
        ):
            async with session.get(f"{address}/api/{path}") as answer:
                assert answer.status == 200
    query = view.Query(
        domain="d", stop="s", purpose="p", text="x", least=0.25, most=0.75, version=3
    )
    assert [each for each in asked if each != "r"] == [
        ("lanes", 1.5, 2.5, 7, {}),
        ("lanes", None, None, 300, {}),
        ("attempts", view.Query(), {"order": "newest", "offset": 0, "limit": 200}),
        ("lanes", None, None, 1000, {}),
        ("lanes", None, None, 1, {}),
        ("attempts", view.Query(), {"order": "newest", "offset": 0, "limit": 200}),
        ("attempts", query, {"order": "best", "offset": 4, "limit": 5}),
        ("attempt", "g1.0", 2, {}),
        ("attempt", "g1.0", None, {}),
    ]


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (web.HTTPBadRequest(reason="wrong"), 400, '{"error":"wrong"}'),
        (web.HTTPNotFound(), 404, '{"error":"Not Found"}'),
        (web.HTTPNoContent(), 204, ""),
    ],
)
async def test_errors_of_the_library_are_lines_too(
    error: web.HTTPException, status: int, text: str
) -> None:
    def get(name: str) -> Any:
        raise error

    runs: Any = SimpleNamespace(get=get)
    async with (
        serving(runs, token="t", port=0) as address,
        aiohttp.ClientSession(headers={"Authorization": "Bearer t"}) as session,
        session.get(f"{address}/api/run") as answer,
    ):
        assert (answer.status, await answer.text()) == (status, text)


async def test_what_is_read_too_late_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    unhandled, go = list[object](), threading.Event()
    asyncio.get_running_loop().set_exception_handler(lambda _, what: unhandled.append(what))
    readers = _Readers()

    def fail() -> None:
        raise ValueError("no")

    assert await readers.read(lambda: 3) == 3
    with pytest.raises(ValueError, match="no"):
        await readers.read(fail)
    monkeypatch.setattr(server, "READ_S", 0.0)
    for late in (lambda: go.wait(60), lambda: go.wait(60) and fail()):
        with pytest.raises(web.HTTPServiceUnavailable):
            await readers.read(late)
    assert readers._count == 2
    go.set()
    async with asyncio.timeout(60):
        while readers._count:  # noqa: ASYNC110 (nobody is told)
            await asyncio.sleep(0.001)
    assert not unhandled
