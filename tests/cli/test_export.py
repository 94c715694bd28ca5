"""`rollweave export` writes what the store has, in formats that their readers read."""

import importlib.util
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollweave.cli.main import app
from rollweave.record.export import BATCH
from rollweave.record.rundir import RunDir
from rollweave.record.store import TrajectoryReader
from tests.support.synthetic_run import write_run


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("runs") / "made-up", steps=20)
    table = "[model.template_arguments]"
    text = run.config.read_text()
    assert text.count(table) == 1
    run.config.write_text(text.replace(table, f"{table}\nenable_thinking = false"))
    return run.path


def invoke(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["export", *arguments])
    return result.exit_code, result.stdout, result.stderr


def exported(run: Path, path: Path, kind: str) -> Path:
    code, text, errors = invoke(str(run), "--format", kind, "--output", str(path))
    assert (code, errors) == (0, "")
    assert f"{path.name} (320 attempts, " in text
    return path


def agrees(run: Path, rows: list[dict[str, Any]]) -> bool:
    """Compare rows with the store, token by token."""
    reader = TrajectoryReader(RunDir(run).trajectories)
    assert len(rows) == len(reader.entries) > BATCH
    for row, entry in zip(rows, reader.entries, strict=True):
        trajectory = reader.load(entry)
        assert (row["id"], row["attempt"]) == (trajectory.id, trajectory.attempt)
        assert (row["reward"], row["success"]) == (trajectory.reward, trajectory.success)
        assert row["stop_reason"] == trajectory.stop_reason
        assert (row["task_id"], row["domain"]) == (trajectory.task.id, trajectory.task.tag)
        assert row["initiated_version"] == trajectory.initiated_version
        for columns, sequence in zip(row["sequences"], trajectory.sequences, strict=True):
            assert columns["template_arguments"] == '{"enable_thinking": false}'
            assert tuple(columns["tokens"]) == sequence.tokens
            assert tuple(columns["logprobs"]) == sequence.logprobs
            assert columns["sampled"] == sequence.output_mask()
            assert columns["versions"] == [
                segment.version
                for segment in sequence.segments
                for _ in range(segment.start, segment.end)
            ]
    return True


def test_json_lines_have_every_attempt(run: Path, tmp_path: Path) -> None:
    lines = exported(run, tmp_path / "all.jsonl", "jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert agrees(run, rows)
    assert rows[0]["sequences"][0]["text"].startswith(" at=a1 up=wallgo<down>")


@needs("pyarrow")
@pytest.mark.filterwarnings("ignore")  # theirs
def test_parquet_has_the_same_rows(run: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    table = parquet.read_table(exported(run, tmp_path / "all.parquet", "parquet"))
    assert agrees(run, table.to_pylist())
    lines = exported(run, tmp_path / "all.jsonl", "jsonl").read_text().splitlines()
    assert set(table.column_names) == set(json.loads(lines[0]))


@needs("datasets")
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_datasets_read_it(run: Path, tmp_path: Path, kind: str) -> None:
    from datasets import load_dataset

    path = exported(run, tmp_path / f"all.{kind}", kind)
    reader = {"parquet": "parquet", "jsonl": "json"}[kind]
    rows = load_dataset(reader, data_files=str(path), split="train", cache_dir=str(tmp_path))
    assert agrees(run, list(rows))


def members(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        return {name: json.loads(archive.read(name)) for name in archive.namelist()}


def test_an_evaluation_log_has_a_sample_for_each_attempt(run: Path, tmp_path: Path) -> None:
    read = members(exported(run, tmp_path / "all.eval", "inspect"))
    assert read["header.json"]["version"] == 2
    assert len(read["summaries.json"]) == 320
    sample = read["samples/g9.1_epoch_1.json"]
    texts = [(message["role"], message["content"]) for message in sample["messages"]]
    assert texts == [
        ("user", " at=a1 up=wall"),
        ("assistant", "go<down>"),
        ("user", " at=a1"),
        ("assistant", "<right>"),
    ]
    assert sample["output"]["completion"] == "<right>"
    assert sample["metadata"]["template_arguments"] == [{"enable_thinking": False}]
    rewards = [one["scores"]["reward"]["value"] for one in read["summaries.json"]]
    (scored,) = read["header.json"]["results"]["scores"]
    assert scored["metrics"]["mean"]["value"] == pytest.approx(sum(rewards) / 320)


@needs("inspect_ai")
@pytest.mark.filterwarnings("ignore")  # theirs
def test_inspect_reads_the_log(run: Path, tmp_path: Path) -> None:
    from inspect_ai.log import read_eval_log, read_eval_log_sample_summaries

    path = str(exported(run, tmp_path / "all.eval", "inspect"))
    log = read_eval_log(path)
    assert log.status == "success"
    assert log.samples is not None
    assert len(log.samples) == len(read_eval_log_sample_summaries(path)) == 320
    sample = next(one for one in log.samples if one.id == "g9.1")
    assert [message.text for message in sample.messages][1] == "go<down>"
    assert sample.scores is not None
    assert sample.scores["reward"].value in (0.0, 1.0)


def test_the_file_is_named_after_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    code, text, _ = invoke(run.name)
    assert code == 0
    assert text.startswith("made-up.jsonl (320 attempts, ")
    (run.parent / "made-up.jsonl").unlink()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "csv"], "--format must be one of jsonl, parquet, inspect, workload, got"),
        (["--output", "no/such/file"], "--output must be a file in a directory that exists"),
    ],
)
def test_wrong_input_is_one_line(run: Path, arguments: list[str], message: str) -> None:
    code, _, errors = invoke(str(run), *arguments)
    assert code == 2
    assert message in errors
    assert len(errors.strip().splitlines()) == 1


def test_damage_is_reported_and_the_rest_is_exported(tmp_path: Path) -> None:
    path = write_run(tmp_path / "made-up", steps=2).path
    (segment,) = (path / "trajectories").glob("*.bin")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    code, _, errors = invoke(str(path), "--output", str(tmp_path / "all.jsonl"))
    assert code == 0
    assert "left out" in errors
    assert 0 < len((tmp_path / "all.jsonl").read_text().splitlines()) < 32


def test_a_failed_export_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollweave.record.export.row", lambda *_: {"id": 1 / 0})
    result = CliRunner().invoke(app, ["export", str(run), "--output", str(tmp_path / "all")])
    assert isinstance(result.exception, ZeroDivisionError)
    assert list(tmp_path.iterdir()) == []


def test_the_runs_own_files_and_devices_are_not_written_over(run: Path, tmp_path: Path) -> None:
    store = sorted((run / "trajectories").iterdir())[0]
    before = store.read_bytes()
    link = tmp_path / "link.jsonl"
    link.symlink_to(store)
    for path in (run / "metrics.jsonl", store, link):
        code, _, errors = invoke(str(run), "--output", str(path))
        assert code == 2
        assert "--output must not be among the files of the run" in errors
    assert store.read_bytes() == before
    os.mkfifo(tmp_path / "pipe")
    code, _, errors = invoke(str(run), "--output", str(tmp_path / "pipe"))
    assert (code, "--output must be a regular file" in errors) == (2, True)
