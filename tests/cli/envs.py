"""Environments that are in order, and environments that are not, for dry runs."""

import asyncio
import os
import random
import signal
from collections.abc import Sequence

from rollweave.envs.base import Observation, Options, Split, Step
from rollweave.schema.chat import Message
from rollweave.schema.work import Task


class Fine:
    """Says what its option says."""

    def __init__(self, *, says: str = "hello") -> None:
        self._says = says

    async def reset(self, task: Task) -> Observation:
        return Observation.of(self._says)

    def step(self, action: str) -> Step:
        return Step.of("", done=True, success=action == "yes", reward=float(action == "yes"))

    @classmethod
    def words(cls, options: Options) -> Sequence[str]:
        return ["hello", "yes", "no"]

    @classmethod
    def transcript(cls, rng: random.Random, options: Options) -> Sequence[Message]:
        """Says yes or no by chance."""
        return [Message(role="user", content="hello"), Message(role="assistant", content=rng.choice(["yes", "no"]))]


class Untaught(Fine):
    transcript = None  # type: ignore[assignment]


class Interrupts(Fine):
    async def reset(self, task: Task) -> Observation:
        os.kill(os.getpid(), signal.SIGINT)
        return await super().reset(task)


class Raises(Fine):
    async def reset(self, task: Task) -> Observation:
        raise ValueError("out of cheese")


class Hangs(Fine):
    async def reset(self, task: Task) -> Observation:
        await asyncio.sleep(3600)
        raise AssertionError("nobody waits that long")


class Garbage(Fine):
    async def reset(self, task: Task) -> Observation:
        return "hello"  # type: ignore[return-value]


class Wanders(Fine):
    @classmethod
    def words(cls, options: Options) -> Sequence[str]:
        os.chdir("/")
        return super().words(options)


class Silent(Fine):
    async def reset(self, task: Task) -> Observation:
        return Observation(messages=())


class BadWords(Fine):
    @classmethod
    def words(cls, options: Options) -> Sequence[str]:
        return ["fine", ""]


class OneWord(Fine):
    @classmethod
    def words(cls, options: Options) -> Sequence[str]:
        return "hello"


class Foreign(Fine):
    @classmethod
    def allowed_words(cls, options: Options) -> Sequence[str]:
        return ["adieu"]


class Voiceless:
    def reset(self, task: Task) -> Observation:
        return Observation.of("hello")


class Undrawable(Fine):
    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        raise LookupError("no tasks today")
