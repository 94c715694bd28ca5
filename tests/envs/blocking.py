"""Environments that block, or claim that they do not, and record the threads that call
them.
"""

import sqlite3
import threading
from typing import Any

from rollweave.envs.base import Episode, Observation, Options, Score, Step
from rollweave.schema.work import Task

HERE = "tests.envs.blocking:"


class Gate:
    """State that tests and environments share; a new one for each test."""

    def __init__(self) -> None:
        self.opened, self.entered = threading.Event(), threading.Semaphore(0)
        self.calls: list[tuple[str, int]] = []
        self.meeting = threading.Barrier(2)

    def called(self, what: str) -> None:
        self.calls.append((what, threading.get_ident()))

    @property
    def threads(self) -> set[int]:
        return {thread for _, thread in self.calls}


gate = Gate()


class Plain:
    def __init__(self) -> None:
        gate.called("made")
        self._db = sqlite3.connect(":memory:")  # of the thread that opens it

    def reset(self, task: Task) -> Observation:
        gate.called("reset")
        self._db.execute("create table said (words text)")
        return Observation.of("go")

    def step(self, action: str) -> Step:
        gate.called("step")
        if action == "block":
            gate.entered.release()
            gate.opened.wait()
        elif action == "meet":
            gate.meeting.wait()
        self._db.execute("insert into said values (?)", (action,))
        return Step.of("on")

    def close(self) -> None:
        gate.called("close")
        self._db.close()


class Mixed(Plain):
    async def step(self, action: str) -> Step:  # type: ignore[override]
        gate.called(f"async {action}")
        return Step.of("on")

    def close(self) -> None:
        gate.called("close")


class Quick(Plain):
    blocking = False


class Heir(Quick):
    """Inherits a promise that its own methods need not keep."""


class Async:
    def __init__(self) -> None:
        gate.called("made")

    async def reset(self, task: Task) -> Observation:
        gate.called("reset")
        return Observation.of("go")

    async def step(self, action: str) -> Step:
        gate.called("step")
        return Step.of("on")


class SlowToMake(Plain):
    def __init__(self) -> None:
        gate.entered.release()
        gate.opened.wait()
        super().__init__()


class FailingInit(Plain):
    def __init__(self, **_: Any) -> None:
        raise RuntimeError("no database")


class Scored(Plain):
    @classmethod
    def score(cls, episode: Episode, options: Options) -> Score:
        gate.called("score")
        gate.entered.release()
        gate.opened.wait()
        return Score(reward=1.0)
