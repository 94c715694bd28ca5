"""A game for whole runs without a model: say anything `turns` times. `wait` names a file without which no step returns."""

import asyncio
import os
from pathlib import Path

from rollweave.envs.base import Episode, Observation, Options, Score, Step
from rollweave.schema.work import Task


class Game:
    def __init__(self, *, turns: int = 2, wait: str = "") -> None:
        self._left, self._wait = turns, wait
        self._seed = 0

    def reset(self, task: Task) -> Observation:
        self._seed = task.seed
        return Observation.of("go", state_key="start")

    async def step(self, action: str) -> Step:
        while self._wait and not Path(self._wait).exists():  # noqa: ASYNC110, ASYNC240 (a test opens the gate)
            await asyncio.sleep(0.01)
        self._left -= 1
        if self._left:
            return Step.of("on", reward=0.25)
        return Step(reward=float(self._seed % 2), done=True, success=self._seed % 2 == 1)


class NoTasks(Game):
    @classmethod
    def make_task(cls, **_: object) -> Task:
        raise LookupError("no tasks here")


class Wanderer(Game):
    def reset(self, task: Task) -> Observation:
        os.chdir("/")
        return super().reset(task)


class Scored(Game):
    @classmethod
    async def score(cls, episode: Episode, options: Options) -> Score:
        await asyncio.sleep(0)
        return Score(reward=float(len(episode.actions())), success=True)
