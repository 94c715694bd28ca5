"""The recipe `examples/qwen3_math`: its problems and converter, its dry run without a
GPU. `packages/servers/tests/test_real_vllm.py` runs it.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollweave.envs.handlers.answers import boxed_reward, parse_numbers
from rollweave.envs.jsonl import numbered_records
from tests.support.commands import invoke

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "qwen3_math"
RUN = str(RECIPE / "train.toml")


def convert(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RECIPE / "convert.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def write(path: Path, records: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_every_sample_problem_has_a_number_for_an_answer() -> None:
    problems = dict(numbered_records(str(RECIPE / "problems.jsonl"), "problem"))
    assert len(problems) == 48
    assert len({record["problem"] for record in problems.values()}) == 48
    for number, record in problems.items():
        answer = record["answer"]
        assert parse_numbers(answer.removesuffix("%")) is not None, number
        assert boxed_reward(record, rf"Thus, \boxed{{{answer}}}.").success, number


def test_a_dry_run_shows_the_node_that_the_recipe_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code, output, errors = invoke("train", RUN, "--dry-run", "--hosts", str(RECIPE / "node.toml"))
    assert (code, errors) == (0, [])
    assert "trainer ranks 1–3" in output
    assert "engines e0–e3" in output
    assert "GPUs 4–7" in output
    assert "ready: all checks passed" in output


def test_a_node_that_is_too_small_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    small = tmp_path / "small.toml"
    small.write_text((RECIPE / "node.toml").read_text().replace("count = 8", "count = 2"))
    code, _, errors = invoke("train", RUN, "--dry-run", "--hosts", str(small))
    assert (code, len(errors)) == (2, 1)
    assert errors[0].startswith("error: trainer.ranks: must be at most the number of GPUs (2)")


def test_problems_of_gsm8k_are_converted(tmp_path: Path) -> None:
    given = [
        {"question": " How many?", "answer": "2 + 2 = <<2+2=4>>4\n#### 1,004 "},
        {"question": "Which?", "answer": "#### -3"},
    ]
    done = convert(write(tmp_path / "a.jsonl", given))
    assert (done.returncode, done.stderr) == (0, "")
    expected = [{"problem": "How many?", "answer": "1,004"}, {"problem": "Which?", "answer": "-3"}]
    assert [json.loads(line) for line in done.stdout.splitlines()] == expected


def test_fields_are_named_where_they_differ(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "What?", "final": r"\frac{1}{2}"}])
    done = convert(path, "--problem", "text", "--answer", "final")
    assert json.loads(done.stdout) == {"problem": "What?", "answer": r"\frac{1}{2}"}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: must be an object with text 'question' and 'answer': JSONDecodeError"),
        ('{"question": "a"}', "line 2: must be an object with text"),
        ("[]", "line 2: must be an object with text"),
        ('{"question": "a", "answer": "so #### "}', "line 2: must have a problem and an answer"),
    ],
)
def test_a_line_that_cannot_be_converted_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"\n{line}\n")
    done = convert(str(path))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {path}: {problem}")
    assert done.stderr.count("\n") == 1
