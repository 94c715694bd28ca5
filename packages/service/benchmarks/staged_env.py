"""The environment of bench `service`'s ablation of the pools: it starts slowly, as a
container does, and is scored slowly, as a suite of tests is. Its steps take no time.

A task's payload has the median seconds of both, `init_s` and `eval_s`, its number of
`turns` and its `number`, which alone determines how much longer or shorter it takes
(log-normal).
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from rollweave.envs.base import Episode, Observation, Options, Step, payload_of
from rollweave.schema.base import mix
from rollweave.schema.work import Task

SIGMA = 0.5
"""Sigma of the logarithm of the seconds of a start and of a reward."""

WORDS = (" task", " done", " output")
ACTIONS = (" go", " look", " wait")


class StagedEnv:
    """An environment with a slow start and a slow reward."""

    blocking = False

    def __init__(self, **_: Any) -> None:
        self._left = 0

    async def reset(self, task: Task) -> Observation:
        payload = payload_of(task)
        self._left = int(payload["turns"])
        await asyncio.sleep(seconds(payload, "init"))
        return Observation.of(" task")

    async def step(self, action: str) -> Step:
        self._left -= 1
        return Step.of(" output" if self._left else " done", done=not self._left)

    @staticmethod
    async def score(episode: Episode, options: Options) -> float:
        await asyncio.sleep(seconds(payload_of(episode.task), "eval"))
        return 1.0

    @classmethod
    def words(cls, options: Options) -> Sequence[str]:
        return [*WORDS, *ACTIONS]

    @classmethod
    def allowed_words(cls, options: Options) -> Sequence[str]:
        return ACTIONS


def seconds(payload: Mapping[str, Any], stage: str) -> float:
    """Return the seconds that the stage `init` or `eval` of a task takes."""
    draw = random.Random(mix(stage, int(payload["number"])))
    return float(payload[f"{stage}_s"]) * draw.lognormvariate(0.0, SIGMA)
