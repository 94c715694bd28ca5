"""Reward functions of data sets by name, called as `function(record, answer)`.

Invariants: the agent's thoughts before `</think>` do not count as an answer; a record
that a function cannot score is refused before the run (`check_record`), and is never a
reward of 0.
"""

import json
import re
import time
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any, NoReturn

from jsonschema.exceptions import SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from rollweave.envs.base import Score
from rollweave.envs.handlers.answers import boxed_answer, boxed_reward, check_expected
from rollweave.envs.handlers.sandboxes import Sandboxes, exec_after_agent
from rollweave.envs.handlers.tools import fenced_blocks
from rollweave.schema.base import DEPTH, is_deep
from rollweave.schema.errors import SandboxSpoiledError
from rollweave_envs.code import FILE, PYTHON, SPEC, same_output

Record = Mapping[str, Any]

MARK = "####"
"""Mark before the final number in the answers of GSM8K."""

TEST_S = 5.0
"""Maximum seconds of one test of a program."""

TESTS_S = 40.0
"""Maximum seconds of all tests of a program: less than the default of `step_s`. Tests
for which no time is left are not passed.
"""

TESTS = 1000
"""Maximum number of tests of a program."""

_NUMBER = re.compile(
    r"(?:(?<![\w.,)])-)?\$?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|\.\d+", re.ASCII
)


def _checked(check: Callable[[Record], object]) -> Callable[[Any], Any]:
    """Return a decorator that gives a reward function its `check_record`, which raises
    ValueError.
    """

    def decorated(function: Any) -> Any:
        function.check_record = check
        return function

    return decorated


def _visible(answer: str) -> str:
    """Return the text after the agent's thoughts; "" if these have no end."""
    visible = answer.rpartition("</think>")[2]
    return "" if "<think>" in visible else visible


def _expected(record: Record) -> str:
    """Return the record's `answer`, or in verl's form its `reward_model.ground_truth`.
    Raises ValueError.
    """
    expected = record.get("answer")
    if expected is None and isinstance(graded := record.get("reward_model"), Mapping):
        expected = graded.get("ground_truth")
    if isinstance(expected, bool) or not isinstance(expected, str | int | float):
        raise ValueError(f"answer must be text or a number, got {expected!r:.80}")
    return str(expected)


def _scored(right: bool, reason: str = "") -> Score:
    return Score(reward=float(right), success=right, reason=reason)


def none(record: Record, answer: str) -> Score:
    """Return 0, and no success: for tasks of which `[[rewards]]` decide the reward."""
    return Score(reward=0.0)


@_checked(_expected)
def exact(record: Record, answer: str) -> Score:
    """Return 1 if the answer is the record's `answer`, except for white space around
    it.
    """
    return _scored(_visible(answer).strip() == _expected(record).strip())


