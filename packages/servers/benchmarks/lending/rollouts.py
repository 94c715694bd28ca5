"""Rollouts for a lent engine, without a run: as many at a time as there are slots."""

import asyncio
import random

from rollweave.engine.clients.client import EngineClient
from rollweave.schema.errors import EngineError
from rollweave.schema.serving import FinishReason, GenerateRequest, LendingStats, Sampling

ROLLOUTS, PROMPT, OUTPUT = 8, 64, 64
"""Rollouts that are open at a time, and their tokens."""

PAUSE_S = 2.0
"""Seconds until a rollout that was returned continues, as for a run."""

WAIT_S = 300.0
"""Maximum seconds of any wait."""

POLL_S = 0.05


class Rollouts:
    """Rollouts of a borrower, `ROLLOUTS` at a time. One that is returned continues with
    the tokens that it has.
    """

    def __init__(self, lender: EngineClient, borrower: EngineClient, vocabulary: int) -> None:
        self._lender, self._borrower, self._vocabulary = lender, borrower, vocabulary
        self._tasks: list[asyncio.Task[None]] = []
        self._over = False
        self.returned = self.lost = 0

    async def stats(self) -> LendingStats:
        """Return the state of the loan."""
        lending = (await self._lender.stats()).lending
        assert lending is not None
        return lending

    async def start(self) -> None:
        """Begin, and return once a rollout step was computed."""
        self._tasks = [asyncio.create_task(self._roll(number)) for number in range(ROLLOUTS)]
        async with asyncio.timeout(WAIT_S):
            while not (await self.stats()).rollout_tokens:  # noqa: ASYNC110 another process's
                await asyncio.sleep(POLL_S)

    async def end(self) -> None:
        """Await the rollouts that are open."""
        self._over = True
        await asyncio.gather(*self._tasks)

    async def _roll(self, number: int) -> None:
        draw, turn = random.Random(number), 0
        while not self._over:
            tokens = [draw.randrange(100, self._vocabulary) for _ in range(PROMPT)]
            left = OUTPUT
            while left > 0:
                turn += 1
                request = GenerateRequest(
                    id=f"{number}/{turn}",
                    tokens=tuple(tokens),
                    sampling=Sampling(temperature=1.0, max_tokens=left, seed=turn),
                )
                try:
                    result = await self._borrower.generate(request)
                except EngineError:
                    self.lost += 1
                    return
                tokens += result.tokens
                left -= len(result.tokens)
                if result.finish is FinishReason.ERROR:
                    self.lost += 1
                if result.finish is not FinishReason.RETURNED:
                    break
                self.returned += 1
                await asyncio.sleep(PAUSE_S)
