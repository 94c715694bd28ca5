"""Writing programs: the families of tasks, and attempts by scripted agents in real
sandboxes.
"""

import os
import random
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from rollweave.envs.base import Score, Split, new_task, payload_of, split_of
from rollweave.envs.handlers.base import Job, LimitError
from rollweave.schema.base import mix
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError, SandboxLostError
from rollweave.schema.work import StopReason, Task
from rollweave_envs.code import FILE, Code
from rollweave_envs.code_tasks import FAMILIES, Problem, draw_problem
from tests.envs.handlers.agents import Scripted, attempt, calls, sandboxes

PROBLEM = Problem(family="divisible", params={"k": 3, "what": "sum"})
TASK = new_task(seed=7, family=PROBLEM.family, params=PROBLEM.params)


def block(program: str) -> str:
    return f"Here it is.\n```python\n{program}\n```\n"


# --- the tasks ---


@pytest.mark.variants
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_sound(family: str) -> None:
    for number in range(30):
        problem = draw_problem(random.Random(number), (family,))
        assert problem == draw_problem(random.Random(number), (family,))
        cases = problem.cases(number, 6)
        assert cases == problem.cases(number, 6) != problem.cases(number + 1, 6)
        answers = [problem.answer(stdin) for stdin in cases]
        assert len(set(answers)) > 1 or family in ("maze", "sales", "covered"), (problem, answers)
        text = problem.text()
        assert text == problem.text()
        assert not [name for name in problem.params if f"{{{name}}}" in text]
        scope: dict[str, Any] = {}
        source = problem.program()
        exec(source.split("\nprint(")[0], scope)  # what is printed is tried in a sandbox below
        call = source.rpartition("print(")[2].removesuffix(")").replace("sys.stdin.read()", "given")
        assert [eval(call, scope, {"given": stdin}) for stdin in cases] == answers


@pytest.mark.parametrize(
    ("family", "params", "stdin", "answer"),
    [
        ("divisible", {"k": 3, "what": "maximum"}, "3 -6 4\n1 2", "3\n0"),
        ("frequent", {"k": 2, "least": 2}, "bb a bb cc\ncc aa a a", "bb 2\ncc 2"),
        ("shift", {"k": 1, "what": "word of each line"}, "Az b!\n7", "aB !c\n7"),
        ("runs", {"least": 3, "mark": "*"}, "aabbbc\ncccc", "aab*3c\nc*4"),
        ("maze", {"ways": 4, "none": -1}, "..#\n#..\n##.", "4"),
        ("maze", {"ways": 8, "none": -1}, "..#\n#..\n##.", "2"),
        ("maze", {"ways": 4, "none": "none"}, ".#\n#.", "none"),
        ("groups", {"least": 2, "which": "smallest"}, "5\n1 2\n3 4\n4 3\n2 2", "2 1"),
        ("order", {"which": "smallest", "mark": ">"}, "3\n3 1", "2>3>1"),
        ("order", {"which": "largest", "mark": " "}, "3\n3 1", "3 2 1"),
        (
            "brackets",
            {"pairs": ["()", "[]"], "good": "ok", "first": 1},
            "([])\n([)]\n((\n)",
            "ok\n3\nopen\n1",
        ),
        ("bases", {"source": 16, "target": 2}, "f\n10", "1111\n10000"),
        ("covered", {"gap": 1, "what": "total length"}, "5 8\n1 4\n20 21\n6 7", "8"),
        (
            "sales",
            {"least": 10, "by": "sum from the greatest, then by name"},
            "a,x,5\nb,y,20\nc,x,6\nd,z,20\ne,w,1",
            "y: 20\nz: 20\nx: 11",
        ),
        ("sums", {"rule": "`*` comes before `+` and `-`.", "k": 100}, "2 + 3 * 4 - 1", "13"),
        ("sums", {"rule": "Evaluate strictly from the left.", "k": 100}, "2 + 3 * 4 - 1", "19"),
        ("sums", {"rule": "`+` and `-` come before `*`.", "k": 100}, "2 + 3 * 4 - 1", "15"),
    ],
)
def test_solutions_against_examples_by_hand(
    family: str, params: dict[str, Any], stdin: str, answer: str
) -> None:
    assert Problem(family=family, params=params).answer(stdin) == answer


def test_tasks_are_drawn_by_seed_and_splits_share_no_problem() -> None:
    by_split: dict[Split, set[str]] = {}
    for split in Split:
        tasks = [
            Code.make_task(index=index, seed=3, split=split, options={}) for index in range(200)
        ]
        assert tasks == [
            Code.make_task(index=index, seed=3, split=split, options={}) for index in range(200)
        ]
        contents = {Problem(**payload_of(task)).content for task in tasks}
        assert {split_of(content) for content in contents} == {split}
        assert len({payload_of(task)["family"] for task in tasks}) >= 8
        by_split[split] = contents
    assert sum(map(len, by_split.values())) == len(set.union(*by_split.values()))
    few = {"families": ["maze"]}
    splits = {
        split_of(Problem(family="maze", params={"ways": w, "none": n}).content)
        for w in (4, 8)
        for n in (-1, 0, 999, "none", "blocked")
    }
    for split in set(Split) - splits:
        with pytest.raises(ConfigError, match="have too few"):
            Code.make_task(index=0, seed=0, split=split, options=few)


# --- attempts ---


async def tried(
    replies: Any, *, options: dict[str, Any] | None = None, task: Task = TASK
) -> tuple[Score, dict[str, Any]]:
    handler = Code(**(options or {}))
    async with sandboxes() as boxes:
        score = await attempt(
            handler, task, replies if isinstance(replies, Scripted) else Scripted(replies), boxes
        )
    return score, handler.final_result()


