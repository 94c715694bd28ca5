"""Environments of the package verifiers, which runs where it is installed."""

import asyncio
import importlib.util
import json
import signal
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from rollweave.envs.base import Score, Split, payload_of
from rollweave.envs.handlers.base import Job
from rollweave.schema.chat import Message
from rollweave.schema.errors import ConfigError, EnvError, RewardError
from rollweave.schema.work import Task
from rollweave_envs.verifiers import Verifiers
from tests.envs.handlers.agents import Scripted, calls


def missing(name: str) -> str:
    """Return why verifiers has no object of this name here, or ""."""
    if importlib.util.find_spec("verifiers") is None:
        return "verifiers is not installed"
    import verifiers

    try:
        assert getattr(verifiers, name)
    except AttributeError as error:
        return f"verifiers {verifiers.__version__}: {error}"
    return ""


real = pytest.mark.skipif(bool(missing("load_environment")), reason=missing("load_environment"))
with_tools = pytest.mark.skipif(bool(missing("ToolEnv")), reason=missing("ToolEnv"))


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules, each an environment's package."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = "echo counting tools both ranked completion evaluated failing"
    for name in names.split():
        text = f"from {__package__}.verifiers_environments import {name} as load_environment\n"
        (tmp_path / f"the_{name}.py").write_text(text)
    return tmp_path


def first_task(name: str, *, split: Split = Split.TRAIN, index: int = 0, **arguments: Any) -> Task:
    options = {"id": name, "arguments": arguments}
    return Verifiers.make_task(index=index, seed=1, split=split, options=options)


def row_of(task: Task) -> dict[str, Any]:
    row = payload_of(task)["row"]
    assert isinstance(row, dict)
    return row


async def attempt(agent: Scripted, name: str, task: Task, **arguments: Any) -> tuple[Score, Any]:
    handler = Verifiers(id=name, arguments=arguments)
    await handler.init(Job(task=task, seed=0, sandboxes=None))  # type: ignore[arg-type]
    try:
        await handler.run(agent)
    finally:
        await handler.close()
    return await handler.eval(), handler.final_result()


@real
async def test_a_question_is_answered_and_scored_by_the_rubric(packages: Path) -> None:
    task = first_task("the-echo", system="Be brief.")
    answer = row_of(task)["answer"]
    agent = Scripted([answer])
    score, result = await attempt(agent, "the-echo", task, system="Be brief.")
    assert score == Score(reward=1.5, success=True)
    assert result == {
        "metrics": {"exact": 1.0, "brief": 1.0, "num_turns": 1.0},
        "stop_condition": "max_turns_reached",
    }
    assert agent.messages == [
        Message(role="system", content="Be brief."),
        Message(role="user", content=f"Say {answer}."),
    ]
    wrong, _ = await attempt(Scripted(["something else"]), "the-echo", task, system="Be brief.")
    assert wrong == Score(reward=0.0, success=False)


@real
async def test_the_environment_answers_over_several_turns(packages: Path) -> None:
    agent = Scripted(["1", "2", "3"])
    score, result = await attempt(agent, "the_counting", first_task("the_counting"))
    assert score == Score(reward=0.75, success=True)
    assert result["stop_condition"] == "counted"
    assert [message.content for message in agent.messages[1:]] == [
        "1",
        "1, and then?",
        "2",
        "2, and then?",
    ]


@with_tools
async def test_the_environments_tools_are_offered_and_answered(packages: Path) -> None:
    agent = Scripted([calls(("add", {"a": 2, "b": 3}), ("add", "{")), "5"])
    score, result = await attempt(agent, "the-tools", first_task("the-tools"))
    assert score.reward == 1.0
    assert [tool.name for tool in agent.tools[0]] == ["add"]
    assert set(agent.tools[0][0].parameters["properties"]) == {"a", "b"}
    answers = [message for message in agent.messages if message.role == "tool"]
    assert (answers[0].tool_call_id, answers[0].content) == ("call-0", "5")
    assert "Expecting property name" in answers[1].content
    assert result["metrics"]["add_calls"] == 2.0


