"""A frozen lake on which a test can hold a run at a chosen moment."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rollweave.envs.base import Observation, Options, Split, Step, new_task, payload_of
from rollweave.envs.frozenlake import FrozenLake
from rollweave.schema.chat import Message
from rollweave.schema.work import Task


class Lake(FrozenLake):
    """A lake whose steps after the first `at` wait for the file `gate`;
    `<gate>.reached` appears when one waits.

    Steps of training count, or with `held_out` those of evaluations. With `first` only
    the first episode is held.
    """

    steps: ClassVar[int] = 0
    has_begun: ClassVar[bool] = False

    def __init__(
        self, *, gate: str = "", at: int = 0, held_out: bool = False, first: bool = False
    ) -> None:
        super().__init__(maps="fixed")
        self._gate, self._at, self._held_out, self._first = gate, at, held_out, first
        self._counted = False

    def reset(self, task: Task) -> Observation:
        self._counted = (payload_of(task)["split"] != Split.TRAIN) == self._held_out
        if self._counted and self._first:
            self._counted, Lake.has_begun = not Lake.has_begun, True
        return super().reset(task)

    async def step(self, action: str) -> Step:  # type: ignore[override]
        if self._gate and self._counted:
            Lake.steps += 1
            if Lake.steps > self._at:
                Path(f"{self._gate}.reached").touch()  # noqa: ASYNC240
                while not Path(self._gate).exists():  # noqa: ASYNC110, ASYNC240 (a test opens the gate)
                    await asyncio.sleep(0.01)
        return super().step(action)

    @classmethod
    def make_task(cls, *, index: int, seed: int, split: Split, options: Options) -> Task:
        task = super().make_task(index=index, seed=seed, split=split, options={"maps": "fixed"})
        return new_task(seed=task.seed, **payload_of(task), split=split)

    @classmethod
    def transcript(cls, rng: random.Random, options: Options) -> Sequence[Message]:
        return FrozenLake.transcript(rng, {"maps": "fixed"})
