"""Datasets of questions in JSONL files."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollweave.envs.base import Episode, Score, Split, Step, new_task, split_of
from rollweave.envs.jsonl import Jsonl
from rollweave.envs.tasks import TaskSource
from rollweave.rollout.chat.replies import openai_message
from rollweave.rollout.gateway.requests import parse_chat
from rollweave.schema.chat import Message, ToolCall
from rollweave.schema.config.training import FINAL_TASKS_FROM
from rollweave.schema.errors import ConfigError, RewardError
from rollweave.schema.work import Purpose, Task

from .worlds import draw, episode, source

REWARD = f"{__name__}:reward"


def reward(record: dict[str, Any], answer: str) -> float:
    return 1.0 if answer == record["answer"] else 0.0


async def slow_reward(record: dict[str, Any], answer: str) -> Score:
    await asyncio.sleep(0)
    return Score(reward=len(answer) / 10, success=False)


def bad_reward(record: dict[str, Any], answer: str) -> float:
    raise ZeroDivisionError("no")


def score(of: TaskSource, task: Task, *actions: str) -> Score:
    return asyncio.run(of.provider(task.tag).score(episode(task, *actions)))


def write(path: Path, *records: Any) -> str:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    return str(path)


def questions(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"what is {number}?", "answer": str(number)} for number in range(count)]


def data(tmp_path: Path, **options: Any) -> TaskSource:
    return source(
        tmp_path, {"env": "jsonl", "tag": "data", "options": {"reward": REWARD, **options}}
    )


def test_jsonl_prompts_and_scores(tmp_path: Path) -> None:
    of = data(tmp_path, path=write(tmp_path / "a.jsonl", *questions(100)), system="be exact")
    task = draw(of, "data")
    env = Jsonl(path=str(tmp_path / "a.jsonl"), reward=REWARD, system="be exact")
    first = env.reset(task)
    assert [message.role for message in first.messages] == ["system", "user"]
    number = first.messages[1].content.removeprefix("what is ").removesuffix("?")
    assert env.step(number) == Step(done=True)
    assert score(of, task, number) == Score(reward=1.0)
    assert score(of, task, number, "wrong") == score(of, task) == Score(reward=0.0)


def test_jsonl_prompts_may_be_conversations_and_rewards_async(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    path = write(tmp_path / "a.jsonl", {"ask": messages})
    held_out = write(tmp_path / "b.jsonl", {"ask": "other"})
    of = data(
        tmp_path, path=path, held_out=held_out, prompt="ask", reward=f"{__name__}:slow_reward"
    )
    env = Jsonl(path=path, held_out=held_out, reward=f"{__name__}:slow_reward", prompt="ask")
    expected = ["a", "b", "c"]
    assert [message.content for message in env.reset(draw(of, "data", 0)).messages] == expected
    for index in (0, FINAL_TASKS_FROM):
        assert env.reset(draw(of, "data", index, Purpose.EVAL)).messages[0].content == "other"
    assert score(of, draw(of, "data"), "12345") == Score(reward=0.5, success=False)
    failing = data(
        tmp_path, path=path, held_out=held_out, prompt="ask", reward=f"{__name__}:bad_reward"
    )
    with pytest.raises(RewardError, match="ZeroDivisionError: no"):
        score(failing, draw(failing, "data"), "x")


USER, TOOL = (
    {"role": "user", "content": "hi"},
    {"role": "tool", "content": "3", "tool_call_id": "c"},
)
FUNCTION = {"name": "f", "arguments": '{"a": 1}'}
CALL = {"id": "c", "type": "function", "function": FUNCTION}
CALLED = Message(
    role="assistant", content="", tool_calls=(ToolCall(id="c", name="f", arguments='{"a": 1}'),)
)


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ({"role": "developer", "content": "x"}, Message(role="system", content="x")),
        (
            {**USER, "name": None, "refusal": None, "audio": None},
            Message(role="user", content="hi"),
        ),
        ({**USER, "tool_calls": None, "tool_call_id": None}, Message(role="user", content="hi")),
        ({**USER, "tool_calls": []}, Message(role="user", content="hi")),
        ({**USER, "name": "bob"}, Message(role="user", content="hi", name="bob")),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "image_url": None}] * 2},
            Message(role="user", content="aa"),
        ),
        ({"role": "user", "content": []}, Message(role="user", content="")),
        ({"role": "assistant", "content": None}, Message(role="assistant", content="")),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, CALLED),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": None, "index": 0}]}, CALLED),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}],
            },
            CALLED,
        ),
        (TOOL, Message(role="tool", content="3", tool_call_id="c")),
        (
            {**TOOL, "annotations": [1], "cache_control": {}},
            Message(role="tool", content="3", tool_call_id="c"),
        ),
    ],
)
def test_a_message_is_read_as_the_gateway_reads_it(
    tmp_path: Path, message: dict[str, Any], read: Message
) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": [message]})
    ((_, messages),) = Jsonl.prompts({"path": path})
    asked = parse_chat(json.dumps({"model": "m", "messages": [message]}).encode())
    assert messages == asked.messages == (read,)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_are_read(tmp_path: Path, field: str) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": [USER, {"role": "assistant", "content": "a", field: "t"}, USER]},
    )
    ((_, messages),) = Jsonl.prompts({"path": path})
    assert messages[1] == Message(role="assistant", content="a", thoughts="t")
    assert openai_message(messages[1])["reasoning_content"] == "t"


def run_lines_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Any) -> None:
    """Run the lines of docs/DATASETS.md that convert other formats, with these rows in
    place of a data set of the hub and of a Parquet file of verl.
    """
    import datasets
    import pandas

    monkeypatch.chdir(tmp_path)
    pandas.DataFrame(rows).to_parquet("train.parquet")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    page = (Path(__file__).parents[2] / "docs" / "DATASETS.md").read_text()
    imports, lines = (
        page.split("## From other formats")[1].split("```python\n")[1].split("```")[0].split("\n\n")
    )
    for number, line in enumerate(lines.strip().splitlines()):
        exec(f"{imports}\n{line.replace('train.jsonl', f'{number}.jsonl')}", {})


def test_files_that_the_page_converts_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a table have all fields of all rows: what a message lacks is null."""
    rows: list[dict[str, Any]] = [
        {"prompt": [USER], "reward_model": {"ground_truth": "4", "style": "rule"}},
        {
            "prompt": [USER, {"role": "assistant", "tool_calls": [CALL]}, TOOL],
            "reward_model": {"ground_truth": "5"},
        },
    ]
    run_lines_of_the_page(tmp_path, monkeypatch, rows)
    for number in range(2):
        options = {
            "path": f"{number}.jsonl",
            "reward": "rollweave.envs.handlers.answers:boxed_reward",
        }
        messages = [messages for _, messages in Jsonl.prompts(options)]
        hi = Message(role="user", content="hi")
        expected = [(hi,), (hi, CALLED, Message(role="tool", content="3", tool_call_id="c"))]
        assert messages == expected
        assert Jsonl.score(
            episode(new_task(file=f"{number}.jsonl", row=1), r"\boxed{5}"), options
        ).success


