"""Valid and invalid environments, for dry runs."""

import asyncio
import os
import random
import signal
from collections.abc import Sequence

from rollweave.envs.base import Observation, Options, Score, Split, Step
from rollweave.envs.handlers.base import Agent, Job, Tool
from rollweave.schema.chat import Message
from rollweave.schema.work import Task


class Fine:
    """Returns the value of its option as the observation."""

    def __init__(self, *, greeting: str = "hello") -> None:
        self._greeting = greeting

    async def reset(self, task: Task) -> Observation:
        return Observation.of(self._greeting)

    def step(self, action: str) -> Step:
        return Step.of("", done=True, success=action == "yes", reward=float(action == "yes"))

    @classmethod
    def words(cls, options: Options) -> Sequence[str]:
        return ["hello", "yes", "no"]

    @classmethod
    def transcript(cls, rng: random.Random, options: Options) -> Sequence[Message]:
        """Answers yes or no at random."""
        return [
            Message(role="user", content="hello"),
            Message(role="assistant", content=rng.choice(["yes", "no"])),
        ]


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


class Wordy(Fine):
    """Answers with words of different lengths, so that transcripts differ in length."""

    @classmethod
    def transcript(cls, rng: random.Random, options: Options) -> Sequence[Message]:
        """Answers left, or sometimes right."""
        answer = "left" if rng.random() < 0.8 else "right"
        return [Message(role="user", content="hello"), Message(role="assistant", content=answer)]


class Unanswered(Fine):
    @classmethod
    def transcript(cls, rng: random.Random, options: Options) -> Sequence[Message]:
        """Return a transcript without an answer."""
        return [Message(role="user", content="hello")]


class Observed(Fine):
    @classmethod
    def transcript(cls, rng: random.Random, options: Options) -> Sequence[Message]:
        """Return a transcript that ends with an observation, which is valid."""
        return [*super().transcript(rng, options), Message(role="user", content="hello")]


class Handler:
    """Calls its agent once, as configured by its options."""

    def __init__(self, *, prompt: str = "hello", tools: int = 0, mood: str = "") -> None:
        self._prompt, self._tools, self._mood = prompt, tools, mood

    async def init(self, job: Job) -> None:
        return

    async def run(self, agent: Agent) -> None:
        if self._mood == "mute":
            return
        if self._mood == "broken":
            raise KeyError("lost")
        if self._mood == "program":
            await agent.endpoint()
        tools = [
            Tool(name=f"tool{number}", description="", parameters={}, call=_nothing)
            for number in range(self._tools)
        ]
        await agent.chat([Message(role="user", content=self._prompt)], tools=tools)

    async def eval(self) -> Score:
        return Score(reward=0.0)


async def _nothing(_: object) -> str:
    return ""
