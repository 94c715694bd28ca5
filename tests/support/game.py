"""A game for whole runs without a model: reply with any text for `turns` turns.

`wait` names a file that must exist before any step returns.
"""

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from rollweave.envs import base
from rollweave.schema.base import mix
from rollweave.schema.work import Task


class Game:
    def __init__(self, *, turns: int = 2, wait: str = "") -> None:
        self._left, self._wait = turns, wait
        self._seed = 0

    def reset(self, task: Task) -> base.Observation:
        self._seed = task.seed
        return base.Observation.of("go", state_key="start")

    async def step(self, action: str) -> base.Step:
        while self._wait and not Path(self._wait).exists():  # noqa: ASYNC110, ASYNC240 (a test opens the gate)
            await asyncio.sleep(0.01)
        self._left -= 1
        if self._left:
            return base.Step.of("on", reward=0.25)
        return base.Step(reward=float(self._seed % 2), done=True, success=self._seed % 2 == 1)


class Broken(Game):
    """A game that never starts, for a reason that names its task."""

    def reset(self, task: Task) -> base.Observation:
        raise KeyError(f"map_{task.seed}")


class Rewarded(Game):
    """An environment that gives rewards, but does not define success."""

    async def step(self, action: str) -> base.Step:
        step = await super().step(action)
        return base.Step(messages=step.messages, reward=step.reward, done=step.done)


class HeldOut(Game):
    """A game in which `wait` concerns every second task of an evaluation alone."""

    def reset(self, task: Task) -> base.Observation:
        if not base.payload_of(task)["waits"]:
            self._wait = ""
        return super().reset(task)

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: base.Split, options: base.Options) -> Task:
        waits = split is not base.Split.TRAIN and index % 2 == 1
        return base.new_task(seed=mix(seed, split, index), waits=waits)


class NoTasks(Game):
    @classmethod
    def make_task(cls, **_: object) -> Task:
        raise LookupError("no tasks here")


class Wanderer(Game):
    def reset(self, task: Task) -> base.Observation:
        os.chdir("/")
        return super().reset(task)


class Located(Game):
    """A game that leaves a file `<what>-<process id>` in `where` whenever its code
    runs, and whose first step waits for the file `open` there.
    """

    def __init__(self, *, where: str, turns: int = 2) -> None:
        super().__init__(turns=turns, wait=f"{where}/open")
        self._where = where

    def reset(self, task: Task) -> base.Observation:
        _leave(self._where, "reset")
        return super().reset(task)

    @classmethod
    def words(cls, options: base.Options) -> Sequence[str]:
        _leave(str(options["where"]), "words")
        return []

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: base.Split, options: base.Options) -> Task:
        _leave(str(options["where"]), "make_task")
        return base.new_task(seed=mix(seed, split, index))

    @classmethod
    def score(cls, episode: base.Episode, options: base.Options) -> base.Score:
        _leave(str(options["where"]), "score")
        return base.Score(reward=float(episode.task.seed % 2), success=episode.task.seed % 2 == 1)


def _leave(where: str, what: str) -> None:
    (Path(where) / f"{what}-{os.getpid()}").touch()


class Blocking(Game):
    """An environment with a plain `step`.

    Every seventh step blocks until `released` is set; the others take `step_s`.
    """

    released = threading.Event()
    steps = itertools.count(1)

    def __init__(self, *, turns: int = 2, step_s: float = 0.0, stuck: bool = False) -> None:
        super().__init__(turns=turns)
        self._step_s, self._stuck = step_s, stuck

    def step(self, action: str) -> base.Step:  # type: ignore[override]
        if self._stuck and next(self.steps) % 7 == 0:
            self.released.wait()
        time.sleep(self._step_s)
        self._left -= 1
        return base.Step.of("on", reward=0.25, done=not self._left)


class Scored(Game):
    @classmethod
    async def score(cls, episode: base.Episode, options: base.Options) -> base.Score:
        await asyncio.sleep(0)
        return base.Score(reward=float(len(episode.actions())), success=True)
