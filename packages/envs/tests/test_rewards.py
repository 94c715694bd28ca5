"""Rewards by name."""

import asyncio
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.envs import jsonl
from rollweave.envs.base import Score
from rollweave.envs.jsonl import Jsonl
from rollweave.io.extras import USER_CODE_REFUSED, USER_CODE_VARIABLE
from rollweave.schema.errors import ConfigError
from rollweave_envs import rewards
from rollweave_envs.rewards import code, exact, gsm8k, json_schema, math
from tests.support.sandboxes import needs

RIGHT, WRONG = Score(reward=1.0, success=True), Score(reward=0.0, success=False)


@pytest.mark.parametrize(
    ("expected", "answer", "right"),
    [
        ("yes", " yes\n", True),
        ("yes", "Yes", False),
        (4, "4", True),
        ("yes", "<think>no</think>yes", True),
        ("yes", "<think>yes", False),
    ],
)
def test_exact(expected: Any, answer: str, right: bool) -> None:
    assert exact({"answer": expected}, answer) == (RIGHT if right else WRONG)


@pytest.mark.parametrize(
    ("expected", "answer", "right"),
    [
        ("so 3\n#### 1,234", "The result is 1234.", True),
        ("#### 1234", "1,234", True),
        ("#### 12", "1, 2, 12 apples", True),
        ("#### 12", "12 or 13", False),
        ("#### -5", "It is -5", True),
        ("#### 5", "It is 10-5", True),
        ("#### 5", "it is $5.00!", True),
        ("0.5", "0.50", True),
        (7, "7", True),
        ("7", "", False),
        ("7", "<think>7</think>8", False),
        ("#### 1000000", "1,000,000", True),
    ],
)
def test_gsm8k(expected: Any, answer: str, right: bool) -> None:
    assert gsm8k({"answer": expected}, answer) == (RIGHT if right else WRONG)


@given(st.integers(-(10**12), 10**12), st.text("ab .:\n", max_size=20))
def test_gsm8k_reads_the_last_number_however_it_is_grouped(number: int, text: str) -> None:
    for written in (f"{number}", f"{number:,}"):
        assert rewards._last_number(f"7 {text} {written}") == Decimal(number)


@pytest.mark.parametrize(
    ("expected", "answer", "right"),
    [
        ("#### 42", r"\boxed{42}", True),
        (r"We get $\boxed{\frac{1}{2}}$.", r"\boxed{0.5}", True),
        ("42", "42", False),
        ("42", r"\boxed{41}", False),
    ],
)
def test_math(expected: str, answer: str, right: bool) -> None:
    assert math({"answer": expected}, answer) == (RIGHT if right else WRONG)
    assert math({"reward_model": {"ground_truth": expected}}, answer).success is right


SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"],
          "$defs": {"n": {"type": "integer"}}}  # fmt: skip


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ('{"a": 1}', ""),
        ('<think>{}</think> {"a": 1}', ""),
        ('{"a": "x"}', "$.a: 'x' is not of type 'integer'"),
        ("{}", "$: 'a' is a required property"),
        ("no", "the answer is not JSON: "),
        ('{"a": NaN}', "the answer is not JSON: JSON has no NaN"),
        ("[" * 5000, "the answer is not JSON: "),
        ('{"a": ' + "[" * 200 + "]" * 200 + "}", "the answer is more than 100 levels deep"),
    ],
)
def test_json_schema(schema: Any, answer: str, reason: str) -> None:
    found = json_schema({"schema": schema}, answer)
    assert found.success is not bool(reason)
    assert found.reason.startswith(reason)


@pytest.mark.parametrize(
    ("reward", "record", "problem"),
    [
        (exact, {}, "answer must be text or a number, got None"),
        (gsm8k, {"answer": "12 apples"}, "answer must be a number, or end with #### and one"),
        (math, {"answer": ""}, "an answer must have from 1 to 1000 characters"),
        (json_schema, {}, "schema must be a JSON schema, an object or its text, got None"),
        (json_schema, {"schema": {"type": "x"}}, "schema must be a JSON schema: "),
        (
            json_schema,
            {"schema": {"allOf": [{"$ref": "http://localhost/a"}]}},
            "schema must have references to itself only, got 'http://localhost/a'",
        ),
        (json_schema, {"schema": {"$ref": "#/$defs/a"}}, "schema must have references that exist"),
        (json_schema, {"schema": {"$ref": "#"}}, "schema must end, got one that refers to itself"),
        (code, {"tests": []}, "tests must be a list of objects with the texts input and output"),
        (code, {"tests": [{"input": 1}]}, "tests must be a list of objects with the texts"),
    ],
)
def test_a_record_that_cannot_be_scored_is_refused(
    reward: Any, record: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match="^" + problem.replace("$", r"\$").replace("(", r"\(")):
        reward.check_record(record)


TESTS: list[Any] = [
    [{"input": "1 2\n", "output": "3"}, {"input": "5 5\n", "output": "10\n"}],
    {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10"]},
]
SUM = "```python\nprint(sum(map(int, input().split())))\n```"


def test_code_reads_tests_in_three_forms() -> None:
    for tests in TESTS:
        for form in (tests, json.dumps(tests)):
            assert [pair[0] for pair in rewards._tests({"tests": form})] == ["1 2\n", "5 5\n"]
    assert asyncio.run(code({"tests": TESTS[0]}, "no program")).reason == (
        "the answer has no block of Python"
    )


def test_code_runs_the_program_on_the_tests() -> None:
    needs("bubblewrap")
    assert asyncio.run(code({"tests": TESTS[0]}, SUM)) == RIGHT
    half = asyncio.run(code({"tests": TESTS[1]}, "```python\nprint(3)\n```"))
    assert half == Score(reward=0.5, success=False)


def test_names_are_those_that_packages_announce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(USER_CODE_VARIABLE, USER_CODE_REFUSED)
    jsonl._reward.cache_clear()
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n')
    assert jsonl._reward("exact") is exact
    Jsonl(path=str(path), reward="exact")
    with pytest.raises(ConfigError, match=r"must be one of code, exact, .* \(did you mean math"):
        Jsonl(path=str(path), reward="maths")
    monkeypatch.setattr("rollweave.envs.registry.entry_points", lambda group: ())
    with pytest.raises(ConfigError, match=r"options\.reward 'exact' needs the package rollweave"):
        jsonl._named("exact")
