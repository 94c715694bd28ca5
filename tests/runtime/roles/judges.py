"""Classes of roles of a run, and an environment and a reward that call them. Each
worker imports this module, which is small.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

from rollweave import Message, Task, Worker, register, role
from rollweave.envs.frozenlake import FrozenLake
from rollweave.runtime.roles.worker import hw_mapping, register_serverless

LIMIT_S = 60.0


class Judge(Worker):
    def __init__(self, word: str = "blue") -> None:
        self.word = word
        if word == "bad":
            raise LookupError("no such word")

    @register(mode="execute_one")
    def score(self, answers: list[str]) -> list[float]:
        if not all(answers):
            raise ValueError("answers must not be empty")
        return [float(self.word in answer) for answer in answers]

    @register()
    def place(self) -> tuple[int, int, int]:
        return self.rank, self.world_size, os.getpid()

    @register(mode="execute_each")
    def doubled(self, values: Any) -> Any:
        return 2 * values

    @register(mode="execute_one", timeout_s=0.3)
    def hang(self) -> None:
        time.sleep(LIMIT_S)

    @register(mode="execute_first")
    def die(self) -> None:
        os._exit(3)

    @register(mode="execute_first")
    def forks(self, fifo: str) -> None:
        """End, and leave a process that ends once `fifo` is opened for writing."""
        if not os.fork():
            os.open(fifo, os.O_RDONLY)
        os._exit(4)

    @register(mode="execute_one")
    def joined(self) -> None:
        self.join_ranks()

    @register(mode="execute_one")
    def asks(self) -> list[float]:
        scores: list[float] = role("judge").score(["blue"])
        return scores


class Elsewhere(Worker):
    """Its method `score` is executed at a URL."""

    @register_serverless(
        url=os.environ.get("ELSEWHERE", "http://127.0.0.1:9"),
        token_env="ELSEWHERE_TOKEN",
        timeout_s=20,
    )
    def score(self, answers: tuple[str, ...], word: str = "blue") -> tuple[float, ...]:
        raise AssertionError("a platform executes it")

    @register()
    def ranks(self) -> int:
        return self.rank


class Plain(Worker):
    def score(self) -> None:
        """Is not registered."""


class ConfigError(Exception):
    """Is not ours."""


class Picky(Judge):
    def __init__(self) -> None:
        raise ConfigError("no weights\n  in the folder")


class Routed(Judge):
    @hw_mapping(hw_affinity={"default": "H20"})
    def routed(self, tag_name: str = "default") -> None: ...


class Lake(FrozenLake):
    """A lake that calls the judges when it begins."""

    def reset(self, task: Task) -> Any:
        assert role("judge").score([]) == []
        return super().reset(task)


async def moves(conversation: Sequence[Message], task: Task, reward: float) -> float:
    """Return the share of moves that the judges like."""
    said = [f"<{one.content}>" for one in conversation if one.role == "assistant"]
    scores = await role("judge").score(said)
    return float(sum(scores) / len(said))
