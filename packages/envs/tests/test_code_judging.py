"""How a program is found and judged: every outcome of its cases, in sandboxes that a
test scripts.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.envs.base import Score, new_task
from rollweave.envs.handlers.base import Job, LimitError
from rollweave.sandbox.base import ExecResult, SandboxSpec
from rollweave.schema.errors import (
    ConfigError,
    SandboxError,
    SandboxLostError,
    SandboxSpoiledError,
    SandboxTimeoutError,
)
from rollweave.schema.work import StopReason
from rollweave_envs.code import FILE, SPEC, Code, same_output
from rollweave_envs.code_tasks import Problem
from tests.envs.handlers.agents import Scripted
from tests.support.properties import examples

PROBLEM = Problem(family="divisible", params={"k": 3, "what": "sum"})
TASK = new_task(seed=7, family=PROBLEM.family, params=PROBLEM.params)

OUTCOMES = ["right", "right", "spaces", "wrong", "status", "slow", "bytes", "lost", "spoiled"]


@dataclass
class Box:
    """A sandbox that runs the program with the outcomes of a test."""

    outcomes: Iterator[str] = field(default_factory=lambda: iter(()))
    files: dict[str, bytes | Exception] = field(default_factory=dict)
    stopped: bool = False
    ran: list[tuple[list[str], bytes, float]] = field(default_factory=list)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self.files[path] = data

    async def read(self, path: str, *, limit: int) -> bytes:
        data = self.files.get(path, SandboxError("there is no such file"))
        if isinstance(data, Exception):
            raise data
        if len(data) > limit:
            raise SandboxError(f"it is longer than {limit}")
        return data

    async def exec(self, argv: list[str], *, stdin: bytes, timeout_s: float) -> ExecResult:
        assert not self.stopped
        self.ran.append((argv, stdin, timeout_s))
        outcome = next(self.outcomes)
        if outcome == "lost":
            raise SandboxLostError("gone")
        if outcome == "spoiled":
            raise SandboxSpoiledError("its memory limit")
        right = PROBLEM.answer(stdin.decode()).encode()
        return ExecResult(
            rc=int(outcome == "status"),
            stdout={"spaces": right + b" \n\n", "wrong": b"7", "bytes": b"\xff\xfe"}.get(
                outcome, right
            ),
            stderr=b"",
            timed_out=outcome == "slow",
            truncated=False,
            seconds=0.0,
        )

    async def stop(self, grace_s: float) -> None:
        self.stopped = True


class Boxes:
    """Starts the sandboxes of a test in turn."""

    def __init__(self, *boxes: Box) -> None:
        self.boxes, self.started = list(boxes), 0

    async def start(self, spec: SandboxSpec) -> Any:
        assert spec.limits == SPEC.limits
        self.started += 1
        return self.boxes[self.started - 1]


def job(boxes: Boxes) -> Job:
    return Job(task=TASK, seed=0, sandboxes=boxes)  # type: ignore[arg-type]


def block(program: str, language: str = "python") -> str:
    return f"```{language}\n{program}\n```\n"


@settings(max_examples=examples(250))
@given(
    outcomes=st.lists(st.sampled_from(OUTCOMES), min_size=1, max_size=5),
    partial=st.booleans(),
    timeout_s=st.sampled_from([0.5, 3.0]),
)
def test_cases_are_judged_one_by_one(outcomes: list[str], partial: bool, timeout_s: float) -> None:
    """The agent's sandbox runs no case, and none is left afterwards."""
    judging = Box(iter(outcomes))
    boxes = Boxes(Box(), judging)

    async def attempt() -> tuple[Score | None, list[bool]]:
        handler = Code(tools=["bash"], cases=len(outcomes), partial=partial, timeout_s=timeout_s)
        await handler.init(job(boxes))
        await handler.run(Scripted([block("# \ud800")]))
        await handler.close()
        try:
            score: Score | None = await handler.eval()
        except (SandboxLostError, SandboxSpoiledError) as error:
            score = await handler.eval_exception(error)
        return score, handler.final_result()["passed"]

    score, found = asyncio.run(attempt())
    passed: list[bool] = []
    expected: Score | None = None
    for tried, outcome in enumerate(outcomes, 1):  # noqa: B007
        if outcome in ("lost", "spoiled"):
            expected = Score(reward=0.0, success=False) if outcome == "spoiled" else None
            break
        passed.append(outcome in ("right", "spaces"))
        share = sum(passed) / len(outcomes)
        expected = Score(reward=share if partial else float(share == 1), success=share == 1)
        if outcome == "slow" or (not partial and not passed[-1]):
            break
    assert (score, found) == (expected, passed)
    assert boxes.started == 2
    assert all(box.stopped for box in boxes.boxes)
    assert boxes.boxes[0].ran == []
    inputs = [stdin.encode() for stdin in PROBLEM.cases(7, len(outcomes))]
    assert [stdin for _, stdin, _ in judging.ran] == inputs[:tried]
    assert {(*argv[-2:], seconds) for argv, _, seconds in judging.ran} == {("-I", FILE, timeout_s)}
    assert judging.files == {FILE: b"# ?"}, "the answers stay outside"


