"""Functions that compute rewards, for the tests."""

import asyncio
import threading
from collections.abc import Sequence

from rollweave.schema.chat import Message
from rollweave.schema.work import Task

release = threading.Event()


def length(conversation: Sequence[Message], task: Task, reward: float) -> float:
    assert task.tag == "scripted"
    return len(conversation) + reward


async def slowly(conversation: Sequence[Message], task: Task, reward: float) -> int:
    await asyncio.sleep(0)
    return 3


def broken(conversation: Sequence[Message], task: Task, reward: float) -> float:
    raise KeyError("no such word")


def text(conversation: Sequence[Message], task: Task, reward: float) -> str:
    return "good"


def infinite(conversation: Sequence[Message], task: Task, reward: float) -> float:
    return float("inf")


def hanging(conversation: Sequence[Message], task: Task, reward: float) -> float:
    release.wait(30)
    return 0.0


def of_nothing() -> float:
    return 0.0


number = 3
