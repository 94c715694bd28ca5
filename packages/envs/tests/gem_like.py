"""Games with GEM's interface, written after its source (gem/core.py, gem/envs/
game_env/guess_the_number.py): they seed the process's random numbers.
"""

import random
import threading
from typing import Any

import numpy as np


class GuessTheNumber:
    """Guess a number; the first turn explains, and each `info` has a suffix."""

    pause = threading.Event()
    """Set at all times, except where a test holds resets back."""
    pause.set()

    def __init__(self, largest: int = 20, turns: int = 4) -> None:
        self.largest, self.turns, self.closed = largest, turns, False
        self.reset()

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)
        self.pause.wait(10)
        self.number, self.turn = random.randint(1, self.largest), 0
        return f"Guess a number from 1 to {self.largest}.", {"suffix": "Enter your guess."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        info = {"suffix": "Enter your next guess."}
        if not action.strip().isdigit():
            return "No guess.", -0.1, True, False, info
        if int(action) == self.number:
            return "Congratulations!", 1.0, True, False, info
        if self.turn == self.turns:
            return "No more turns.", 0.5, True, True, info
        return ("lower" if int(action) > self.number else "higher"), 0.0, False, False, info

    def close(self) -> None:
        self.closed = True


class Question:
    """One question, whose `info` says whether the answer was correct, as `MathEnv`."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "What is 1 + 1?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(action == "2"), True, True, {"correct": action == "2"}


GAMES = {"game:GuessTheNumber": GuessTheNumber, "math:Question": Question}


def make(env_id: str, **kwargs: Any) -> Any:
    if env_id not in GAMES:
        raise ValueError(f"Environment {env_id} not found in registry.")
    return GAMES[env_id](**kwargs)
