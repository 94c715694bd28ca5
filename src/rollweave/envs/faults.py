"""Failures and latencies that `[faults]` injects into environments and rewards, for
tests and benchmarks.

Invariant: what happens at a call depends on `(seed, call number)` alone, so a run with
faults is reproducible.
"""

import asyncio
import math
import random
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from rollweave.envs.threads import Caller, call_inline
from rollweave.schema.base import mix
from rollweave.schema.config.run import Faults
from rollweave.schema.work import Task

GARBAGE = "not an observation"


class InjectedError(RuntimeError):
    """A failure injected by `[faults]`."""


class Faulty:
    """An environment with injected faults.

    With `block`, a hang blocks the thread, as a real one does, instead of awaiting.
    """

    def __init__(
        self,
        env: Any,
        faults: Faults,
        *,
        seed: int,
        block: bool,
        via: Caller = call_inline,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._env, self._faults, self._seed, self._block, self._sleep = (
            env,
            faults,
            seed,
            block,
            sleep,
        )
        self._via = via
        self._calls = 0

    async def reset(self, task: Task) -> Any:
        return await self._call(self._env.reset, task, latency=False)

    async def step(self, action: str, **more: Any) -> Any:
        return await self._call(partial(self._env.step, **more), action, latency=True)

    async def close(self) -> None:
        close = getattr(self._env, "close", None)
        if close is not None:
            await self._via(close)

    async def _call(self, call: Any, argument: Any, *, latency: bool) -> Any:
        rng, faults = random.Random(mix(self._seed, "call", self._calls)), self._faults
        self._calls += 1
        if latency and faults.latency_s:
            await self._sleep(rng.lognormvariate(math.log(faults.latency_s), faults.latency_sigma))
        draw = rng.random()
        if draw < faults.env_error:
            raise InjectedError("injected by faults.env_error")
        draw -= faults.env_error
        if draw < faults.env_hang:
            if self._block:
                threading.Event().wait()
            await asyncio.Event().wait()
        draw -= faults.env_hang
        if draw < faults.env_garbage:
            return GARBAGE
        return await self._via(call, argument)


def reward_fault(faults: Faults, *, seed: int) -> None:
    """Raise if `faults.reward_error` applies to the reward of this trajectory."""
    if random.Random(mix(seed, "reward")).random() < faults.reward_error:
        raise InjectedError("injected by faults.reward_error")
