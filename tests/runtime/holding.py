"""User code that blocks the event loop: environments, a handler and a buffer
function.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Sequence

from rollweave.core.policy.experience import Experience
from rollweave.envs.base import Observation, Score, Step
from rollweave.envs.handlers.base import Agent, Job
from rollweave.schema.base import GroupId
from rollweave.schema.work import Task

until = threading.Event()
"""Ends the blocking; tests replace it by their own event."""

LIMIT_S = 60.0


class Async:
    def __init__(self) -> None:
        pass

    async def reset(self, task: Task) -> Observation:
        return Observation.of("go")

    async def step(self, action: str) -> Step:
        until.wait(LIMIT_S)
        return Step.of("on", done=True)


class Heir(Async):
    pass


class Deep(Async):
    async def step(self, action: str) -> Step:
        self._query()
        return Step.of("on", done=True)

    def _query(self) -> None:
        until.wait(LIMIT_S)


class Quick(Async):
    blocking = False

    def step(self, action: str) -> Step:  # type: ignore[override]
        until.wait(LIMIT_S)
        return Step.of("on", done=True)


class Deaf(Async):
    """An environment that swallows every exception while it blocks, and keeps
    blocking.
    """

    async def step(self, action: str) -> Step:
        while not until.is_set():
            with contextlib.suppress(BaseException):
                until.wait(LIMIT_S)
        return Step.of("on", done=True)


class Plain(Async):
    def step(self, action: str) -> Step:  # type: ignore[override]
        print("a step begins", file=sys.stderr, flush=True)
        time.sleep(LIMIT_S)
        return Step.of("on", done=True)


class Telling(Async):
    async def step(self, action: str) -> Step:
        print("a step begins", file=sys.stderr, flush=True)
        return await super().step(action)


class Handler:
    async def init(self, job: Job) -> None:
        pass

    async def run(self, agent: Agent) -> None:
        until.wait(LIMIT_S)

    async def eval(self) -> Score:
        return Score(reward=0.0)


def in_order(buffer: Sequence[Experience], version: int) -> list[GroupId]:
    """A function for `buffer.sample`."""
    until.wait(LIMIT_S)
    return [one.id for one in buffer]
