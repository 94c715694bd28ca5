r"""Mathematics with an interpreter, lived through by scripted agents in real
sandboxes.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from rollweave.envs.base import Score, Split, new_task, payload_of
from rollweave.envs.handlers.base import Job, LimitError
from rollweave.envs.handlers.sandboxes import Sandboxes
from rollweave.schema.errors import ConfigError, EnvError, SandboxError, SandboxLostError
from rollweave.schema.work import StopReason, Task
from rollweave_envs.math_tool import MathTool
from tests.envs.handlers.agents import Scripted, attempt, calls, sandboxes

TASK = new_task(question="What is 2^100 mod 97?", answer=str(pow(2, 100, 97)))
RIGHT, WRONG = Score(reward=1.0, success=True), Score(reward=0.0, success=False)
CELL = {"code": "print(pow(2, 100, 97))"}


def last(messages: Any) -> str:
    return str(messages[-1].content)


async def score_episode(handler: MathTool, *replies: Any, task: Task = TASK) -> Score:
    async with sandboxes() as boxes:
        return await attempt(handler, task, Scripted(replies), boxes)


async def test_an_agent_that_computes() -> None:
    handler = MathTool()
    agent = Scripted(
        lambda messages: (
            calls(("think", {"thought": "Python can do this."}), ("ipython", CELL))
            if len(messages) == 2
            else rf"The interpreter says \boxed{{{last(messages)}}}."
        )
    )
    async with sandboxes() as boxes:
        assert await attempt(handler, TASK, agent, boxes) == RIGHT
    assert handler.final_result() == {"answer": "16"}
    assert [message.role for message in agent.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "tool",
    ]
    assert agent.messages[1].content == "What is 2^100 mod 97?"
    assert r"\boxed{}" in agent.messages[0].content
    assert [tool.name for tool in agent.tools[0]] == ["ipython", "think"]


async def test_the_interpreter_keeps_its_names_and_has_sympy() -> None:
    cells = ["import sympy", "x = sympy.Symbol('x')", "sympy.solve(x**2 - 256)[1]"]
    steps = iter([*(calls(("ipython", {"code": cell})) for cell in cells), None])
    assert await scored_by(lambda messages: next(steps) or rf"\boxed{{{last(messages)}}}") == RIGHT


async def scored_by(policy: Any) -> Score:
    async with sandboxes() as boxes:
        return await attempt(MathTool(), TASK, Scripted(policy), boxes)


async def test_calls_in_text() -> None:
    agent = Scripted(
        lambda messages: (
            "```ipython\nprint(pow(2, 100, 97))\n```"
            if len(messages) == 2
            else rf"So it is \boxed{{{last(messages)}}}."
        )
    )
    async with sandboxes() as boxes:
        assert await attempt(MathTool(calls="text"), TASK, agent, boxes) == RIGHT
    assert "```" in agent.messages[0].content
    assert agent.tools[0] == ()


@pytest.mark.variants
@pytest.mark.parametrize(
    "messages",
    [r"\boxed{17}", "16", "", r"\boxed{16", r"\boxed{16} or \boxed{17}", r"\boxed{15 + 1}"],
)
async def test_texts_that_are_no_answer(messages: str) -> None:
    assert await score_episode(MathTool(), messages) == WRONG


async def test_tool_output_is_no_answer() -> None:
    cheat = calls(("ipython", {"code": r"print(r'\boxed{16}')"}), content=r"\boxed{16}")
    assert await score_episode(MathTool(), cheat, "done") == WRONG


async def test_an_agent_that_is_cut_off_has_no_answer() -> None:
    cut = LimitError(StopReason.MAX_TURNS, "no turns left")
    handler = MathTool()
    assert (
        await score_episode(handler, calls(("ipython", CELL), content=r"\boxed{16}"), cut) == WRONG
    )
    assert handler.final_result() == {"answer": None}


async def test_code_that_takes_too_long_is_interrupted() -> None:
    agent = Scripted([calls(("ipython", {"code": "while True: pass"})), r"\boxed{16}"])
    async with sandboxes() as boxes:
        assert await attempt(MathTool(tool_s=0.5), TASK, agent, boxes) == RIGHT
    assert "out of time" in agent.messages[-1].content


EATERS = """
import os, time
for _ in range(28):
    if not os.fork():
        held = bytearray(b"x") * (80 << 20)
        time.sleep(60)
    time.sleep(0.02)
