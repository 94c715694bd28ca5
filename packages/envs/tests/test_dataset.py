"""Tasks of data sets in files: the common forms, the options, and the order."""

import json
import multiprocessing
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.envs.base import Episode, Score, Split, payload_of, split_of
from rollweave.envs.registry import check_options
from rollweave.io.extras import MissingExtraError
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Task
from rollweave_envs import dataset as environment
from rollweave_envs import dataset_records
from rollweave_envs.dataset import Dataset
from tests.support.properties import examples

from .hub_data import GSM8K, lines, parquet, use_home

ROWS = [{"prompt": f"question {n}", "answer": str(n), "level": n % 3} for n in range(60)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_home(tmp_path / "home", monkeypatch)
    return tmp_path / "home"


def drawn(options: dict[str, Any], index: int = 0, split: Split = Split.TRAIN) -> Task:
    return Dataset.make_task(index=index, seed=1, split=split, options=options)


def records(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all records to train on."""
    train, _ = environment._files(environment._selection(options))
    return [json.loads(line) for line in Path(train).read_text().splitlines()]


def score(options: dict[str, Any], task: Task, answer: str) -> Any:
    messages = (Message(role="user", content="?"), Message(role="assistant", content=answer))
    return Dataset.score(Episode(task=task, messages=messages), options)


VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{n} + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"index": n, "split": "train"},
    }
    for n in range(40)
]
VERIFIERS = [
    {
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": f"{n}?"}],
        "answer": str(n),
        "info": {"n": n},
        "task": "count",
    }
    for n in range(40)
]


def test_the_parquet_of_verl_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(parquet(VERL))
    options = {"path": str(tmp_path / "train.parquet"), "reward": "math"}
    first = records(options)[0]
    assert first == {**VERL[0], "answer": "1"}
    task = drawn(options)
    (message,) = Dataset(**options).reset(task).messages
    number = int(message.content.split()[0])
    assert score(options, task, rf"\boxed{{{number + 1}}}") == Score(reward=1.0, success=True)
    assert score(options, task, r"\boxed{-1}") == Score(reward=0.0, success=False)


def test_the_forms_of_verifiers_and_gsm8k_are_read_as_they_are(tmp_path: Path) -> None:
    options = {"path": lines(tmp_path / "a.jsonl", VERIFIERS), "reward": "exact"}
    assert records(options) == VERIFIERS
    messages = Dataset(**options).reset(drawn(options)).messages
    assert [message.role for message in messages] == ["system", "user"]
    options = {"path": lines(tmp_path / "b.jsonl", GSM8K), "reward": "gsm8k"}
    assert records(options)[3] == {**GSM8K[3], "prompt": GSM8K[3]["question"]}


def test_values_of_csv_stay_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,problem,answer\n007,12,NA\n008,x,\n")
    options = {"path": str(tmp_path / "a.csv"), "reward": "exact", "filter": {"id": ["007", 8]}}
    assert records(options) == [{"id": "007", "problem": "12", "answer": "NA", "prompt": "12"}]
    (tmp_path / "a.csv").write_text("id,problem,answer\nTrue,1,1\ntrue,2,2\nFalse,3,3\n")
    of_flag = records({**options, "filter": {"id": True}})
    assert [record["id"] for record in of_flag] == ["True", "true"]


def test_columns_are_mapped_and_rows_filtered(tmp_path: Path) -> None:
    rows = [{"q": {"text": f"q{n}"}, "a": n, "n": n % 2, "when": "x"} for n in range(10)]
    options = {
        "path": lines(tmp_path / "a.json", rows),
        "reward": "exact",
        "prompt": "q.text",
        "answer": "a",
        "columns": {"parity": "n"},
        "filter": {"n": 1, "q.text": ["q3", "q5", "q4"]},
    }
    assert records(options) == [
        {"parity": 1, "prompt": f"q{n}", "answer": n} for n in range(10) if n in (3, 5)
    ]


def test_files_of_a_folder_are_splits_and_a_pattern_is_one(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, rows in (("train-0", ROWS[:20]), ("train-1", ROWS[20:40]), ("test", ROWS[40:])):
        lines(folder / f"{name}.jsonl", rows)
    options = {"path": str(folder), "reward": "exact"}
    assert len(records(options)) == 40
    held_out = {payload_of(drawn(options, n, Split.TEST))["row"] for n in range(20)}
    assert held_out == set(range(20))
    pattern = {"path": str(folder / "train-*.jsonl"), "reward": "exact"}
    assert len(records(pattern)) == 40
    assert payload_of(drawn(pattern, 0, Split.TEST))["file"].endswith("train.jsonl")
    part = {**options, "split": "train[:5]", "held_out": "train[5:9]"}
    assert len(records(part)) == 5
    assert {payload_of(drawn(part, n, Split.TEST))["row"] for n in range(4)} == set(range(4))
    other = {**pattern, "held_out": str(folder / "test.jsonl")}
    assert {payload_of(drawn(other, n, Split.TEST))["row"] for n in range(20)} == set(range(20))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"prompt": "promt"}, "options.prompt must be a column of DATA (prompt, answer, level), "
         "got 'promt'; the nearest is 'prompt'"),
        ({"answer": "anser"}, "got 'anser'; the nearest is 'answer'"),
        ({"filter": {"levl": 1}}, "options.filter must be a column of DATA (prompt, answer, level)"
         ", got 'levl'; the nearest is 'level'"),
        ({"columns": {"a": "prompt.x"}}, "options.columns must be a column of DATA"),
        ({"filter": {"level": 9}}, "options.filter must leave rows, got {'level': 9}: none of the "
         "60 rows of DATA has these values"),
        ({"split": "trian"}, "options.split must be a split of DATA (train), got 'trian'; the "
         "nearest is 'train'"),
        ({"held_out": "test"}, "options.held_out must be a split of DATA (train), got 'test'"),
        ({"subset": "main"}, "options.subset must be left out for files, got 'main' with 'DATA'"),
        ({"path": "no.csv"}, "options.path must be a file, a folder or a pattern of files that "
         "exist, or owner/name or owner/name@revision of a data set of the hub, got 'no.csv'"),
        ({"overlong": "cut"}, "options.overlong must be refuse or drop, got 'cut'"),
        ({"reward": "gsm8"}, "options.reward must be one of code, exact, gsm8k, json_schema, math, "
         "none, or package.module:function, got 'gsm8' (did you mean gsm8k?)"),
        ({"reward": "judge"}, "got 'judge': set it to \"none\", and add [[rewards]] with "
         "[rewards.judge]"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_one_line(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    path = lines(tmp_path / "data.jsonl", ROWS)
    with pytest.raises(ConfigError) as raised:
        Dataset(**{"path": path, "reward": "exact", **options})
    text = str(raised.value)
    assert problem.replace("DATA", path) in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b"", "options.path must be readable"),
        ("a.csv", b"prompt,answer\n", "options.split must be a split that has rows, got 'train'"),
        ("a.parquet", b"PAR1 no", "options.path must be readable, got "),
        ("a.jsonl", b'{"text": "a"}\n', "options.prompt must be a column of PATH (text), got ''"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": null}\n', "got none in row 1 of PATH"),
        ("a.txt", b"a", "options.path must have files of one format"),
    ],
)
def test_files_that_cannot_be_read_are_one_line(
    tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        Dataset(path=str(path), reward="exact")
    assert problem.replace("PATH", str(path)) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_record_that_cannot_be_scored_is_named(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "1"}, {"prompt": "b"}])
    with pytest.raises(ConfigError, match=r"train\.jsonl:2: answer must be text or a number, got"):
        Dataset(path=path, reward="exact")


def test_options_of_another_type_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"options\.columns of environment 'dataset': Expected"):
        check_options("dataset", {"path": "a", "reward": "exact", "columns": ["a"]})
    with pytest.raises(ConfigError, match="options of environment 'dataset': Expected `str`"):
        drawn({"path": "a", "reward": "exact", "split": 3})


def test_a_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rollweave-envs\[datasets\]'"):
        Dataset(path=lines(tmp_path / "a.jsonl", ROWS), reward="exact")


def test_records_are_written_once_for_equal_contents(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"path": lines(tmp_path / "a.jsonl", ROWS), "reward": "exact"}
    task = drawn(options)
    monkeypatch.setattr(dataset_records, "Rows", None)  # nothing is loaded again
    environment._files_of.cache_clear()
    moved = {**options, "path": lines(tmp_path / "b.jsonl", ROWS)}
    assert drawn(moved) == task
    assert len(list((home / "rollweave" / "datasets").iterdir())) == 1


def test_another_process_may_have_written_the_same_records(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one ends while this one writes: its records are used."""
    options = {"path": lines(tmp_path / "a.jsonl", ROWS), "reward": "exact"}
    before = drawn(options)
    (folder,) = (home / "rollweave" / "datasets").iterdir()
    kept = folder.rename(home / "kept")
    rename = dataset_records._rename

    def late(unfinished: Path, final: Path) -> None:
        kept.rename(final)
        rename(unfinished, final)

    monkeypatch.setattr(dataset_records, "_rename", late)
    environment._files_of.cache_clear()
    assert drawn(options) == before
    assert list((home / "rollweave" / "datasets").iterdir()) == [folder]


def test_a_failure_leaves_nothing_behind(tmp_path: Path, home: Path) -> None:
    with pytest.raises(ConfigError):
        Dataset(path=lines(tmp_path / "a.jsonl", ROWS), reward="exact", filter={"level": 7})
    assert list((home / "rollweave" / "datasets").iterdir()) == []


@pytest.mark.extended
def test_processes_that_begin_at_once_read_the_same(tmp_path: Path, home: Path) -> None:
    path = lines(tmp_path / "a.jsonl", ROWS * 50)
    program = (
        "from rollweave_envs.dataset import Dataset; from rollweave import Split\n"
        f"options = {{'path': {path!r}, 'reward': 'exact'}}\n"
        "print(Dataset.make_task(index=7, seed=1, split=Split.TRAIN, options=options).payload)"
    )
    command = [sys.executable, "-c", program]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(min(4, 2 * multiprocessing.cpu_count()))
    ]
    printed = {process.communicate()[0] for process in started}
    assert {process.returncode for process in started} == {0}
    assert len(printed) == 1
    assert len(list((home / "rollweave" / "datasets").iterdir())) == 1


@settings(max_examples=examples(50))
@given(
    seed=st.integers(0, 1 << 40),
    split=st.sampled_from(Split),
    level=st.sampled_from([None, 0, [1, 2]]),
    stop=st.integers(0, 150),
)
def test_resumption_skips_and_repeats_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    split: Split,
    level: Any,
    stop: int,
) -> None:
    """A run that is killed after any number of tasks and resumed draws the tasks that
    it would have drawn. Compared with the rows, as a plain reading chooses them, each
    epoch has every row once.
    """
    path = Path(tmp_path_factory.getbasetemp(), "property.jsonl")
    if not path.exists():
        lines(path, ROWS)
    options = {"path": str(path), "reward": "exact"} | (
        {"filter": {"level": level}} if level is not None else {}
    )

    def tasks(first: int, last: int) -> list[Task]:
        environment._files_of.cache_clear()  # as a new process
        return [
            Dataset.make_task(index=index, seed=seed, split=split, options=options)
            for index in range(first, last)
        ]

    wanted = level if isinstance(level, list) else [0, 1, 2] if level is None else [level]
    expected = [
        row["prompt"]
        for row in ROWS
        if row["level"] in wanted and split_of(json.dumps(row["prompt"])) is split
    ]
    size = len(expected)
    whole = tasks(0, 3 * size)
    stop = min(stop, 3 * size)
    assert tasks(0, stop) + tasks(stop, 3 * size) == whole
    env = Dataset(**options)
    prompts = [env.reset(task).messages[0].content for task in whole]
    for epoch in range(3):
        assert Counter(prompts[epoch * size : (epoch + 1) * size]) == Counter(expected)


def test_a_judge_may_be_shown_the_answer(tmp_path: Path) -> None:
    options = {"path": lines(tmp_path / "a.jsonl", ROWS), "reward": "none"}
    task = drawn(options)
    payload = payload_of(task)
    assert payload["answer"] == str(payload["row"])
    assert score(options, task, "?") == Score(reward=0.0)
    assert "answer" not in payload_of(drawn({**options, "reward": "exact"}))
