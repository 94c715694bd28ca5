"""Datasets of questions: reasoning-gym's and JSONL files; and gymnasium's environments
in words.
"""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy
import pytest

from rollweave.envs.base import Episode, Observation, Score, Split, Step, new_task, split_of
from rollweave.envs.gym import Gym
from rollweave.envs.jsonl import Jsonl
from rollweave.envs.tasks import TaskSource
from rollweave.rollout.chat.tools import openai_message
from rollweave.rollout.gateway.requests import parse_chat
from rollweave.schema.chat import Message, ToolCall
from rollweave.schema.config.training import FINAL_TASKS_FROM
from rollweave.schema.errors import ConfigError, RewardError
from rollweave.schema.media import Image
from rollweave.schema.work import Purpose, Task

from .worlds import GUESS, draw, episode, source

REWARD = f"{__name__}:reward"


def reward(record: dict[str, Any], answer: str) -> float:
    return 1.0 if answer == record["answer"] else 0.0


async def slow_reward(record: dict[str, Any], answer: str) -> Score:
    await asyncio.sleep(0)
    return Score(reward=len(answer) / 10, success=False)


def bad_reward(record: dict[str, Any], answer: str) -> float:
    raise ZeroDivisionError("no")


def score(of: TaskSource, task: Task, *actions: str) -> Score:
    return asyncio.run(of.provider(task.tag).score(episode(task, *actions), seed=0))


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
    assert [message.content for message in env.reset(draw(of, "data", 0)).messages] == [
        "a",
        "b",
        "c",
    ]
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
        assert messages == [
            (hi,),
            (hi, CALLED, Message(role="tool", content="3", tool_call_id="c")),
        ]
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


def reasoning(tmp_path: Path, dataset: str, **options: Any) -> TaskSource:
    return source(
        tmp_path,
        {"env": "gym", "tag": "r", "options": {"id": f"reasoning_gym/{dataset}", **options}},
    )


def test_reasoning_prompts_and_scores(tmp_path: Path) -> None:
    from rollweave.envs.reasoning import INSTRUCTION  # reasoning-gym takes a second

    options: Any = {"make": {"min_terms": 2, "max_terms": 2}, "prompt": "Sums. "}
    of = reasoning(tmp_path, "chain_sum", **options)
    task = draw(of, "r")
    env = Gym(id="reasoning_gym/chain_sum", **options)
    question = cast(Observation, env.reset(task)).messages[0].content
    assert question.startswith("Sums. ")
    assert question.endswith("between <answer> and </answer>.")
    terms = question.removesuffix(INSTRUCTION).split(": ")[1].split(" =")[0].split()
    answer = sum(
        int(sign + term) for sign, term in zip(["+", *terms[1::2]], terms[::2], strict=True)
    )
    assert env.step("anything") == Step(done=True)
    assert score(
        of, task, f"I think <answer>0</answer>, no: <answer> {answer} </answer>."
    ) == Score(reward=1.0, success=True)
    assert score(of, task, str(answer)) == Score(reward=1.0, success=True)
    assert score(of, task, "<answer>no</answer>").success is False
    assert score(of, task).success is False


def test_an_unreadable_answer_is_wrong_not_an_error(tmp_path: Path) -> None:
    of = reasoning(tmp_path, "prime_factorization")
    assert score(of, draw(of, "r"), "<answer>nonsense ×</answer>") == Score(
        reward=0.0, success=False
    )


def test_refuses_invalid_reasoning_options() -> None:
    with pytest.raises(ConfigError, match="must be a dataset of reasoning-gym, got 'nothing'"):
        Gym(id="reasoning_gym/nothing")
    with pytest.raises(ConfigError, match=r"got 'chain_sum' with \{\"min_terms\": -1\}"):
        Gym(id="reasoning_gym/chain_sum", make={"min_terms": -1})
    with pytest.raises(
        ConfigError,
        match=r"no actions and no observe for a dataset, got 'reasoning_gym/.* with \('a',\)",
    ):
        Gym(id="reasoning_gym/chain_sum", actions=("a",))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", ""),
        (" 3\n", "3"),
        ("<answer>1</answer> <answer>\n2 </answer>", "2"),
        ("<answer>1", "<answer>1"),
        ("a <answer></answer>", ""),
    ],
)
def test_the_answer_in_a_text(text: str, answer: str) -> None:
    from rollweave.envs.reasoning import answer_in  # reasoning-gym takes a second

    assert answer_in(text) == answer


