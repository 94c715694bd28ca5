"""A game for untrained models: three turns, each rewarded by the share of its
characters that come early in the alphabet.

A random model's rewards differ between attempts. With `broken` in the payload, the
attempt fails.
"""

import json

from rollweave.envs.base import Observation, Step
from rollweave.schema.work import Task

EARLY = frozenset("abcdefghijklm ABCDEFGHIJKLM")


class Letters:
    def __init__(self) -> None:
        self._left = 3
        self._broken = False

    def reset(self, task: Task) -> Observation:
        self._broken = bool(json.loads(task.payload).get("broken"))
        return Observation.of(f"Letters, please: {task.seed % 10}")

    def step(self, action: str) -> Step:
        if self._broken:
            raise RuntimeError("broken on purpose")
        self._left -= 1
        reward = sum(letter in EARLY for letter in action) / max(1, len(action)) / 3
        return Step.of("Go on.", reward=reward, done=not self._left)