def _last_number(text: str) -> Decimal | None:
    """Return the last number of a text: `1,234` is one number, and `1, 234` are two."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None


def _gsm8k_expected(record: Record) -> Decimal:
    """Return the number behind the last `####`, or the plain number that the answer is.
    Raises ValueError.
    """
    text = _expected(record).rpartition(MARK)[2].strip()
    number = _last_number(text) if _NUMBER.fullmatch(text) else None
    if number is None:
        raise ValueError(f"answer must be a number, or end with {MARK} and one, got {text!r:.80}")
    return number


@_checked(_gsm8k_expected)
def gsm8k(record: Record, answer: str) -> Score:
    """Return 1 if the last number of the answer is that behind `####` in the record's
    `answer`, or the plain number that this is.
    """
    return _scored(_last_number(_visible(answer)) == _gsm8k_expected(record))


def _math_record(record: Record) -> dict[str, str]:
    """Return the record with the final answer alone: what follows `####`, or stands in
    the last box of a solution. Raises ValueError.
    """
    text = _expected(record).rpartition(MARK)[2].strip()
    final = boxed_answer(text) or text
    check_expected(final)
    return {"answer": final}


@_checked(_math_record)
def math(record: Record, answer: str) -> Score:
    r"""Return 1 if math-verify accepts the last `\boxed{…}` of the answer for the
    record's `answer`. Raises RewardError without a judge.
    """
    return boxed_reward(_math_record(record), answer)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def _validator(record: Record) -> Validator:
    """Return the validator of the record's schema, an object or its text. Raises
    ValueError.
    """
    schema = record.get("schema")
    if isinstance(schema, str):
        schema = json.loads(schema)
    if not isinstance(schema, dict):
        raise ValueError(f"schema must be a JSON schema, an object or its text, got {schema!r:.80}")
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"schema must be a JSON schema: {error.message:.200}") from error
    registry: Registry[Any] = Registry()  # empty, so that no reference is fetched
    return kind(schema, registry=registry)


def _check_schema(record: Record) -> None:
    """Check the schema on a value. Raises ValueError."""
    remote = [one for one in _references(_validator(record).schema) if not one.startswith("#")]
    if remote:
        raise ValueError(f"schema must have references to itself only, got {remote[0]!r:.100}")
    try:
        _validator(record).is_valid(None)
    except Unresolvable as error:
        raise ValueError(f"schema must have references that exist, got {error}") from error
    except RecursionError as error:
        raise ValueError("schema must end, got one that refers to itself forever") from error


def _references(schema: Any) -> list[str]:
    """Return what the schema refers to, at every depth."""
    if isinstance(schema, list):
        return [one for inner in schema for one in _references(inner)]
    if not isinstance(schema, dict):
        return []
    own = [schema[key] for key in ("$ref", "$dynamicRef") if isinstance(schema.get(key), str)]
    return own + [one for inner in schema.values() for one in _references(inner)]


@_checked(_check_schema)
def json_schema(record: Record, answer: str) -> Score:
    """Return 1 if the answer is JSON that the record's `schema` allows."""
    try:
        value = json.loads(_visible(answer), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return _scored(False, f"the answer is not JSON: {error}")
    if is_deep(value):
        return _scored(False, f"the answer is more than {DEPTH} levels deep")
    fault = next(_validator(record).iter_errors(value), None)
    return _scored(
        fault is None, "" if fault is None else f"{fault.json_path}: {fault.message:.200}"
    )


def _tests(record: Record) -> list[tuple[str, str]]:
    """Return the input and the expected output of each test: a list of objects, or an
    object of two lists, or the text of one. Raises ValueError.
    """
    tests = record.get("tests")
    if isinstance(tests, str):
        tests = json.loads(tests)
    if isinstance(tests, dict) and {"inputs", "outputs"} <= tests.keys():
        tests = [
            {"input": given, "output": wanted}
            for given, wanted in zip(tests["inputs"], tests["outputs"], strict=True)
        ]
    form = "a list of objects with the texts input and output"
    if not isinstance(tests, list) or not 1 <= len(tests) <= TESTS:
        raise ValueError(f"tests must be {form}, 1 to {TESTS} of them, got {tests!r:.80}")
    for test in tests:
        texts = [test.get("input"), test.get("output")] if isinstance(test, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"tests must be {form}, got {test!r:.80}")
    return [(test["input"], test["output"]) for test in tests]


@_checked(_tests)
async def code(record: Record, answer: str) -> Score:
    """Return the share of the record's `tests` that the last Python block of the answer
    passes, in a sandbox that never has the expected output. The first test that takes
    more than `TEST_S` seconds is the last one.
    """
    blocks = fenced_blocks(_visible(answer))[0]
    programs = [body for language, body in blocks if language in PYTHON]
    if not programs:
        return _scored(False, "the answer has no block of Python")
    tests, passed, sandboxes = _tests(record), 0, Sandboxes()
    deadline = time.monotonic() + TESTS_S
    try:
        sandbox = await sandboxes.start(SPEC)
        try:
            await sandbox.write(FILE, programs[-1].encode(errors="replace"))
            for number, (given, wanted) in enumerate(tests):
                if (left_s := deadline - time.monotonic()) <= 0:
                    break
                # The program has run here from the second test on.
                execute = partial(exec_after_agent, sandbox) if number else sandbox.exec
                result = await execute(
                    [SPEC.python(), "-I", FILE],
                    stdin=given.encode(errors="replace"),
                    timeout_s=min(TEST_S, left_s),
                )
                output = result.stdout.decode(errors="replace")
                passed += result.rc == 0 and not result.timed_out and same_output(output, wanted)
                if result.timed_out:
                    break
        except SandboxSpoiledError as error:
            return Score(reward=passed / len(tests), success=False, reason=str(error))
        finally:
            await sandbox.stop()
    finally:
        await sandboxes.close()
    return Score(reward=passed / len(tests), success=passed == len(tests))
