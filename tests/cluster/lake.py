"""A frozen lake on which a test can hold a run back without stopping it."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from rollweave.envs.base import Options, Split, Step, new_task, payload_of
from rollweave.envs.frozenlake import FrozenLake
from rollweave.schema.chat import Message
from rollweave.schema.work import Task

BRAKED_S = 0.5
"""Seconds of a step while the brake is on."""


class Lake(FrozenLake):
    """A lake whose steps take `BRAKED_S` while the file `brake` exists."""

    def __init__(self, *, brake: str = "") -> None:
        super().__init__(maps="fixed")
        self._brake = brake

    async def step(self, action: str) -> Step:  # type: ignore[override]
        if Path(self._brake).is_file():  # noqa: ASYNC240
            await asyncio.sleep(BRAKED_S)
        return super().step(action)

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        task = super().make_task(index=index, seed=seed, split=split, options={"maps": "fixed"})
        return new_task(seed=task.seed, **payload_of(task))

    @classmethod
    def transcript(cls, rng: random.Random, options: Options) -> Sequence[Message]:
        return FrozenLake.transcript(rng, {"maps": "fixed"})
