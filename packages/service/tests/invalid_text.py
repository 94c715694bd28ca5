"""An environment and a handler that return invalid text: surrogates in every field."""

import os
from typing import Any

from rollweave.envs.base import Episode, Observation, Options, Score, Step
from rollweave.envs.handlers.base import Agent, Job
from rollweave.schema.chat import Message
from rollweave.schema.work import Task

TEXT = "\udcff words \ud800"


class InvalidText:
    """Raises invalid text in the method `raises`, and returns it from the others."""

    def __init__(self, *, raises: str = "") -> None:
        self._raises = raises

    def reset(self, task: Task) -> Observation:
        self._raise("reset")
        return Observation.of(TEXT, state_key=TEXT)

    def step(self, action: str) -> Step:
        self._raise("step")
        return Step.of(TEXT, reward=1.0, done=True, state_key=TEXT)

    @classmethod
    def score(cls, episode: Episode, options: Options) -> float:
        if options.get("raises") == "score":
            raise RuntimeError(TEXT)
        return 1.0

    def _raise(self, method: str) -> None:
        if method == self._raises:
            raise OSError(TEXT)


class Killer(InvalidText):
    """Kills its own process."""

    def step(self, action: str) -> Step:
        os._exit(1)


class Handler:
    """A handler that does the same as `InvalidText`."""

    def __init__(self, *, raises: str = "") -> None:
        self._raises = raises

    async def init(self, job: Job) -> None:
        self._raise("init")

    async def run(self, agent: Agent) -> None:
        self._raise("run")
        await agent.chat([Message(role="user", content=TEXT, name=TEXT)])

    async def eval(self) -> Score:
        self._raise("eval")
        return Score(reward=1.0)

    def final_result(self) -> dict[str, Any]:
        self._raise("result")
        return {TEXT: [TEXT]}

    def _raise(self, method: str) -> None:
        if method == self._raises:
            raise OSError(TEXT)
