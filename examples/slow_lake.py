"""The frozen lake of `longtail.toml`, whose moves are sometimes slow, as tools are."""

import asyncio
import math
import random
from collections.abc import Sequence
from typing import Any

from rollweave.envs.base import Options, Step
from rollweave.envs.frozenlake import FrozenLake
from rollweave.schema.chat import Message


class SlowLake(FrozenLake):
    """The environment `frozenlake`. A move takes a log-normal time of `latency_s`
    seconds in the median; `latency_sigma` is the sigma of its logarithm.
    """

    blocking = False

    def __init__(
        self, *, latency_s: float = 0.02, latency_sigma: float = 1.5, **options: Any
    ) -> None:
        super().__init__(**options)
        self._mu, self._sigma = math.log(latency_s), latency_sigma

    async def step(self, action: str) -> Step:  # type: ignore[override]  # it may be async
        await asyncio.sleep(random.lognormvariate(self._mu, self._sigma))
        return super().step(action)

    @classmethod
    def transcript(cls, rng: random.Random, options: Options) -> Sequence[Message]:
        return FrozenLake.transcript(rng, {"maps": options.get("maps", "random")})