time.sleep(60)
"""


@pytest.mark.extended
async def test_exceeding_the_limits_is_the_agents_failure() -> None:
    handler, agent = MathTool(), Scripted([calls(("ipython", {"code": EATERS})), r"\boxed{16}"])
    async with sandboxes() as boxes:
        await handler.init(Job(task=TASK, seed=0, sandboxes=boxes))
        with pytest.raises(SandboxLostError, match=r"limits\.") as raised:
            await handler.run(agent)
        assert await handler.run_exception(raised.value) == WRONG
        await handler.close()


async def test_a_dying_sandbox_is_not_the_agents_failure() -> None:
    handler, task = MathTool(), TASK
    async with sandboxes() as boxes:
        await handler.init(Job(task=task, seed=0, sandboxes=boxes))
        handler.kill()
        with pytest.raises(SandboxError) as raised:
            await handler.run(Scripted([calls(("ipython", CELL))]))
        assert await handler.run_exception(raised.value) is None
        await handler.close()


async def test_sandboxes_that_are_closed() -> None:
    boxes = Sandboxes("zygote")
    await boxes.close()
    handler = MathTool()
    with pytest.raises(SandboxError, match="closed"):
        await handler.init(Job(task=TASK, seed=0, sandboxes=boxes))
    await handler.close()
    handler.kill()


async def test_refuses_a_foreign_payload() -> None:
    handler = MathTool()
    with pytest.raises(
        EnvError,
        match=r"payload must have question and answer as text, got \{\"answer\": 3",
    ):
        await handler.init(
            Job(task=new_task(question="2 + 1?", answer=3), seed=0, sandboxes=Sandboxes("zygote"))
        )


def make(index: int, split: Split = Split.TRAIN, seed: int = 0, **options: Any) -> dict[str, Any]:
    return payload_of(MathTool.make_task(index=index, seed=seed, split=split, options=options))


def test_tasks_are_deterministic_and_splits_disjoint() -> None:
    drawn = {split: [make(index, split)["question"] for index in range(60)] for split in Split}
    assert drawn == {
        split: [make(index, split)["question"] for index in range(60)] for split in Split
    }
    assert len(set(drawn[Split.TRAIN])) > 55
    for one in Split:
        for other in Split:
            assert one is other or not set(drawn[one]) & set(drawn[other])
    assert drawn[Split.TRAIN] != [make(index, seed=1)["question"] for index in range(60)]


def test_families_and_levels() -> None:
    assert {make(index, families=["digits"])["question"][:20] for index in range(20)} == {
        "What is the sum of t"
    }
    easy, hard = (
        sum(len(make(index, level=level)["question"]) for index in range(50)) for level in (1, 3)
    )
    assert easy < hard


def records(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("\n".join(json.dumps(record) for record in rows))
    return str(path)


def test_problems_from_a_users_file(tmp_path: Path) -> None:
    path = records(
        tmp_path / "a.jsonl", *({"problem": f"{n} + 1?", "answer": n + 1} for n in range(60))
    )
    drawn = {
        split: {
            make(index, split, path=path, question="problem")["question"] for index in range(80)
        }
        for split in Split
    }
    assert sum(map(len, drawn.values())) == len(set().union(*drawn.values())) == 60
    tasks = make(3, path=path, question="problem")
    assert tasks["answer"] == str(int(tasks["question"].split()[0]) + 1)
    solved = records(
        tmp_path / "b.jsonl", {"question": "?", "answer": r"So it is \boxed{\frac{1}{2}}."}
    )
    assert make(0, path=solved, held_out=solved, split=Split.TEST) == {
        "question": "?",
        "answer": r"\frac{1}{2}",
    }


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (
            {"question": "?"},
            r"a\.jsonl:1: a record must have 'question' as text and 'answer' as "
            r"text or a number, got \{",
        ),
        ({"question": "?", "answer": True}, "'answer' as text or a number"),
        ({"question": "?", "answer": " "}, "an answer must have from 1 to 1000 characters, got 1"),
        ({"question": [{"role": "user", "content": "?"}], "answer": "1"}, "'question' as text"),
        (
            {"question": "?", "answer": "1" * 1001},
            r"a\.jsonl:1: answer: an answer must have from 1 to 1000 characters, got 1001",
        ),
        (
            {"problem": "?", "answer": 1},
            r"a\.jsonl:1 has no field 'question' \(its "
            r"fields: problem, answer\)$",
        ),
    ],
)
def test_refuses_an_invalid_record(tmp_path: Path, record: dict[str, Any], problem: str) -> None:
    path = records(tmp_path / "a.jsonl", record)
    with pytest.raises(ConfigError, match=problem):
        make(0, path=path, held_out=path)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"families": ["algebra"]},
            r"options\.families must be some of modular_power, .*got 'algebra'",
        ),
        ({"level": 4}, r"options\.level must be from 1 to 3, got 4"),
        ({"level": "2"}, r"options\.level must be from 1 to 3, got '2'"),
        ({"held_out": "b.jsonl"}, r"options\.held_out must come with options\.path"),
    ],
)
def test_refuses_invalid_options(options: dict[str, Any], problem: str) -> None:
    for use in (lambda: MathTool(**options), lambda: make(0, **options)):
        with pytest.raises(ConfigError, match=problem):
            use()


def test_refuses_more_invalid_options() -> None:
    with pytest.raises(
        ConfigError,
        match=r"options\.path must be a readable file, got 'nowhere\.jsonl'",
    ):
        make(0, path="nowhere.jsonl")
    with pytest.raises(ConfigError, match=r"options\.calls must be native or text, got 'json'"):
        MathTool(calls="json")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"options\.tool_s must be positive and finite, got 0"):
        MathTool(tool_s=0)
