"""`rollweave trace` shows the content of the store: filters, turns, tokens and
versions.
"""

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from rollweave.cli.main import app
from rollweave.cli.trace import parse_reward
from rollweave.record.store import Ended, TrajectoryStore
from rollweave.schema.base import TrajectoryId
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Ignored, Origin, SequenceCause
from tests.support.synthetic_run import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "made-up", steps=3).path


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["trace", *arguments])
    return result.exit_code, result.stdout, result.stderr


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.startswith("g")]


def test_lists_all_trajectories_and_the_timeline(run: Path) -> None:
    code, text, _ = invoke(str(run), "--limit", "100")
    assert code == 0
    assert len(rows(text)) == 3 * 16
    assert "48 shown, 48 attempts in the run" in text
    assert "trace.json in https://ui.perfetto.dev" in text


def test_shows_the_newest_of_too_many_trajectories(run: Path) -> None:
    _, text, _ = invoke(str(run), "--limit", "2")
    assert [row[0] for row in rows(text)] == ["g11.2", "g11.3"]
    assert "2 of 48 shown" in text


def test_filters_narrow_the_list(run: Path) -> None:
    listed = rows(invoke(str(run), "--limit", "100", "--task", "calculator", "--step", "0")[1])
    assert listed
    assert {row[1] for row in listed} == {"calculator"}
    assert {row[4] for row in listed} == {"0"}
    good = rows(invoke(str(run), "--limit", "100", "--reward", ">0.5")[1])
    stopped = rows(invoke(str(run), "--limit", "100", "--stop", "finished")[1])
    assert good == stopped
    assert 0 < len(good) < 48


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stop", "bored"], "--stop must be one of finished, "),
        (["--reward", "high"], "--reward must be a number, or one after >"),
        (["g99.0"], "TRAJECTORY must be one of this run's 48 attempts, got 'g99.0'"),
    ],
)
def test_wrong_input_prints_one_line_and_exits_with_2(
    run: Path, arguments: list[str], message: str
) -> None:
    code, _, errors = invoke(str(run), *arguments)
    assert code == 2
    assert message in errors
    assert len(errors.strip().splitlines()) == 1


def test_reports_damaged_records(tmp_path: Path) -> None:
    path = write_run(tmp_path / "made-up", steps=1).path
    assert invoke(str(path))[2] == ""
    segment = path / "trajectories" / "000000.bin"
    content = segment.read_bytes()
    middle = len(content) // 2
    segment.write_bytes(
        content[:middle]
        + bytes(byte ^ 1 for byte in content[middle : middle + 2])
        + content[middle + 2 :]
    )
    code, text, errors = invoke(str(path))
    assert code == 0
    assert 0 < len(rows(text)) < 16
    (line,) = errors.strip().splitlines()
    assert line.startswith("warning: ")
    assert (
        f"does not match its checksum ({len(content)} bytes); it and the rest of this file "
        "cannot be shown" in line
    )
    segment.write_bytes(
        content[:middle]
    )  # as a run that is being written, or was killed, leaves it
    assert invoke(str(path))[2] == ""


def test_reports_a_damaged_tokenizer(tmp_path: Path) -> None:
    path = write_run(tmp_path / "made-up", steps=1).path
    (path / "model" / "tokenizer.json").write_text("{")
    code, _, errors = invoke(str(path), "g0.0")
    assert code == 2
    assert "tokenizer.json must be a tokenizer" in errors


def test_shows_a_trajectory_turn_by_turn(run: Path) -> None:
    code, text, _ = invoke(str(run), "g9.1")
    assert code == 0
    assert "trajectory  g9.1, attempt 0, of group g9" in text
    assert "turn 0 · tokens 2–5 · weights 1 (2–3), 2 (3–5) · log-prob -1.500 · reward 0.25" in text
    assert "turn 1 · tokens 6–7 · weights 2 · log-prob -0.500 · reward 0.75" in text
    assert ":<down> -0.50" in text
    assert "(blame: " in text


def test_marks_turns_that_were_cut(tmp_path: Path) -> None:
    path = write_run(tmp_path / "made-up", steps=1, cut=True).path
    _, text, _ = invoke(str(path), "--limit", "100")
    listed = [line.rstrip() for line in text.splitlines() if line.startswith("g")]
    assert len(listed) == 16
    assert all(line.endswith(", 1 cut") for line in listed)
    _, text, _ = invoke(str(path), "g0.0")
    assert "reward 0.25 · cut at its token limit" in text
    assert "reward 0.75 · cut" not in text
    assert "1 of 2 turns cut at a token limit" in text


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        *(("1", 1.0, True), ("1", 0.9, False), (">0.5", 0.5, False), (">=0.5", 0.5, True)),
        *(("<= -1", -1.5, True), ("<0", 0.0, False)),
    ],
)
def test_a_reward_filter_compares(text: str, value: float, expected: bool) -> None:
    assert parse_reward(text)(value) is expected