def test_jsonl_visits_every_record_once_per_epoch(tmp_path: Path) -> None:
    of = data(tmp_path, path=write(tmp_path / "a.jsonl", *questions(80)))
    size = len({draw(of, "data", index).payload for index in range(200)})
    assert 45 < size < 75
    epochs = [
        [draw(of, "data", epoch * size + place).payload for place in range(size)]
        for epoch in range(3)
    ]
    assert all(len(set(epoch)) == size for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_jsonl_leaves_records_out_of_every_split(tmp_path: Path) -> None:
    """The others keep their splits."""
    path = write(tmp_path / "a.jsonl", *questions(80))
    splits = (Purpose.TRAIN, Purpose.EVAL)

    def drawn(*left_out: str) -> list[set[str]]:
        of = data(tmp_path, path=path, left_out=list(left_out))
        return [
            {draw(of, "data", index, purpose).payload for index in range(200)} for purpose in splits
        ]

    def rows(split: set[str]) -> set[int]:
        return {json.loads(payload)["row"] for payload in split}

    before = [rows(split) for split in drawn()]
    chosen = {min(split) for split in before}
    after = [rows(split) for split in drawn(*(f"{path}:{row + 1}" for row in chosen))]
    assert after == [split - chosen for split in before]
    options = {"path": path, "left_out": [f"{path}:1", f"{path}:80"]}
    assert len(list(Jsonl.prompts(options))) == 78


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ('{"prompt": "a"}\n{broken', r"a\.jsonl:2: must be a JSON object with 'prompt'"),
        (
            '{"prompt": "a"}\n\n{"question": "b"}',
            r"a\.jsonl:3 has no field 'prompt' \(its fields: question\)$",
        ),
        (
            '{"prompt": [{"role": "judge", "content": "x"}]}',
            r"a\.jsonl:1: prompt\.0\.role: .*judge",
        ),
        ('{"prompt": []}', r"a\.jsonl:1: prompt must .*no messages"),
        ('{"prompt": null}', r"a\.jsonl:1: prompt must be text or a list of messages, got None"),
        ('{"prompt": {"role": "user"}}', r"a\.jsonl:1: prompt must be text or a list of messages"),
        ('{"prompt": ["hi"]}', r"a\.jsonl:1: prompt\.0: Input should be an object"),
        (
            '{"prompt": [{"role": "user", "content": null}]}',
            r"a\.jsonl:1: prompt\.0\.content must be text, got None",
        ),
        (
            '{"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": 3}]}',
            r"a\.jsonl:1: prompt\.1\.content: .*got 3",
        ),
        (
            '{"prompt": [{"role": "user", "content": "a", "weight": 1}]}',
            r"a\.jsonl:1: prompt\.0\.weight must not be given: no field of that name is known",
        ),
        (
            '{"prompt": [{"from": "human", "value": "a"}]}',
            r"a\.jsonl:1: prompt\.0\.role: Field req",
        ),
        ('{"messages": [], "answer": 1}', r"no field 'prompt' \(its fields: messages, answer\)$"),
        ('{"prompt": "a\\ud83d"}', r"a\.jsonl:1: prompt must be valid text"),
        ("[1]", r"a\.jsonl:1: .*TypeError"),
        ("", "must have records"),
    ],
)
def test_names_a_malformed_line(tmp_path: Path, lines: str, problem: str) -> None:
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(ConfigError, match=problem):
        Jsonl(path=str(tmp_path / "a.jsonl"), reward=REWARD)


def test_refuses_invalid_jsonl_options(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "only one"})
    with pytest.raises(ConfigError, match="must be a readable file"):
        Jsonl(path="nowhere.jsonl", reward=REWARD)
    with pytest.raises(ConfigError, match=r"options\.reward: .* has no nothing"):
        Jsonl(path=path, reward=f"{__name__}:nothing")
    with pytest.raises(ConfigError, match=r"options\.reward must be a function"):
        Jsonl(path=path, reward=f"{__name__}:REWARD")
    of = data(tmp_path, path=path)
    assert split_of('"only one"') is Split.TRAIN
    assert draw(of, "data").tag == "data"
    with pytest.raises(
        ConfigError,
        match=r"must have records for split validation, .*a\.jsonl has none: add records, or set",
    ):
        draw(of, "data", 0, Purpose.EVAL)


def test_an_episode_has_the_agents_messages() -> None:
    of = episode(new_task(), "a", "b")
    assert isinstance(of, Episode)
    assert of.actions() == ("a", "b")