LIMIT = LimitError(StopReason.MAX_TOKENS, "full")


@pytest.mark.parametrize(
    ("replies", "file", "program"),
    [
        (["no program"], None, None),
        ([block("1") + block("2")], b"file", "2"),
        ([block("1", "py") + block("2", "c")], b"file", "1"),
        ([block("1", "python3") + block("2", "")], b"file", "1"),
        ([block("1", "c")], b"file", "file"),
        (["in the file"], b"file", "file"),
        (["in the file"], b"\xff", "\ufffd"),
        (["in the file"], b"x" * (1 << 16), "x" * (1 << 16)),
        (["in the file"], b"x" * ((1 << 16) + 1), None),
        ([LIMIT], b"file", "file"),
        ([LIMIT], None, None),
        ([LIMIT], SandboxLostError("gone"), SandboxLostError),
        (["in the file"], SandboxTimeoutError("silent"), SandboxTimeoutError),
    ],
)
async def test_the_program_is_the_last_block_or_the_file(
    replies: Sequence[Any], file: bytes | Exception | None, program: Any
) -> None:
    box = Box()
    if file is not None:
        box.files[FILE] = file
    handler = Code(tools=["bash"])
    await handler.init(job(Boxes(box)))
    raised: Exception | None = None
    try:
        await handler.run(Scripted(replies))
    except (LimitError, SandboxError) as error:
        raised = error
    if isinstance(program, type):
        assert type(raised) is program
    else:
        assert raised is (LIMIT if replies == [LIMIT] else None)
        assert handler.final_result()["program"] == program


@pytest.mark.parametrize("timeout_s", [0.1, 0.6, 6.0, 60.0])
async def test_all_cases_fit_into_the_stage(timeout_s: float) -> None:
    assert TASK.limits.step_s == 60.0
    for cases in range(-1, 103):
        allowed: Any = contextlib.nullcontext()
        if not 1 <= cases <= 100:
            allowed = pytest.raises(ConfigError, match=r"options\.cases must be from 1 to 100")
        elif cases * timeout_s >= 60.0:
            allowed = pytest.raises(ConfigError, match=r"times cases must be less than step_s")
        with allowed:
            await Code(cases=cases, timeout_s=timeout_s).init(job(Boxes()))


@given(st.text("a \t\n"), st.text("a \t\n"))
def test_only_trailing_white_space_is_ignored(one: str, other: str) -> None:
    def shown(text: str) -> list[str]:
        lines = [line.rstrip() for line in text.split("\n")]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    assert same_output(one, other) == (shown(one) == shown(other))