@real
async def test_used_up_turns_end_the_rollout_which_is_scored(packages: Path) -> None:
    agent = Scripted(["1", "2", "3"], turns=2)
    score, _ = await attempt(agent, "the_counting", first_task("the_counting"))
    assert score == Score(reward=0.25, success=False)


@real
async def test_a_failed_reward_function_is_no_reward(packages: Path) -> None:
    task = first_task("the_counting", broken=True)
    with pytest.raises(RewardError) as caught:
        await attempt(Scripted(["1", "2", "3"]), "the_counting", task, broken=True)
    assert str(caught.value) == (
        "the reward function all_numbers raised ZeroDivisionError: no numbers"
    )


@real
async def test_a_group_routes_to_its_environments(packages: Path) -> None:
    tasks = [first_task("the_both", index=index) for index in range(12)]
    kinds = {json.dumps(row_of(task)["info"], sort_keys=True): task for task in tasks}
    echo = next(task for text, task in kinds.items() if '"echo"' in text)
    counting = next(task for text, task in kinds.items() if '"counting"' in text)
    score, _ = await attempt(Scripted([row_of(echo)["answer"]]), "the_both", echo)
    assert score.reward == 1.5
    with pytest.raises(RewardError, match="all_numbers raised"):
        await attempt(Scripted(["1", "2", "3"]), "the_both", counting)


@real
async def test_a_failed_agent_fails_the_attempt(packages: Path) -> None:
    agent = Scripted([ValueError("the template refuses this")])
    with pytest.raises(EnvError, match=r"ModelError: .*the template refuses this"):
        await attempt(agent, "the_echo", first_task("the_echo"))


@real
async def test_a_cancelled_rollout_is_cleaned_up(packages: Path) -> None:
    from . import verifiers_environments

    asked = asyncio.Event()

    class Waiting(Scripted):
        async def chat(self, messages: Any, **_: Any) -> Message:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError("it is cancelled")

    task = first_task("the_counting")
    before = verifiers_environments.Counting.cleaned
    running = asyncio.create_task(attempt(Waiting([]), "the_counting", task))
    async with asyncio.timeout(30):
        await asked.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert verifiers_environments.Counting.cleaned == before + 1


@real
def test_each_row_belongs_to_one_split(packages: Path) -> None:
    drawn = {
        split: {
            row_of(first_task("the_counting", split=split, index=i))["answer"] for i in range(8)
        }
        for split in (Split.TRAIN, Split.VALIDATION)
    }
    assert drawn[Split.TRAIN]
    assert not drawn[Split.TRAIN] & drawn[Split.VALIDATION]
    again = [first_task("the_counting", index=3) for _ in range(2)]
    assert again[0] == again[1]
    held_out = [
        row_of(first_task("the_echo", split=split, index=i, held_out=True))["answer"]
        for split in (Split.VALIDATION, Split.TEST)
        for i in range(2)
    ]
    assert sorted(held_out) == ["green", "green", "red", "red"]


@real
def test_the_process_keeps_its_signal_handlers(packages: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    Verifiers(id="the_echo", arguments={"system": "not loaded before"})
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@real
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no-such", "options.id 'no-such' must load: ValueError: Could not import 'no-such'"),
        ("the_failing", "must load: RuntimeError: .*no key"),
        ("the_ranked", "must score each rollout alone, got a SingleTurnEnv whose rubric scores"),
        ("the_completion", "must converse in chat messages, got .* message_type 'completion'"),
    ],
)
def test_names_what_cannot_work(packages: Path, name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        Verifiers(id=name)
    assert "\n" not in str(caught.value)


@real
def test_refuses_an_environment_without_tasks(packages: Path) -> None:
    with pytest.raises(ConfigError, match="'the_evaluated' must have a data set to train on"):
        first_task("the_evaluated")
    assert row_of(first_task("the_evaluated", split=Split.TEST))["answer"]


def test_names_the_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=r"verifiers cannot be imported: .*pip install"):
        Verifiers(id="missing")


def test_names_the_version_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = types.ModuleType("verifiers")
    newer.__dict__["__version__"] = "0.4.0"
    monkeypatch.setitem(sys.modules, "verifiers", newer)
    with pytest.raises(ConfigError, match=r"from 0.3 to below 0.4 have .*, got 0\.4\.0$"):
        Verifiers(id="newer")
