"""The user's failures and garbage become typed errors that say what was wrong; what is right passes."""

import asyncio
import math
from typing import Any

import pytest

from rollweave.envs.base import Observation, Score, Step, new_task
from rollweave.envs.boundary import GuardedEnv, scored
from rollweave.schema.errors import EnvError, RewardError
from rollweave.schema.sections import FaultsConfig

from .worlds import HERE, episode

NONE = FaultsConfig()
TASK = new_task(seed=5)


def guarded(name: str, **options: Any) -> GuardedEnv:
    return GuardedEnv(f"{HERE}{name}", options, faults=NONE, seed=0, block=False)


async def test_a_sync_environment() -> None:
    env = guarded("Echo", greeting="hi")
    assert await env.reset(TASK) == Observation.of("hi 5")
    assert await env.step("a") == Step.of("you said a", reward=0.25)
    assert await env.step("end") == Step.of("you said end", reward=0.25, done=True, success=True)
    await env.close()


async def test_an_async_environment_lives_between_its_calls_and_frees_what_it_took() -> None:
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
async def test_what_is_wrong_with_a_step(action: str, problem: str) -> None:
    env = guarded("Echo")
    await env.reset(TASK)
    with pytest.raises(EnvError, match=problem):
        await env.step(action)


async def test_numbers_of_numpy_and_lists_pass_as_ours() -> None:
    env = guarded("Echo")
    await env.reset(TASK)
    step = await env.step("numpy")
    assert (step, type(step.reward), type(step.done)) == (Step.of("np", reward=0.5, done=True), float, bool)
    assert isinstance((await env.step("list")).messages, tuple)


async def test_an_episode_begins_with_a_message() -> None:
    with pytest.raises(EnvError, match="reset must return at least one message, got none"):
        await guarded("Mute").reset(TASK)


async def test_a_constructor_and_a_close_that_fail() -> None:
    with pytest.raises(EnvError, match="making the environment raised RuntimeError: no database"):
        guarded("BadConstructor")
    with pytest.raises(EnvError, match="making the environment raised TypeError"):
        guarded("Echo", colour="red")
    with pytest.raises(EnvError, match=r"making the environment: .*cannot import nowhere"):
        GuardedEnv("nowhere:X", {}, faults=NONE, seed=0, block=False)
    with pytest.raises(EnvError, match="close raised RuntimeError: cannot close"):
        await guarded("BadClose").close()


async def score(name: str, *said: str, rewards: tuple[float, ...] = (), success: bool | None = None) -> Score:
    return await scored(f"{HERE}{name}", {}, episode(TASK, *said, rewards=rewards, success=success), faults=NONE, seed=0)


async def test_without_a_hook_the_reward_is_the_sum_of_the_steps() -> None:
    assert await score("Echo", "a", rewards=(0.1, 0.2, 0.7), success=True) == Score(reward=1.0, success=True)
    assert await score("Echo") == Score(reward=0.0)


async def test_a_hook_gives_a_number_or_a_score() -> None:
    assert await score("Scored", "x", success=False) == Score(reward=0.75, success=False)
    assert await score("Scored", "score") == Score(reward=2.0, success=True)
    assert await score("Scored", "numpy") == Score(reward=0.5)
    assert await score("AsyncScored", "a", "b") == Score(reward=2.0)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("raise", r"score raised ValueError: bad \(.*worlds\.py"),
        ("stop", "score raised RuntimeError: StopIteration"),
        ("cancelled", "score raised CancelledError"),
        ("none", "must return a finite number, .*, or a Score, got None"),
        ("nan", "must return a finite number, .*, or a Score, got Score"),
    ],
)
async def test_what_is_wrong_with_a_reward(said: str, problem: str) -> None:
    with pytest.raises(RewardError, match=problem):
        await score("Scored", said)


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


def test_a_true_reward_is_a_number() -> None:
    assert asyncio.run(score("Scored", "true")).reward == 1.0
    assert math.isfinite(asyncio.run(score("Scored", "true")).reward)
