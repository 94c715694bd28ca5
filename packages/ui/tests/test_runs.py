"""What the page is told of runs: of living, ended, damaged and deleted ones, and of
large ones within a second.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollweave.record.rundir import RunDir
from rollweave.schema.status import WaitStatus
from rollweave_ui.attempts import Query
from rollweave_ui.files import UnknownRunError
from rollweave_ui.runs import Runs, prometheus_text
from rollweave_ui.view import POINTS, RunView
from tests.support.busy_runs import write_large_run, write_status
from tests.support.synthetic_run import write_run

NEWEST: dict[str, Any] = {"order": "newest", "offset": 0}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "made-up", steps=20).path


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> RunDir:
    """A copy of a finished run, to be damaged."""
    return RunDir(Path(shutil.copytree(whole, tmp_path / "runs" / "made-up")))


def test_a_finished_run(whole: Path) -> None:
    view = RunView(whole)
    overview = view.overview()
    assert (overview["state"], overview["step"], overview["steps"]) == ("finished", 20, 40)
    assert [curve["name"] for curve in overview["success"]] == ["frozenlake", "calculator"]
    assert [point[0] for point in overview["success"][0]["points"]] == list(range(20))
    assert overview["measures"]["frozenlake"]["kind"] == "success"
    assert overview["idle"]["trainer"]["busy"] == pytest.approx(10.0)
    assert overview["problems"] == []
    assert overview["settings"]["run"]["name"] == "made-up"
    json.dumps(overview)


def test_a_run_under_way_is_followed(run: RunDir) -> None:
    """Lines appear one by one, the last of them torn."""
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    run.summary.unlink()
    run.metrics.write_bytes(b"")
    view = RunView(run.path)
    assert view.overview()["state"] == "empty"
    write_status(run, pid=os.getpid())
    steps = 0
    for line in lines:
        with run.metrics.open("ab") as file:
            file.write(line[:-9])
            file.flush()
            assert len(view.overview()["signals"][:1]) == (1 if steps else 0)
            file.write(line[-9:])
        steps += json.loads(line)["kind"] == "step"
        curves = view.overview()["success"]
        assert (len(curves[0]["points"]) if curves else 0) == steps
    overview = view.overview()
    assert (overview["state"], overview["text"]) == ("running", "training")
    assert overview["problems"] == []
    assert overview["eta_s"] is None, "no step has come for minutes"
    assert overview["status"]["waits"][0]["target"] == "the batch of step 12"


def child_that_ended() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize(
    ("prepare", "state", "text"),
    [
        (lambda run: write_status(run, pid=os.getpid()), "running", "training"),
        (lambda run: write_status(run, pid=os.getpid(), age_s=40.0), "silent", "nothing heard for"),
        (lambda run: write_status(run, pid=child_that_ended()), "killed", "is gone; continue with"),
        (lambda run: write_status(run, pid=1, ended=True), "finished", ""),
    ],
)
def test_the_state_of_a_run(
    run: RunDir, prepare: Callable[[RunDir], object], state: str, text: str
) -> None:
    prepare(run)
    line = RunView(run.path).line(1.0)
    assert line["state"] == state
    assert text in line["text"]


def test_the_end_of_a_run(run: RunDir) -> None:
    summary = json.loads(run.summary.read_text())
    for changes, state, text in (
        ({"error": "no engine is left"}, "failed", "no engine is left"),
        ({"interrupted": True}, "interrupted", "ended by the user; continue with --resume"),
        ({"ended_by": None}, "finished", ""),
        ({"ended_by": "all tasks are done"}, "finished", "all tasks are done"),
    ):
        run.summary.write_text(json.dumps(summary | changes))
        line = RunView(run.path).line(1.0)
        assert (line["state"], line["text"]) == (state, text)
    run.summary.unlink()
    write_status(run, pid=1, ended=True)
    assert RunView(run.path).line(1.0)["state"] == "failed"
    run.status.unlink()
    assert RunView(run.path).line(1.0)["state"] == "unknown"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("summary.json", b"{", "summary.json: it is damaged and left out"),
        ("summary.json", b"{}", "summary.json: it is damaged and left out"),
        ("summary.json", b'{"wall_s": 1, "idle": [1]}', "summary.json: it is damaged"),
        ("summary.json", b'{"wall_s": 1, "stop_reasons": {"a": "x"}}', "summary.json: it is"),
        ("status.json", b'{"at": 1}', "status.json: it is damaged and left out"),
        ("config.toml", b"[run", "config.toml: it is damaged and left out"),
        ("config.toml", b"\xff", "config.toml: it is damaged and left out"),
        ("metrics.jsonl", b'[]\n{"kind": "step"}\n\xff\n', "3 lines are damaged and left out"),
        (
            "metrics.jsonl",
            b'{"kind": "step", "step": 0, "at": 1, "success": [1]}\n'
            b'{"kind": "step", "step": 0, "at": 1, "staleness": {"a": 1}}\n'
            b'{"kind": "evaluation", "at": 1}\n',
            "3 lines are damaged and left out",
        ),
    ],
)
def test_a_damaged_file_is_one_line_and_the_rest_stays(
    run: RunDir, name: str, content: bytes, problem: str
) -> None:
    if name == "metrics.jsonl":
        content += run.metrics.read_bytes()
    (run.path / name).write_bytes(content)
    overview = RunView(run.path).overview()
    (line,) = overview["problems"]
    assert problem in line
    assert "\n" not in line
    assert len(overview["success"][0]["points"]) == 20
    assert overview["step"] == 20
    assert prometheus_text(Runs(run.path).figures())


def test_settings_of_another_shape_are_left_out(run: RunDir) -> None:
    run.config.write_text("tasks = 3\nrun = 4\nmodel = []\n")
    head = RunView(run.path).line(1.0)
    assert (head["tasks"], head["model"], head["step"]) == ([], "", 20)


def test_a_copy_that_replaces_the_metrics_leaves_the_run_finished(run: RunDir) -> None:
    view = RunView(run.path)
    assert view.line(1.0)["state"] == "finished"
    copy = run.metrics.with_suffix(".copy")
    shutil.copy(run.metrics, copy)
    copy.replace(run.metrics)
    assert (view.line(1.0)["state"], view.line(1.0)["step"]) == ("finished", 20)


def test_the_longest_of_several_waits_for_one_target_counts(run: RunDir) -> None:
    write_status(run, pid=os.getpid())
    figures = RunView(run.path).figures()
    waits = tuple(
        WaitStatus(waiter="attempts", target="an environment", what=what, seconds=seconds)
        for what, seconds in (("starting", 900.0), ("stepping", 1.0))
    )
    figures["status"] = msgspec.structs.replace(figures["status"], waits=waits)
    text = prometheus_text([figures])
    (line,) = [line for line in text.splitlines() if line.startswith("rollweave_run_wait")]
    assert line.endswith(" 900")


def test_a_directory_in_a_files_place_is_one_line(run: RunDir) -> None:
    run.summary.unlink()
    run.summary.mkdir()
    (line,) = RunView(run.path).overview()["problems"]
    assert "summary" in line


def test_a_run_that_is_deleted_and_begins_again(run: RunDir, whole: Path) -> None:
    runs = Runs(run.path.parent)
    assert [one["name"] for one in runs.overview()["runs"]] == ["made-up"]
    view = runs.get("made-up")
    view.attempts(Query(), **NEWEST)
    shutil.rmtree(run.path)
    with pytest.raises(UnknownRunError, match=r"there is no run 'made-up' in .*: it was deleted"):
        runs.get("made-up")
    assert runs.overview()["runs"] == []
    overview = view.overview()
    assert "was deleted: what was read of it is shown" in overview["problems"][0]
    write_run(run.path, steps=3)
    assert len(runs.get("made-up").overview()["success"][0]["points"]) == 3
    assert runs.get("made-up").attempts(Query(), **NEWEST)["total"] == 48


def test_the_list_has_damaged_runs_beside_good_ones(run: RunDir) -> None:
    other = run.path.parent / "other"
    shutil.copytree(run.path, other)
    (other / "metrics.jsonl").write_bytes(b'{"kind": "evaluation", "step": {}, "success": []}\n')
    (run.path.parent / "notes").mkdir()
    rows = {row["name"]: row for row in Runs(run.path.parent).overview()["runs"]}
    assert rows.keys() == {"made-up", "other"}
    assert rows["made-up"]["state"] == "finished"
    assert Runs(run.path).overview()["runs"][0]["name"] == "made-up"


def test_an_attempt_with_its_task_and_group(whole: Path) -> None:
    view = RunView(whole)
    read = view.attempt("g9.1", None)
    assert read["attempt"]["id"] == "g9.1"
    expected = ["prompt", "output", "observation", "output"]
    assert [span["kind"] for span in read["attempt"]["sequences"][0]] == expected
    assert read["attempt"]["origins"] == [None]
    assert {row["id"] for row in read["group"]} == {f"g9.{member}" for member in range(4)}
    assert {row["task"] for row in read["task"]} == {read["attempt"]["task"]["id"]}
    initiated = [row["initiated"] for row in read["task"]]
    assert initiated == sorted(initiated)
    with pytest.raises(UnknownRunError, match=r"there is no attempt g999\.0 in made-up$"):
        view.attempt("g999.0", None)


def test_an_attempt_that_cannot_be_read_is_one_line(run: RunDir) -> None:
    view = RunView(run.path)
    view.attempts(Query(), **NEWEST)
    (segment,) = run.trajectories.glob("*.bin")
    content = bytearray(segment.read_bytes())
    content[view._attempts.rows[0].stored.offset + 3] ^= 1
    segment.write_bytes(content)
    with pytest.raises(UnknownRunError, match="record") as caught:
        view.attempt("g0.0", None)
    assert "\n" not in str(caught.value)


def test_an_attempt_has_the_arguments_of_the_chat_template(run: RunDir) -> None:
    assert RunView(run.path).attempt("g0.0", 0)["template_arguments"] == {}
    table = "[model.template_arguments]"
    text = run.config.read_text()
    run.config.write_text(text.replace(table, f"{table}\nenable_thinking = false"))
    read = RunView(run.path).attempt("g0.0", 0)
    assert read["template_arguments"] == {"enable_thinking": False}


def test_another_configuration_has_another_tokenizer(run: RunDir) -> None:
    view = RunView(run.path)
    first = view.attempt("g0.0", 0)["attempt"]["sequences"][0][1]
    assert view.attempt("g0.0", 0)["attempt"]["sequences"][0][1] == first
    assert first["pieces"] is not None
    decoder = view._decoder
    view.attempt("g0.1", 0)
    assert view._decoder is decoder, "it is read once"
    run.config.write_text(run.config.read_text() + "# changed\n")
    shutil.rmtree(run.path / "model")
    assert view.attempt("g0.0", 0)["attempt"]["sequences"][0][1]["pieces"] is None


def test_without_a_tokenizer_tokens_are_numbers(run: RunDir) -> None:
    (run.path / "model" / "tokenizer.json").write_text("{")
    read = RunView(run.path).attempt("g0.0", 0)
    assert "tokenizer.json must be a tokenizer" in read["note"]
    assert read["attempt"]["sequences"][0][0]["text"] is None
    shutil.rmtree(run.path / "model")
    read = RunView(run.path).attempt("g0.0", 0)
    assert read["note"] == ""
    assert read["attempt"]["sequences"][0][1]["pieces"] is None


@pytest.mark.extended
def test_16000_trajectories_are_answered_within_a_second(tmp_path: Path) -> None:
    """The time is that of this thread's processor, so that other work on the machine
    does not count.
    """
    run = write_large_run(tmp_path / "large", trajectories=16_000)
    view = RunView(run.path)
    slowest: dict[str, float] = {}

    def timed(name: str, answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        began = time.thread_time()
        answered = answer()
        msgspec.json.encode(answered)
        spent = time.thread_time() - began
        slowest[name] = max(slowest.get(name, 0.0), spent)
        return answered

    for _ in range(100):
        page = timed("attempts", lambda: view.attempts(Query(), **NEWEST))
        if page["complete"]:
            break
    assert page["total"] == 16_000 + 48
    for _ in range(100):
        lanes = timed("lanes", lambda: view.lanes(None, None, 400))
        if lanes["complete"]:
            break
    assert sum(bool(one.get("load")) for one in lanes["lanes"]) >= 4
    timed("attempt", lambda: view.attempt("g2500.3", None))
    timed("filtered", lambda: view.attempts(Query(least=0.9, domain="game"), **NEWEST))
    timed("overview", view.overview)
    timed("list", Runs(tmp_path).overview)
    assert max(slowest.values()) < 1.0, slowest


def test_long_curves_are_thinned_to_means_with_their_range(run: RunDir) -> None:
    line = next(
        json.loads(text)
        for text in run.metrics.read_text().splitlines()
        if '"kind": "step"' in text
    )
    with run.metrics.open("w") as file:
        for step in range(4 * POINTS):
            changed = line | {"step": step, "at": float(step), "success": {"frozenlake": step % 2}}
            file.write(json.dumps(changed) + "\n")
    (curve,) = RunView(run.path).overview()["success"]
    assert len(curve["points"]) == POINTS
    assert curve["points"][0] == [3, 3.0, 0.5, 0, 1]


def test_the_metrics_for_prometheus(run: RunDir) -> None:
    write_status(run, pid=os.getpid())
    text = prometheus_text([RunView(run.path).figures()])
    assert 'rollweave_run_up{run="made-up",state="running"} 1\n' in text
    assert 'rollweave_run_steps_total{run="made-up"} 20\n' in text
    assert 'rollweave_run_engine_turns{run="made-up",engine="e0"} 1\n' in text
    waits = 'rollweave_run_wait_seconds{run="made-up",waiter="the trainer",target="the batch of'
    assert waits in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)) > 10
    for line in text.splitlines():
        if not line.startswith("#"):
            assert line.split("{")[0] in names
            float(line.rsplit(" ", 1)[1])
    assert prometheus_text([]) == ""
