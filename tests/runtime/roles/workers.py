"""Workers of the tests."""

import os
import signal
import sys
import time

import numpy as np

from rollweave import Worker, register
from rollweave.runtime.roles.worker import hw_mapping
from rollweave.schema.base import Struct


class Sum(Struct, frozen=True, kw_only=True):
    rank: int
    total: float


class Adder(Worker):
    """Adds numbers, and fails in all ways."""

    def __init__(self, start: float = 0, *, broken: int = -1) -> None:
        if self.rank == broken:
            raise LookupError("no start")
        self.total = start + self.rank

    @register(mode="execute_all")
    def add(self, number: float) -> Sum:
        time.sleep(0.05 * (self.world_size - self.rank))  # the last rank answers first
        self.total += number
        return Sum(rank=self.rank, total=self.total)

    @register(mode="execute_each")
    def scale(self, values: np.ndarray, factor: float) -> np.ndarray:
        return values * factor

    @register(mode="execute_one")
    def rank_of_one(self, seconds: float = 0.0) -> int:
        time.sleep(seconds)
        return self.rank

    @register(mode="execute_first")
    def place(self) -> tuple[int, int]:
        return self.rank, self.world_size

    @hw_mapping(hw_affinity={"short": "fast", "default": "large"})
    def generate(self, prompt: str, tag_name: str = "default") -> tuple[int, str]:
        return self.rank, self.hardware

    @register(mode="execute_all")
    @hw_mapping(hw_affinity={"short": "fast"})
    def all_of(self, tag_name: str) -> int:
        return self.rank

    @register()
    def fail(
        self, ranks: list[int], *, waiting: tuple[int, ...] = (), slow: tuple[int, ...] = ()
    ) -> None:
        if self.rank in slow:
            time.sleep(0.5)
        if self.rank in ranks:
            raise ValueError(f"no luck on {self.rank}")
        if self.rank in waiting:
            signal.pause()

    @register()
    def unsendable(self) -> object:
        return object()

    @register()
    def pid(self) -> int:
        return os.getpid()

    @register()
    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    @register()
    def die(self, rank: int) -> None:
        print("last words", file=sys.stderr)
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    @register(timeout_s=1.0)
    def hang(self, rank: int) -> None:
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGSTOP)

    @register(beside=True)
    def wait_for(self, total: float) -> float:
        """Wait until another call has added enough."""
        while self.total < total:
            time.sleep(0.01)
        return self.total

    @register(mode="execute_first")
    def meet(self) -> None:
        """Report a store, as `join_ranks` does."""
        assert self._ranks is not None
        self._ranks.announce("127.0.0.1:1")

    def private(self) -> None: ...

    def close(self) -> None:
        print(f"closed {self.rank}")


class Ring(Worker):
    """Meets the other ranks in torch.distributed."""

    def __init__(self) -> None:
        self.join_ranks()

    @register()
    def reduce(self, number: float) -> float:
        import torch
        import torch.distributed as dist

        value = torch.tensor([number * (self.rank + 1)])
        dist.all_reduce(value)
        return float(value)
