"""The environments of gymnasium in words, and reasoning-gym's datasets of questions."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

from rollweave.envs.base import Observation, Score, Split, Step, new_task, split_of
from rollweave.envs.tasks import TaskSource
from rollweave.schema.errors import ConfigError
from rollweave.schema.work import Task
from rollweave_envs.gym import Gym
from tests.envs.worlds import GUESS, draw, episode, source


def score(of: TaskSource, task: Task, *actions: str) -> Score:
    return asyncio.run(of.provider(task.tag).score(episode(task, *actions)))


def reasoning(tmp_path: Path, dataset: str, **options: Any) -> TaskSource:
    return source(
        tmp_path,
        {"env": "gym", "tag": "r", "options": {"id": f"reasoning_gym/{dataset}", **options}},
    )


def test_reasoning_prompts_and_scores(tmp_path: Path) -> None:
    from rollweave_envs.reasoning import INSTRUCTION  # reasoning-gym takes a second

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


def test_shots_are_answered_questions_that_no_held_out_task_has(tmp_path: Path) -> None:
    options: Any = {"make": {"min_terms": 2, "max_terms": 2}, "shots": 3}
    of = reasoning(tmp_path, "chain_sum", **options)
    env, plain = (Gym(id="reasoning_gym/chain_sum", **{**options, "shots": n}) for n in (3, 0))
    task = draw(of, "r")
    first = cast(Observation, env.reset(task)).messages
    assert [message.role for message in first] == ["user", "assistant"] * 3 + ["user"]
    assert first[-1:] == cast(Observation, plain.reset(task)).messages
    for asked, answered in zip(first[:-1:2], first[1:-1:2], strict=True):
        question = asked.content.partition(": ")[2].partition(" =")[0]
        assert (
            answered.content
            == f"<answer>{sum(map(int, question.replace('+', ' ').replace('- ', '-').split()))}</answer>"
        )
        assert split_of(asked.content.partition("\n")[0]) is Split.TRAIN


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
    with pytest.raises(ConfigError, match=r"options\.shots must be at least 0, got -1"):
        Gym(id="reasoning_gym/chain_sum", shots=-1)
    with pytest.raises(ConfigError, match=r"no shots for an environment, got '.*' with 1"):
        guess(shots=1)


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
    from rollweave_envs.reasoning import answer_in  # reasoning-gym takes a second

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
    pixels: Any = {"id": "FrozenLake-v1", "make": {"render_mode": "rgb_array"}}
    with pytest.raises(ConfigError, match=r"render_mode must be ansi .*, got 'rgb_array'"):
        Gym(**pixels, observe="render")


def test_gymnasiums_reward_is_the_sum_of_its_steps(tmp_path: Path) -> None:
    of = source(tmp_path, {"env": "gym", "tag": "g", "options": {"id": GUESS}})
    ended = episode(draw(of, "g"), "1", "2", rewards=(0.25, 1.0), success=True)
    assert asyncio.run(of.provider("g").score(ended)) == Score(reward=1.25, success=True)
