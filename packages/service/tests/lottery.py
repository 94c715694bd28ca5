"""A game whose payload determines the members' rewards, and whether they wait.

`rewards` are those of the members of all groups with the same `name`, in the order in
which they begin; the reward "broken" raises an error. If `gate` is given, no step
returns before that file exists.
"""

import asyncio
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from rollweave.envs.base import Observation, Step
from rollweave.schema.work import Task


class Lottery:
    blocking = False  # members begin in the order in which they are requested
    _numbers: ClassVar[dict[str, Iterator[int]]] = defaultdict(itertools.count)

    def __init__(self, **_: Any) -> None:
        self._payload: dict[str, Any] = {}
        self._reward: float | str = 0.0

    def reset(self, task: Task) -> Observation:
        self._payload = json.loads(task.payload)
        rewards = self._payload["rewards"]
        self._reward = rewards[next(self._numbers[self._payload["name"]]) % len(rewards)]
        return Observation.of("draw")

    async def step(self, action: str) -> Step:
        del action
        gate = self._payload.get("gate")
        while gate and not Path(gate).exists():  # noqa: ASYNC110, ASYNC240 (a test opens the gate)
            await asyncio.sleep(0.01)
        if isinstance(self._reward, str):
            raise RuntimeError("broken on purpose")
        return Step(reward=self._reward, done=True)
