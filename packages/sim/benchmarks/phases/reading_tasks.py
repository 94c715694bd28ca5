"""The workload of bench `phases`: an agent that reads a text in each turn, and answers
with words that change nothing.

Nothing is learned here: every episode has reward 1, so all advantages are 0. The texts
depend on the task and the turn alone.
"""

import asyncio
import random
from collections.abc import Sequence

from rollweave.envs.base import Observation, Options, Split, Step, new_task
from rollweave.schema.base import mix
from rollweave.schema.work import Task

TURNS = 4

TEXT_WORDS = tuple(f" word{index}" for index in range(64))
ACTION_WORDS = tuple(f" say{index}" for index in range(48))


class Reading:
    """An environment of `turns` turns, whose prompt and observations have `words` words
    each, and whose answers take `latency_s`.
    """

    def __init__(self, *, words: int, turns: int = TURNS, latency_s: float = 0.05) -> None:
        self._words, self._turns, self._latency_s = words, turns, latency_s
        self._seed = self._turn = 0

    def reset(self, task: Task) -> Observation:
        self._seed = task.seed
        return Observation.of(self._text())

    async def step(self, action: str) -> Step:
        await asyncio.sleep(self._latency_s)
        self._turn += 1
        if self._turn == self._turns:
            return Step.of(TEXT_WORDS[0], reward=1.0, done=True, success=True)
        return Step.of(self._text())

    def _text(self) -> str:
        rng = random.Random(mix(self._seed, "text", self._turn))
        return "".join(rng.choice(TEXT_WORDS) for _ in range(self._words))

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """Make a task."""
        return new_task(seed=mix(seed, split, index))

    @classmethod
    def words(cls, options: Options) -> Sequence[str]:
        return [*TEXT_WORDS, *ACTION_WORDS]

    @classmethod
    def allowed_words(cls, options: Options) -> Sequence[str]:
        return ACTION_WORDS
