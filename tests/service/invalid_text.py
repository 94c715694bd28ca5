"""An environment, and a handler, whose words are no text: surrogates wherever they can
stand.
"""

import os
from typing import Any

from rollweave.envs.base import Episode, Observation, Options, Score, Step
from rollweave.envs.handlers.base import Agent, Job
from rollweave.schema.chat import Message
from rollweave.schema.work import Task

WORDS = "\udcff words \ud800"


class Words:
    """`raises`: the method that raises them; the others return them."""

    def __init__(self, *, raises: str = "") -> None:
        self._raises = raises

    def reset(self, task: Task) -> Observation:
        self._raise("reset")
        return Observation.of(WORDS, state_key=WORDS)

    def step(self, action: str) -> Step:
        self._raise("step")
        return Step.of(WORDS, reward=1.0, done=True, state_key=WORDS)

    @classmethod
    def score(cls, episode: Episode, options: Options) -> float:
        if options.get("raises") == "score":
            raise RuntimeError(WORDS)
        return 1.0

    def _raise(self, method: str) -> None:
        if method == self._raises:
            raise OSError(WORDS)


class Killer(Words):
    """Ends the process that it runs in."""

    def step(self, action: str) -> Step:
        os._exit(1)


class Handler:
    """The same as a handler."""

    def __init__(self, *, raises: str = "") -> None:
        self._raises = raises

    async def init(self, job: Job) -> None:
        self._raise("init")

    async def run(self, agent: Agent) -> None:
        self._raise("run")
        await agent.chat([Message(role="user", content=WORDS, name=WORDS)])

    async def eval(self) -> Score:
        self._raise("eval")
        return Score(reward=1.0)

    def final_result(self) -> dict[str, Any]:
        self._raise("result")
        return {WORDS: [WORDS]}

    def _raise(self, method: str) -> None:
        if method == self._raises:
            raise OSError(WORDS)
