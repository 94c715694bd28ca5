"""The workload of bench `scheduling`: tasks of a few turns, and occasionally of dozens,
with equally many tokens in each turn.

Nothing is learned here: every episode has reward 1, so all advantages are 0.
Invariants: the number of an episode's turns depends on the task and on the words of its
first turn alone, so that members of a group differ, and equal samples give equal
episodes, independent of engine and order. What is visible of the length is what agents
see: a longer prompt for harder tasks, and after each turn the number of tests that
still fail, both with noise.
"""

import asyncio
import math
import random
from collections.abc import Sequence

from rollweave.envs.base import Observation, Options, Split, Step, new_task, payload_of
from rollweave.schema.base import mix
from rollweave.schema.work import Task

MEDIAN_TURNS = 2.5
TASK_SIGMA, MEMBER_SIGMA = 0.9, 0.5
"""Sigma of the logarithm of the turns, between tasks and between members of a group:
assumptions. The longest of 64 has about ten times the median.
"""

MOST_TURNS = 40

NOISE = 0.5
"""Sigma of the logarithm of the noise in prompts and failing tests."""

ACTION_WORDS = tuple(f" say{index}" for index in range(48))
"""Words that the agent may sample: so many that it seldom samples an empty turn, which
ends it.
"""

OBSERVATION_WORDS = (" task", " part", " passed", " failed")


class LongTask:
    """An environment with a prompt of 8 to 48 words, and 4 to 16 words in each
    answer.
    """

    def __init__(self) -> None:
        self._task_turns = 0.0
        self._left = 0
        self._seed = 0
        self._started = False

    def reset(self, task: Task) -> Observation:
        payload = payload_of(task)
        self._seed, self._task_turns = task.seed, float(payload["turns"])
        words = 8 + min(
            40,
            round(
                4 * self._task_turns * _noise_factor(random.Random(mix(task.seed, "prompt")), NOISE)
            ),
        )
        return Observation.of(" task" + " part" * (words - 1))

    async def step(self, action: str) -> Step:
        await asyncio.sleep(random.lognormvariate(math.log(0.05), 1.0))
        if not self._started:
            self._started = True
            own = random.Random(mix(self._seed, "member", action))
            self._left = min(
                MOST_TURNS, max(1, round(self._task_turns * _noise_factor(own, MEMBER_SIGMA)))
            )
            self._seed = own.getrandbits(63)
        self._left -= 1
        if not self._left:
            return Step.of(" passed", reward=1.0, done=True, success=True)
        failed = min(
            12,
            max(
                1,
                round(
                    self._left
                    / 2
                    * _noise_factor(random.Random(mix(self._seed, self._left)), NOISE)
                ),
            ),
        )
        return Step.of(" passed" * 4 + " failed" * failed)

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        """Make a task whose difficulty is log-normal."""
        own = mix(seed, split, index)
        return new_task(
            seed=own, turns=MEDIAN_TURNS * _noise_factor(random.Random(own), TASK_SIGMA)
        )

    @classmethod
    def words(cls, options: Options) -> Sequence[str]:
        return [*OBSERVATION_WORDS, *ACTION_WORDS]

    @classmethod
    def allowed_words(cls, options: Options) -> Sequence[str]:
        return ACTION_WORDS


def _noise_factor(rng: random.Random, sigma: float) -> float:
    """Return a random factor with median 1."""
    return math.exp(rng.gauss(0.0, sigma))
