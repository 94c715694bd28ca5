"""A game in which the members of a group get different rewards, and may have to wait:
the payload says so.

`rewards`: of the members of the groups called `name`, in the order in which they begin;
"broken" breaks. `gate`: no step returns without this file.
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
    blocking = False  # members begin in the order in which they are asked for
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
