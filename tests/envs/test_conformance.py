"""The contract of an environment, checked on every environment of this repository."""

import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollweave.envs.base import Observation, Step
from rollweave.envs.registry import BUILT_IN, DISTRIBUTED, is_handler, resolve
from rollweave.schema.chat import Message
from rollweave.schema.config.training import FINAL_TASKS_FROM
from rollweave.schema.work import Purpose, Task
from tests.support.properties import examples

from .worlds import GUESS, HERE, draw, source


@dataclass(frozen=True)
class Case:
    env: str
    options: dict[str, Any] = field(default_factory=dict)
    actions: tuple[str, ...] = ()
    closed: bool = True
    """True if all its text consists of its words."""
    splits: bool = True
    """True if its held-out tasks differ from its training tasks."""


LAKE = tuple(f"<{direction}>" for direction in ("left", "down", "right", "up"))
CALC = (
    "<tool> 3 + 4</tool>",
    "<tool>3*4</tool>",
    "<answer> 7</answer>",
    "<answer>-2</answer>",
    "<tool> 99 * 1</tool>",
)
CASES = {
    "frozenlake": Case("frozenlake", actions=LAKE),
    "frozenlake fixed": Case("frozenlake", {"maps": "fixed"}, LAKE, splits=False),
    "calculator": Case("calculator", actions=CALC),
    "calculator small": Case("calculator", {"largest": 9, "operators": "+-*"}, CALC),
    "nim": Case("nim", actions=("<take-1>", "<take-2>", "<take-3>"), splits=False),
    "gem": Case(
        "gem",
        {"id": "game:GuessTheNumber", "maker": "packages.envs.tests.gem_like:make"},
        ("3", "17", "none"),
        closed=False,
        splits=False,
    ),
    "gym named": Case(
        "gym",
        {"id": GUESS, "actions": ["<a>", "<b>", "<c>"]},
        ("<a>", "<b>", "<c>"),
        closed=False,
        splits=False,
    ),
    "gym numbers": Case("gym", {"id": GUESS}, ("1", "2", " 3 "), closed=False, splits=False),
    "gym text": Case(
        "gym", {"id": GUESS, "make": {"text": True}}, ("a", "b", "c"), closed=False, splits=False
    ),
    "gym render": Case(
        "gym",
        {
            "id": "FrozenLake-v1",
            "make": {"render_mode": "ansi"},
            "observe": "render",
            "prompt": "Walk.\n",
        },
        tuple("0123"),
        closed=False,
        splits=False,
    ),
    "gym dataset": Case(
        "gym",
        {"id": "reasoning_gym/basic_arithmetic"},
        ("<answer>3</answer>", "no idea"),
        closed=False,
    ),
    "jsonl": Case(
        "jsonl", {"path": "DATA", "reward": f"{__name__}:reward"}, ("yes",), closed=False
    ),
    "echo": Case(f"{HERE}Echo", actions=("a", "end"), closed=False, splits=False),
}


def reward(record: dict[str, Any], answer: str) -> float:
    return float(record["answer"] == answer)


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    chosen = CASES[request.param]
    if "path" in chosen.options:
        return Case(
            chosen.env,
            {**chosen.options, "path": dataset(tmp_path)},
            chosen.actions,
            chosen.closed,
            chosen.splits,
        )
    return chosen


def dataset(directory: Path, count: int = 200) -> str:
    path = directory / "data.jsonl"
    path.write_text(
        "\n".join(json.dumps({"prompt": f"question {i}", "answer": "yes"}) for i in range(count))
    )
    return str(path)


def play(case: Case, task: Task, actions: list[str]) -> list[Any]:
    env = resolve(case.env)(**case.options)
    replies: list[Any] = [env.reset(task)]
    for action in actions:
        replies.append(env.step(action))
        if replies[-1].done:
            break
    close = getattr(env, "close", None)
    if close is not None:
        close()
    return replies


def test_every_environment_is_here() -> None:
    # these need a server, an extra, and a cache of their own: test_openenv.py,
    # test_textworld.py, test_dataset.py
    of_this_repository = {*BUILT_IN, *DISTRIBUTED} - {"openenv", "textworld", "dataset"}
    here = {name for name in of_this_repository if not is_handler(name)}
    assert {case.env for case in CASES.values()} >= here


def test_tasks_are_deterministic_and_differ(case: Case, tmp_path: Path) -> None:
    domain = {"env": case.env, "tag": "t", "options": case.options, "max_turns": 5, "step_s": 3.0}
    first, second = source(tmp_path, domain), source(tmp_path, domain)
    tasks = [draw(first, "t", index) for index in range(20)]
    assert tasks == [draw(second, "t", index) for index in range(20)]
    assert len({(task.seed, task.payload) for task in tasks}) > 10
    assert {(task.env, task.tag, task.limits.max_turns, task.limits.step_s) for task in tasks} == {
        (case.env, "t", 5, 3.0)
    }
    other = source(tmp_path, domain, seed=1)
    assert [draw(other, "t", index) for index in range(20)] != tasks


