"""Environments with GEM's interface, and those of GEM itself where it is installed."""

import random
import threading
from typing import Any

import numpy as np
import pytest

from rollweave.envs.base import Step, new_task
from rollweave.schema.errors import ConfigError
from rollweave_envs.gem import Gem

from .gem_like import GuessTheNumber

MAKER = f"{__package__}.gem_like:make"
GUESS = "game:GuessTheNumber"


def guess(**options: Any) -> Gem:
    return Gem(id=GUESS, maker=MAKER, **options)


def number_of(env: Gem) -> int:
    return int(env._env.number)


def test_a_game_is_played_in_words() -> None:
    env = guess(prompt="Play.\n", make={"largest": 3, "turns": 2})
    first = env.reset(new_task(seed=5)).messages[0].content
    assert first == "Play.\nGuess a number from 1 to 3.\nEnter your guess."
    wrong = number_of(env) % 3 + 1
    text = ("lower" if wrong > number_of(env) else "higher") + "\nEnter your next guess."
    assert env.step(str(wrong)) == Step.of(text, state_key=text)
    end = env.step(str(number_of(env)))
    assert (end.reward, end.done, end.success) == (1.0, True, True)
    env.close()
    assert env._env.closed


def test_a_lost_game_is_no_success() -> None:
    env = guess(make={"turns": 1})
    env.reset(new_task(seed=5))
    end = env.step(str(number_of(env) % 20 + 1))
    assert (end.reward, end.done, end.success) == (0.5, True, False)


def test_what_the_environment_says_of_success_counts() -> None:
    env = Gem(id="math:Question", maker=MAKER)
    env.reset(new_task(seed=1))
    assert env.step("2") == Step.of("", reward=1.0, done=True, success=True)
    assert env.step("3") == Step.of("", reward=0.0, done=True, success=False)


def test_equal_seeds_begin_equal_episodes() -> None:
    numbers = []
    for seed in [*range(12), *range(12)]:
        env = guess()
        env.reset(new_task(seed=seed))
        numbers.append(number_of(env))
    assert numbers[:12] == numbers[12:]
    assert len(set(numbers)) > 3


def test_resets_in_other_threads_do_not_mix() -> None:
    """The first reset waits between its seed and its draw, while others would seed."""
    alone = guess()
    alone.reset(new_task(seed=1))
    first, others = guess(), [guess() for _ in range(4)]
    GuessTheNumber.pause.clear()
    threads = [threading.Thread(target=first.reset, args=(new_task(seed=1),))]
    threads += [
        threading.Thread(target=env.reset, args=(new_task(seed=2 + place),))
        for place, env in enumerate(others)
    ]
    try:
        for thread in threads:
            thread.start()
    finally:
        GuessTheNumber.pause.set()
        for thread in threads:
            thread.join(10)
    assert number_of(first) == number_of(alone)


def test_the_random_numbers_of_the_process_stay() -> None:
    env = guess()
    random.seed(3)
    np.random.seed(3)
    expected = [random.random(), np.random.random()]
    random.seed(3)
    np.random.seed(3)
    env.reset(new_task(seed=1))
    assert [random.random(), np.random.random()] == expected


def test_refuses_invalid_options() -> None:
    with pytest.raises(ConfigError, match=r"options\.id must be an environment that .* makes, got"):
        Gem(id="game:None", maker=MAKER)
    with pytest.raises(ConfigError, match=r"options\.maker must be a function"):
        Gem(id=GUESS, maker=f"{__package__}.gem_like:GAMES")
    with pytest.raises(ConfigError, match=r"options\.maker: cannot import no.such.module"):
        Gem(id=GUESS, maker="no.such.module:make")


def test_the_games_of_gem_itself() -> None:
    pytest.importorskip("gem", reason="needs GEM (docs/ENVIRONMENTS.md says how to install it)")
    env = Gem(id="game:GuessTheNumber-v0-easy")
    first = env.reset(new_task(seed=7)).messages[0].content
    assert "guess the number between 1 and 10" in first
    assert first.endswith("Enter your next guess.")
    secret = env._env.game_number
    again = Gem(id="game:GuessTheNumber-v0-easy")
    again.reset(new_task(seed=7))
    assert again._env.game_number == secret
    wrong = env.step(f"\\boxed{{{secret % 10 + 1}}}")
    assert not wrong.done
    assert "the target number is" in wrong.messages[0].content
    end = env.step(f"I say \\boxed{{{secret}}}")
    assert (end.reward, end.done, end.success) == (1.0, True, True)
    bad = again.step("no number")
    assert (bad.done, bad.success) == (True, False)