def guess(**options: Any) -> Any:
    return Gym(id=GUESS, **options)


def test_gymnasium_in_words() -> None:
    seen = Counter()
    for seed in range(12):
        env = guess(actions=["<a>", "<b>", "<c>"], prompt="Guess:")
        assert env.reset(new_task(seed=seed)).messages[0].content == "Guess: guess"
        assert env.step("b") == Step.of(" invalid", reward=-0.1)
        right = next(name for name in ("<a>", "<b>", "<c>") if env.step(f" {name} ").done)
        seen[right] += 1
    assert len(seen) == 3
    assert guess(actions=["<a>", "<b>", "<c>"]).words({"id": GUESS, "actions": ["<a>"]}) == [
        "<a>",
        " invalid",
    ]


def test_gymnasium_with_numbers_and_texts() -> None:
    env = guess()
    env.reset(new_task(seed=1))
    assert [env.step(text).reward for text in ("0", "4", "x", "²", "99999999999")] == [-0.1] * 5
    # this environment does not say
    assert [env.step(str(number)).success for number in (1, 2, 3)] == [None] * 3
    env = guess(make={"text": True})
    env.reset(new_task(seed=1))
    assert env.step("ab").reward == env.step("z").reward == -0.1
    assert sum(env.step(f" {letter}\n").reward > 0 for letter in "abc") == 1
    env.close()


def test_refuses_invalid_gymnasium_options() -> None:
    with pytest.raises(ConfigError, match="must be an environment of gymnasium, got 'Nothing-v0'"):
        Gym(id="Nothing-v0")
    with pytest.raises(
        ConfigError, match="must have Discrete or Text actions, Pendulum-v1 has Box"
    ):
        Gym(id="Pendulum-v1")
    with pytest.raises(ConfigError, match="must name every action"):
        guess(actions=["<a>"])
    with pytest.raises(ConfigError, match="must be value or render"):
        guess(observe="smell")


def test_gymnasiums_reward_is_the_sum_of_its_steps(tmp_path: Path) -> None:
    of = source(tmp_path, {"env": "gym", "tag": "g", "options": {"id": GUESS}})
    ended = episode(draw(of, "g"), "1", "2", rewards=(0.25, 1.0), success=True)
    assert asyncio.run(of.provider("g").score(ended, seed=0)) == Score(reward=1.25, success=True)


def test_an_episode_has_the_agents_messages() -> None:
    of = episode(new_task(), "a", "b")
    assert isinstance(of, Episode)
    assert of.actions() == ("a", "b")


class Pixels(gymnasium.Env[Any, Any]):
    """Renders pixels that say how many steps were taken."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 (gymnasium's declaration)
    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode, self._steps = render_mode, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return 0, 1.0, self._steps == 2, False, {}

    def render(self) -> Any:
        return numpy.full((2, 3, 3), self._steps, dtype=numpy.uint8)


def test_what_an_environment_renders_as_pixels_is_shown_as_an_image() -> None:
    name = "Pixels-v0"
    if name not in gymnasium.registry:
        gymnasium.register(name, entry_point=Pixels)
    options: dict[str, Any] = {
        "id": name,
        "make": {"render_mode": "rgb_array"},
        "observe": "render",
        "prompt": "Play.",
    }
    assert Gym.shows_images(options)
    assert not Gym.shows_images({**options, "observe": "value"})
    assert not Gym.shows_images({"id": "reasoning_gym/chain_sum"})
    env = Gym(**options)
    first = env.reset(new_task(seed=1))
    assert isinstance(first, Observation)
    (message,) = first.messages
    assert message.content == "Play."
    assert message.images == (Image.of_pixels(bytes(18), width=3),)
    step = env.step("1")
    assert isinstance(step, Step)
    assert step.messages[0].images == (Image.of_pixels(bytes([1]) * 18, width=3),)
    assert step.state_key != first.state_key
    env.close()
