"""`rollweave trace` shows the content of the store: filters, turns, tokens and
versions.
"""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rollweave.cli.main import app
from rollweave.cli.trace import parse_reward, spans
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Segment, SegmentKind, TokenSequence, TurnSpan
from tests.support.properties import examples
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
        ("1", 1.0, True),
        ("1", 0.9, False),
        (">0.5", 0.5, False),
        (">=0.5", 0.5, True),
        ("<= -1", -1.5, True),
        ("<0", 0.0, False),
    ],
)
def test_a_reward_filter_compares(text: str, value: float, expected: bool) -> None:
    assert parse_reward(text)(value) is expected


def test_refuses_a_reward_filter_without_a_number() -> None:
    with pytest.raises(ConfigError, match="--reward must be a number"):
        parse_reward("!1")


@st.composite
def conversations(draw: st.DrawFn) -> tuple[TokenSequence, list[tuple[SegmentKind, int, int]]]:
    """Generate a sequence and the spans of which it is made."""
    segments, spans, parts, at = [], [], [], 0

    def add(kind: SegmentKind, versions: list[int]) -> None:
        nonlocal at
        begin = at
        for version in versions:
            length = draw(st.integers(1, 3))
            segments.append(Segment(start=at, end=at + length, kind=kind, version=version))
            at += length
        if kind is SegmentKind.OUTPUT:
            spans.append(TurnSpan(start=begin, end=at, reward=float(len(spans))))
        parts.append((kind, begin, at))

    add(SegmentKind.PROMPT, [-1])
    for number in range(draw(st.integers(0, 4))):
        if number:
            add(SegmentKind.OBSERVATION, [-1])
        add(SegmentKind.OUTPUT, sorted(draw(st.sets(st.integers(0, 5), min_size=1, max_size=3))))
    sequence = TokenSequence(
        tokens=(0,) * at, segments=tuple(segments), logprobs=(0.0,) * at, turns=tuple(spans)
    )
    return sequence, parts


@given(conversations())
@settings(max_examples=examples(60))
def test_spans_are_the_parts_of_the_conversation(
    sequence_and_parts: tuple[TokenSequence, list[tuple[SegmentKind, int, int]]],
) -> None:
    sequence, parts = sequence_and_parts
    parsed = list(spans(sequence))
    assert [(part.kind, part.segments[0].start, part.segments[-1].end) for part in parsed] == parts
    turns = [part for part in parsed if part.kind is SegmentKind.OUTPUT]
    assert [(part.number, part.reward) for part in turns] == [
        (index, float(index)) for index in range(len(turns))
    ]