def test_splits_share_no_task(case: Case, tmp_path: Path) -> None:
    of = source(tmp_path, {"env": case.env, "tag": "t", "options": case.options})
    train = [draw(of, "t", index) for index in range(60)]
    validation = [draw(of, "t", index, Purpose.EVAL) for index in range(30)]
    test = [draw(of, "t", FINAL_TASKS_FROM + index, Purpose.EVAL) for index in range(30)]
    assert len({task.id for task in [*train, *validation, *test]}) == 120
    if case.splits:
        contents = [{content(task) for task in tasks} for tasks in (train, validation, test)]
        assert all(contents)
        assert len(set().union(*contents)) == sum(map(len, contents))


def content(task: Task) -> str:
    payload = json.loads(task.payload)
    payload.pop("start", None)
    return json.dumps(payload) if payload else str(task.seed)


def test_the_same_task_and_actions_give_the_same_answers(case: Case, tmp_path: Path) -> None:
    of = source(tmp_path, {"env": case.env, "tag": "t", "options": case.options})
    for index in range(5):
        actions = random.Random(index).choices(case.actions, k=12)
        task = draw(of, "t", index)
        assert play(case, task, actions) == play(case, task, actions)


def test_lifecycle(case: Case, tmp_path: Path) -> None:
    of = source(tmp_path, {"env": case.env, "tag": "t", "options": case.options})
    ends = 0
    for index in range(40):
        first, *steps = play(
            case, draw(of, "t", index), random.Random(index).choices(case.actions, k=60)
        )
        assert isinstance(first, Observation)
        assert first.messages
        for step in steps:
            assert isinstance(step, Step)
            assert step.messages or step.done
            assert step.success is None or step.done
        ends += steps[-1].done
    assert ends > 10


@settings(max_examples=examples(25))
@given(
    texts=st.lists(
        st.text(max_size=30) | st.text("<>tolansweruptake-123 /+\n٣²", max_size=20),
        min_size=1,
        max_size=6,
    ),
    index=st.integers(0, 50),
    name=st.sampled_from(
        sorted(CASES.keys() - {"jsonl", "echo"})
    ),  # echo has words that make it misbehave
)
def test_no_action_makes_it_raise(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], index: int, name: str
) -> None:
    case = CASES[name]
    of = source(
        tmp_path_factory.getbasetemp(), {"env": case.env, "tag": "t", "options": case.options}
    )
    for step in play(case, draw(of, "t", index), texts)[1:]:
        assert isinstance(step, Step)


def test_the_vocabulary_covers_all_messages(case: Case, tmp_path: Path) -> None:
    if not case.closed:
        pytest.skip("its text is not known beforehand")
    of = source(tmp_path, {"env": case.env, "tag": "t", "options": case.options})
    words = of.words()
    pattern = re.compile(
        f"(?:{'|'.join(re.escape(word) for word in sorted(words, key=len, reverse=True))})*"
    )
    spoken: list[Message] = []
    for index in range(40):
        actions = random.Random(index).choices([*case.actions, "nonsense"], k=30)
        for answer in play(case, draw(of, "t", index), actions):
            spoken += answer.messages
    kind = resolve(case.env)
    for number in range(150):
        spoken += kind.transcript(random.Random(number), case.options)
    for message in spoken:
        assert pattern.fullmatch(message.content), message
    used = {word for word in words for message in spoken if word in message.content}
    assert len(used) > len(words) / 2


def test_a_transcript_is_a_conversation(case: Case) -> None:
    kind = resolve(case.env)
    if not hasattr(kind, "transcript"):
        pytest.skip("has no transcripts")
    assert kind.transcript.__doc__
    seen = set()
    for number in range(30):
        replies = list(kind.transcript(random.Random(number), case.options))
        assert replies == list(kind.transcript(random.Random(number), case.options))
        roles = ["agent" if message.role == "assistant" else "environment" for message in replies]
        assert roles == [("environment", "agent")[place % 2] for place in range(len(replies))]
        assert "agent" in roles
        seen.add(tuple(message.content for message in replies))
    assert len(seen) > 10


def test_a_grammar_consists_of_vocabulary_words(tmp_path: Path) -> None:
    for name in ("frozenlake", "nim"):
        of = source(
            tmp_path,
            {"env": name, "tag": "on", "options": {"grammar": True}},
            {"env": name, "tag": "off"},
        )
        assert of.allowed_words("off") == ()
        assert set(of.allowed_words("on")) < set(of.words())
