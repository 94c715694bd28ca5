"""Failures and malformed values of user code become typed errors that say what was
wrong; valid ones pass.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollweave.envs.base import Observation, Score, Step, new_task
from rollweave.envs.boundary import GuardedEnv, checked_score, score_episode
from rollweave.envs.threads import EnvThreads
from rollweave.schema.errors import EnvError, RewardError
from rollweave.schema.work import Task

from .worlds import HERE, draw, episode, source

TASK = new_task(seed=5)


def guarded(name: str, **options: Any) -> GuardedEnv:
    return GuardedEnv(f"{HERE}{name}", options)


async def test_a_sync_environment() -> None:
    env = guarded("Echo", greeting="hi")
    assert await env.reset(TASK) == Observation.of("hi 5")
    assert await env.step("a") == Step.of("you said a", reward=0.25)
    assert await env.step("end") == Step.of("you said end", reward=0.25, done=True, success=True)
    await env.close()


async def test_passes_the_finish_reason_to_an_environment_that_takes_it() -> None:
    env = guarded("Listener")
    assert await env.step("a", finish_reason="length") == Step.of("a: length")
    assert await env.step("a") == Step.of("a: stop")
    assert await guarded("Echo").step("a", finish_reason="length") == Step.of(
        "you said a", reward=0.25
    )


async def test_an_async_environment_lives_between_its_calls_and_is_closed() -> None:
    env = guarded("AsyncEcho")
    await env.reset(TASK)
    assert await env.step("a") == Step.of("alive: True")
    await env.close()
    await asyncio.sleep(0)
    assert await env.step("a") == Step.of("alive: False")


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        ("raise", r"step raised KeyError: 'lost key' \(.*worlds\.py:\d+\)"),
        ("exit", "step raised SystemExit: 3"),
        ("interrupt", "step raised KeyboardInterrupt"),
        ("cancelled", "step raised CancelledError"),
        ("closed", "step raised GeneratorExit: not of ours"),
        ("untraceable", "step raised Untraceable: x"),
        ("unanswering", "step must return Step of the right types: KeyboardInterrupt"),
        ("unconvertible", "step must return Step of the right types: KeyboardInterrupt"),
        ("base", "step raised Foreign: of another library"),
        ("speechless", "step raised Speechless: .its text cannot be shown"),
        ("none", "step must return Step, got None"),
        ("nan", r"step must return a finite reward, at most 1e\+12, got nan"),
        ("vast", r"step must return a finite reward, at most 1e\+12, got -1e\+300"),
        ("wrong type", "step must return Step of the right types: Expected `str`, got `int`"),
        ("wrong role", "step must return Step of the right types: Invalid enum value 'judge'"),
        ("silent", "at least one message while the episode is not done"),
        ("unshowable", "got a Unshowable that cannot be shown"),
    ],
)
async def test_refuses_an_invalid_step(action: str, problem: str) -> None:
    env = guarded("Echo")
    await env.reset(TASK)
    with pytest.raises(EnvError, match=problem):
        await env.step(action)


async def test_numbers_of_numpy_and_lists_pass_as_ours() -> None:
    env = guarded("Echo")
    await env.reset(TASK)
    step = await env.step("numpy")
    assert step == Step.of("np", reward=0.5, done=True)
    assert type(step.reward) is float
    assert type(step.done) is bool
    assert isinstance((await env.step("list")).messages, tuple)


async def test_an_episode_begins_with_a_message() -> None:
    with pytest.raises(EnvError, match="reset must return at least one message, got none"):
        await guarded("Mute").reset(TASK)


async def test_a_constructor_and_a_close_that_fail() -> None:
    with pytest.raises(EnvError, match="making the environment raised RuntimeError: no database"):
        guarded("BadConstructor")
    with pytest.raises(EnvError, match="making the environment raised TypeError"):
        guarded("Echo", color="red")
    with pytest.raises(EnvError, match=r"making the environment: .*cannot import nowhere"):
        GuardedEnv("nowhere:X", {})
    with pytest.raises(EnvError, match="close raised RuntimeError: cannot close"):
        await guarded("BadClose").close()


async def score(
    name: str, *actions: str, rewards: tuple[float, ...] = (), success: bool | None = None
) -> Score:
    threads = EnvThreads()
    thread = threads.lease("one score")
    try:
        return await score_episode(
            f"{HERE}{name}",
            {},
            episode(TASK, *actions, rewards=rewards, success=success),
            via=thread.via,
        )
    finally:
        thread.release()
        threads.close()


async def test_without_a_hook_the_reward_is_the_sum_of_the_steps() -> None:
    assert await score("Echo", "a", rewards=(0.1, 0.2, 0.7), success=True) == Score(
        reward=1.0, success=True
    )
    assert await score("Echo") == Score(reward=0.0)


async def test_a_hook_gives_a_number_or_a_score() -> None:
    assert await score("Scored", "x", success=False) == Score(reward=0.75, success=False)
    assert await score("Scored", "score") == Score(reward=2.0, success=True)
    assert await score("Scored", "numpy") == Score(reward=0.5)
    assert await score("Scored", "true") == Score(reward=1.0)
    assert await score("AsyncScored", "a", "b") == Score(reward=2.0)


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        ("raise", r"score raised ValueError: bad \(.*worlds\.py"),
        ("stop", "score raised RuntimeError: StopIteration"),
        ("stop speechless", "score raised RuntimeError: StopIteration: .its text cannot be shown"),
        ("cancelled", "score raised CancelledError"),
        ("closed", r"score raised GeneratorExit: not of ours \(.*worlds\.py"),
        ("unanswering", "score must return a number or a Score: KeyboardInterrupt"),
        ("unconvertible", "score must return a number or a Score: KeyboardInterrupt"),
        ("none", "must return a finite number, .*, or a Score, got None"),
        ("nan", "must return a finite number, .*, or a Score, got Score"),
    ],
)
async def test_refuses_an_invalid_reward(action: str, problem: str) -> None:
    with pytest.raises(RewardError, match=problem):
        await score("Scored", action)


async def test_a_generator_exit_of_a_coroutine_is_its_own() -> None:
    env = guarded("AsyncEcho")
    await env.reset(TASK)
    with pytest.raises(EnvError, match="step raised GeneratorExit: not of ours"):
        await env.step("closed")
    await env.close()
    with pytest.raises(RewardError, match="score raised GeneratorExit"):
        await score("AsyncScored", "closed")


def test_a_coroutine_that_python_closes_ends_without_an_error() -> None:
    waiting = guarded("AsyncEcho").step("wait")
    loop = asyncio.new_event_loop()
    task = loop.create_task(waiting)
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.run_until_complete(asyncio.sleep(0))
    waiting.close()
    loop.close()


async def test_a_reward_that_blocks_does_not_block_the_loop() -> None:
    blocked = asyncio.create_task(score("Scored", "block"))
    assert await score("Scored", "x") == Score(reward=0.75)
    assert not blocked.done()
    blocked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await blocked


async def test_cancelling_passes_through() -> None:
    env = guarded("AsyncEcho")
    await env.reset(TASK)
    waiting = asyncio.create_task(env.step("wait"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await env.close()


TEXT = st.text(st.one_of(st.characters(categories=["Cs"]), st.characters()), min_size=1)
SURROGATE = "\udcff"


class RaisingStr:
    """Uses `WORDS` wherever it can: `how` selects its answers and exceptions."""

    WORDS = ""

    def __init__(self, *, how: str) -> None:
        self.how = how

    def reset(self, task: Task) -> Observation:
        if self.how == "reset raises":
            raise OSError(self.WORDS)
        return Observation.of(self.WORDS, state_key=self.WORDS)

    def step(self, action: str) -> Any:
        if self.how == "step raises":
            raise EnvError(self.WORDS)
        if self.how == "garbage":
            return RaisingRepr(self.WORDS)
        return Step.of(self.WORDS, state_key=self.WORDS)

    def close(self) -> None:
        if self.how == "close raises":
            raise KeyError(self.WORDS)

    @classmethod
    def make_task(cls, **_: Any) -> Task:
        return msgspec.structs.replace(
            TASK, payload=json.dumps({"words": cls.WORDS}, ensure_ascii=False)
        )

    @classmethod
    def score(cls, episode: Any, options: Any) -> float:
        raise ValueError(cls.WORDS)


class RaisingRepr:
    def __init__(self, words: str) -> None:
        self.words = words

    def __repr__(self) -> str:
        return self.words


@given(
    words=TEXT,
    how=st.sampled_from(["answers", "reset raises", "step raises", "garbage", "close raises"]),
)
async def test_any_text_of_an_environment_is_made_valid(words: str, how: str) -> None:
    RaisingStr.WORDS = words
    env = GuardedEnv(f"{__name__}:RaisingStr", {"how": how})
    texts = []
    for call in (lambda: env.reset(TASK), lambda: env.step("a"), env.close):
        try:
            texts.append(await call())
        except EnvError as error:
            texts.append(str(error))
    with pytest.raises(RewardError) as raised:
        await score_episode(f"{__name__}:RaisingStr", {"how": how}, episode(TASK))
    msgspec.msgpack.encode([*texts, str(raised.value)])


def test_a_task_enters_with_valid_text(tmp_path: Path) -> None:
    RaisingStr.WORDS = SURROGATE
    tasks = source(tmp_path, {"env": f"{__name__}:RaisingStr", "options": {"how": ""}})
    assert draw(tasks, f"{__name__}:RaisingStr").payload == '{"words": "\ufffd"}'


async def test_keys_stay_different_where_they_are_no_text_or_too_long() -> None:
    keys = []
    for words in (SURROGATE, "\udcfe", "x" * 2000, "y" + "x" * 1999, "plain"):
        RaisingStr.WORDS = words
        env = GuardedEnv(f"{__name__}:RaisingStr", {"how": ""})
        keys.append((await env.reset(TASK)).state_key)
    assert len(set(keys)) == 5
    assert keys[-1] == "plain"
    assert all(len(key) == 32 for key in keys[:-1])


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (Step.of("x", reward=10**400), "of the right types"),  # type: ignore[arg-type]
        (Step(messages=[[[]]]), "of the right types"),  # type: ignore[list-item]
        (
            Step.of("x" * (2 << 20)),
            "step must return messages of at most 1048576 characters, got 2097152",
        ),
    ],
)
async def test_values_beyond_all_bounds_are_refused(answer: Step, problem: str) -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]

    class Unprintable:
        def reset(self, task: Task) -> Observation:
            return Observation(messages=deep)

        def step(self, action: str) -> Step:
            return answer

    env = guarded("Echo")
    env._env = Unprintable()
    with pytest.raises(EnvError, match="reset must return Observation of the right types"):
        await env.reset(TASK)
    with pytest.raises(EnvError, match=problem):
        await env.step("a")


@pytest.mark.parametrize("value", [10**400, Score(reward=10**400)])
def test_a_score_beyond_all_bounds_is_refused(value: Any) -> None:
    with pytest.raises(RewardError):
        checked_score(value, "score", success=None)


async def test_a_long_error_is_cut() -> None:
    RaisingStr.WORDS = "x" * 10_000_000
    env = GuardedEnv(f"{__name__}:RaisingStr", {"how": "reset raises"})
    with pytest.raises(EnvError) as raised:
        await env.reset(TASK)
    assert len(str(raised.value)) < 10_000
    assert "characters left out" in str(raised.value)