async def test_a_correct_program_is_a_success() -> None:
    agent = Scripted([block(PROBLEM.program())])
    score, result = await tried(agent)
    assert score == Score(reward=1.0, success=True)
    assert result == {"program": PROBLEM.program(), "passed": [True] * 10}
    assert PROBLEM.text() in agent.messages[0].content


async def test_transcripts_are_correct() -> None:
    rng = random.Random(1)
    for _ in range(4):
        transcript = Code.transcript(rng, {})
        assert [message.role for message in transcript] == ["user", "assistant"]
    task = Code.make_task(index=0, seed=mix(0), split=Split.TEST, options={})
    score, _ = await tried([block(Problem(**payload_of(task)).program())], task=task)
    assert score.success


PART = (
    "for line in open(0):\n    print(sum(n for n in map(int, line.split()) if n % 3 == 0 and n != "
    "3))"
)
WRONG = {
    "nothing": "I do not know.",
    "another language": "```c\nint main() {}\n```",
    "syntax": block("print("),
    "other output": block("print(0)"),
    "no end": block("while True: pass"),
    "an exit status": block(PROBLEM.program() + "\nsys.exit(1)"),
    "a flood": block("while True: print('x' * 1000)"),
    "what it finds": block(
        "import glob\nfor p in glob.glob('/**/*answer*', recursive=True): print(open(p).read())"
    ),
}


@pytest.mark.variants
@pytest.mark.parametrize("what", WRONG)
async def test_other_answers_earn_nothing(what: str) -> None:
    score, _ = await tried([WRONG[what]], options={"cases": 2, "timeout_s": 2.0, "partial": False})
    assert score == Score(reward=0.0, success=False)


@pytest.mark.extended
async def test_the_share_of_solved_cases_counts() -> None:
    score, result = await tried([block(PART)])
    passed = sum(result["passed"])
    assert 0 < passed < 10
    assert score == Score(reward=passed / 10, success=False)
    score, result = await tried([block(PART)], options={"partial": False})
    assert score == Score(reward=0.0, success=False)
    assert result["passed"][-1] is False


@pytest.mark.extended
async def test_with_tools_the_program_may_be_a_file() -> None:
    write = calls(
        ("str_replace_editor", {"command": "create", "path": FILE, "file_text": PROBLEM.program()})
    )
    options = {"tools": ["bash", "str_replace_editor", "submit"]}
    agent = Scripted(
        [write, calls(("bash", {"command": f"echo 3 4 | python3 {FILE}"})), calls(("submit", {}))]
    )
    assert (await tried(agent, options=options))[0].success
    assert agent.messages[4].content == "3"
    assert (await tried([write, LimitError(StopReason.MAX_TURNS, "no more")], options=options))[
        0
    ].success
    assert (await tried(["Done."], options=options))[1]["program"] is None
    assert (await tried([calls(("bash", {"command": f"mkdir {FILE}"})), "Done."], options=options))[
        1
    ]["program"] is None


async def test_with_tools_in_text() -> None:
    agent = Scripted(["```bash\necho hello\n```", block(PROBLEM.program())])
    score, _ = await tried(agent, options={"tools": ["bash"], "calls": "text"})
    assert score.success
    assert agent.messages[2] == Message(role="user", content="hello")


async def test_an_overflowing_sandbox_is_the_agents_failure() -> None:
    hog = (
        "import os, time\nfor i in range(6):\n    if not os.fork():\n        x = b'x' * (200 << "
        "20); break\ntime.sleep(60)"
    )
    async with sandboxes() as boxes:
        handler = Code(timeout_s=30.0, cases=1)
        await handler.init(Job(task=TASK, seed=0, sandboxes=boxes))
        await handler.run(Scripted([block(hog)]))
        with pytest.raises(SandboxLostError, match="memory") as caught:
            await handler.eval()
        assert await handler.eval_exception(caught.value) == Score(reward=0.0, success=False)


async def test_a_lost_sandbox_gives_no_reward() -> None:
    async with sandboxes() as boxes:
        handler = Code(tools=["bash"])
        await handler.init(Job(task=TASK, seed=0, sandboxes=boxes))

        def speak(messages: Sequence[Message]) -> Message:
            os.kill(handler._sandbox.pid, signal.SIGKILL)  # type: ignore[union-attr]
            return calls(("bash", {"command": "ls"}))

        with pytest.raises(SandboxLostError) as caught:
            await handler.run(Scripted(speak))
        assert await handler.run_exception(caught.value) is None
        await handler.close()


async def test_refuses_invalid_options() -> None:
    for options, match in [
        ({"families": ["chess"]}, "families must be some of"),
        ({"tools": ["browser"]}, "tools must be some of"),
        ({"calls": "json"}, "calls must be native or text"),
        ({"cases": 0}, "cases must be from 1 to 100"),
        ({"timeout_s": float("inf")}, "options.timeout_s must be positive and finite, got inf"),
    ]:
        with pytest.raises(ConfigError, match=match):
            Code(**options)  # type: ignore[arg-type]
    async with sandboxes() as boxes:
        with pytest.raises(
            ConfigError,
            match=r"options\.timeout_s times cases must be less than step_s \(60\), got 6 times 10",
        ):
            await Code(timeout_s=6.0).init(
                Job(task=new_task(family="chess", params={}), seed=0, sandboxes=boxes)
            )
        with pytest.raises(ValueError, match="family must be one of"):
            await Code().init(
                Job(task=new_task(family="chess", params={}), seed=0, sandboxes=boxes)
            )