def test_refuses_a_reward_filter_without_a_number() -> None:
    for text in ("!1", ">１"):
        with pytest.raises(ConfigError, match="--reward must be a number"):
            parse_reward(text)


def test_prints_a_list_as_json(run: Path) -> None:
    code, text, _ = invoke(str(run), "--json", "--limit", "2", "--task", "calculator")
    assert code == 0
    printed = json.loads(text)
    assert printed["attempts"] == 48
    assert printed["matching"] == 24
    assert [line["id"] for line in printed["trajectories"]] == ["g11.2", "g11.3"]
    line = printed["trajectories"][-1]
    assert line["task"]["domain"] == "calculator"
    assert (line["turns"], line["tokens"], line["sampled_versions"]) == (2, 7, [1, 2])
    assert line["reward"] in (0.0, 1.0)
    assert line["stop_reason"] == ("finished" if line["success"] else "max_turns")


def test_prints_a_trajectory_as_json(run: Path) -> None:
    code, text, _ = invoke(str(run), "g9.1", "--json")
    assert code == 0
    (sequence,) = json.loads(text)["sequences"]
    assert [span["kind"] for span in sequence] == ["prompt", "output", "observation", "output"]
    turn = sequence[1]
    assert (turn["turn"], turn["start"], turn["end"], turn["reward"]) == (0, 2, 5, 0.25)
    assert turn["versions"] == [[2, 3, 1], [3, 5, 2]]
    assert turn["logprobs"] == [-0.5] * 3
    assert len(turn["tokens"]) == len(turn["pieces"]) == 3
    assert "".join(turn["pieces"]) == turn["text"] == "go<down>"


def test_shows_why_each_sequence_began(tmp_path: Path) -> None:
    path = write_run(tmp_path / "made-up", steps=1).path
    with TrajectoryStore(path / "trajectories") as store:
        (entry,) = store.find([TrajectoryId("g0.0")])
        (trajectory,) = store.read([entry])
        (sequence,) = trajectory.sequences
        began = (
            Origin(cause=SequenceCause.FIRST),
            Origin(cause=SequenceCause.HISTORY_EDITED, of=0, message=2, role="tool"),
        )
        sequences = tuple(msgspec.structs.replace(sequence, origin=each) for each in began)
        ignored = (Ignored(field="tools.*.type", value="'web'", action="left out", requests=3),)
        again = msgspec.structs.replace(trajectory, attempt=1, sequences=sequences, ignored=ignored)
        store.append(Ended(at=1.0, purpose=entry.purpose, member=0, trajectory=again))
    _, text, _ = invoke(str(path), "g0.0/1")
    assert "not read: tools.*.type = 'web': left out, in 3 requests" in text
    assert "sequence 1 of 2: first" in text
    assert "sequence 2 of 2: history edited, departs from sequence 1 at message 3 (tool)" in text
    origins = json.loads(invoke(str(path), "g0.0/1", "--json")[1])["origins"]
    assert [origin["cause"] for origin in origins] == ["first", "history_edited"]
    assert (origins[1]["of"], origins[1]["message"], origins[1]["role"]) == (0, 2, "tool")
    assert origins[1]["text"].startswith("history edited, departs")
    assert json.loads(invoke(str(path), "g0.0/0", "--json")[1])["origins"] == [None]


def test_shows_the_arguments_of_the_chat_template(tmp_path: Path) -> None:
    path = write_run(tmp_path / "made-up", steps=1).path
    assert "template" not in invoke(str(path), "g0.0")[1]
    text = (path / "config.toml").read_text()
    table = "[model.template_arguments]"
    assert text.count(table) == 1
    (path / "config.toml").write_text(text.replace(table, f"{table}\nenable_thinking = false"))
    assert 'template    {"enable_thinking": false}' in invoke(str(path), "g0.0")[1]
    printed = json.loads(invoke(str(path), "g0.0", "--json")[1])
    assert printed["template_arguments"] == {"enable_thinking": False}


def test_shows_the_final_result(tmp_path: Path) -> None:
    path = write_run(tmp_path / "made-up", steps=1).path
    assert "result:" not in invoke(str(path), "g0.0")[1]
    rescored(path, result='{"patch": "[bold]+1[/]"}')
    assert 'result: {"patch": "[bold]+1[/]"}' in invoke(str(path), "g0.0")[1]
    printed = json.loads(invoke(str(path), "g0.0", "--json")[1])
    assert printed["result"] == {"patch": "[bold]+1[/]"}
    rescored(path, result="no JSON", reward=0.5)
    printed = json.loads(invoke(str(path), "g0.0", "--json")[1])
    assert (printed["result"], printed["reward"]) == ("no JSON", 0.5)


def rescored(path: Path, *, result: str, reward: float = 1.0) -> None:
    with TrajectoryStore(path / "trajectories") as store:
        score = store.score_of(TrajectoryId("g0.0"))
        assert score is not None
        store.rescore([msgspec.structs.replace(score, result=result, reward=reward)])
