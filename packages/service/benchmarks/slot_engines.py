"""Engines of known pace, as a process: `python -m
packages.service.benchmarks.slot_engines ENGINES SLOTS TOKEN_MS`.

They answer over the same HTTP server as a real engine, with random words. A turn
occupies a slot for its tokens' time, so that the used share of all slots is known to
the millisecond, and costs almost no CPU. The first line of output is JSON: the engines'
addresses, and another one, `fixed`, at which all of them are one engine that gives
every turn of a conversation to the same engine, however long that engine's queue is:
load balancing switched off. The process ends when its standard input does.

Invariants: an engine has at most `slots` concurrent turns, the others wait in order; a
turn's tokens depend on its context alone, so that equal tasks have equal conversations,
independent of client and order; prompts take no time.
"""

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Sequence

import xxhash
from aiohttp import web

from rollweave.engine.clients.base import OnTokens
from rollweave.engine.clients.server import EngineServer
from rollweave.io.http.guard import Guard
from rollweave.io.http.listening import listening
from rollweave.schema.serving import (
    STREAM_S,
    EngineStats,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Ready,
    VersionSpan,
)

MEDIAN_TOKENS, SIGMA = 12.0, 0.6
"""Log-normal distribution of a turn's tokens; a request may lower their maximum."""

KEY_TOKENS = 14
"""Number of a conversation's first tokens that identify it: those of `bash_env`'s
prompts up to the end of the task's number.
"""

CONTEXT_TOKENS = 1 << 20

PLAIN_TOKENS = 16
"""Tokens to choose from where a request restricts nothing: a probe."""


class Slots:
    """Slots served first come, first served; `busy_s` is the sum of the seconds for
    which each was occupied.
    """

    def __init__(self, count: int) -> None:
        self.count, self.occupied = count, 0
        self._free = asyncio.Semaphore(count)
        self._busy_s, self._since = 0.0, time.monotonic()

    @property
    def busy_s(self) -> float:
        now = time.monotonic()
        self._busy_s += self.occupied * (now - self._since)
        self._since = now
        return self._busy_s

    async def hold(self, seconds: float) -> tuple[float, float]:
        """Occupy a slot for that long. Returns the seconds waited and occupied."""
        requested_at = time.monotonic()
        async with self._free:
            began = time.monotonic()
            self._count(1)
            try:
                await asyncio.sleep(seconds)
            finally:
                self._count(-1)
        return began - requested_at, time.monotonic() - began

    def _count(self, by: int) -> None:
        _ = self.busy_s  # until now as it was
        self.occupied += by


class PacedEngine:
    """An engine of `Slots`: of several, a conversation's hash selects one."""

    def __init__(self, parts: Sequence[Slots], *, token_s: float) -> None:
        self._parts, self._token_s = parts, token_s
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._under_way: dict[str, asyncio.Future[GenerateResult]] = {}

    async def ready(self) -> Ready:
        slots = sum(part.count for part in self._parts)
        return Ready(
            version=0, kv_total_tokens=CONTEXT_TOKENS, max_slots=slots, max_context=CONTEXT_TOKENS
        )

    def generate(
        self,
        request: GenerateRequest,
        on_tokens: OnTokens | None = None,
        *,
        report_s: float = STREAM_S,
    ) -> asyncio.Future[GenerateResult]:
        answer = asyncio.ensure_future(self._generated(request))
        self._under_way[request.id] = answer
        answer.add_done_callback(lambda _: self._under_way.pop(request.id, None))
        return answer

    async def _generated(self, request: GenerateRequest) -> GenerateResult:
        tokens, finish = turn_tokens(request)
        queue_s, generate_s = await self._parts[
            engine_index(request.tokens, len(self._parts))
        ].hold(len(tokens) * self._token_s)
        return GenerateResult(
            id=request.id,
            tokens=tokens,
            logprobs=(-max(1.0, request.sampling.temperature),)
            * len(tokens),  # that a probe finds them plausible
            versions=(VersionSpan(start=0, end=len(tokens), version=0),),
            finish=finish,
            queue_s=queue_s,
            generate_s=generate_s,
        )

    def abort(self, request_id: str) -> None:
        """Do nothing: a client that aborts also disconnects, which cancels the turn;
        there are no partial answers here.
        """

    async def stats(self) -> EngineStats:
        """Return statistics; `busy_s` are slot-seconds here."""
        running = sum(part.occupied for part in self._parts)
        return EngineStats(
            version=0,
            running=running,
            waiting=len(self._under_way) - running,
            kv_used_tokens=0,
            kv_total_tokens=CONTEXT_TOKENS,
            busy_s=sum(part.busy_s for part in self._parts),
        )

    async def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        if not self.lost.done():
            self.lost.set_result("killed")


def engine_index(tokens: Sequence[int], count: int) -> int:
    """Return which of `count` engines a conversation uses: the same for all its
    turns.
    """
    return _digest(tokens[:KEY_TOKENS]) % count


def _digest(tokens: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(json.dumps(tokens).encode())


def turn_tokens(request: GenerateRequest) -> tuple[tuple[int, ...], FinishReason]:
    """Return a turn's tokens: random ones of those allowed, and a stop token at the end
    if it fits.
    """
    sampling, draw = request.sampling, random.Random(_digest(request.tokens))
    words = [token for token in sampling.allowed if token not in sampling.stop_token_ids] or range(
        PLAIN_TOKENS
    )
    wanted = max(1, round(MEDIAN_TOKENS * draw.lognormvariate(0.0, SIGMA)))
    sampled = tuple(draw.choice(words) for _ in range(min(wanted, sampling.max_tokens)))
    if len(sampled) < sampling.max_tokens and sampling.stop_token_ids:
        return (*sampled, sampling.stop_token_ids[0]), FinishReason.STOP
    return sampled, FinishReason.LENGTH


async def _serve(engines: int, slots: int, token_s: float) -> None:
    parts = [Slots(slots) for _ in range(engines)]
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    async with contextlib.AsyncExitStack() as stack:
        addresses = []
        for chosen in (*([part] for part in parts), parts):
            engine = PacedEngine(chosen, token_s=token_s)
            app: web.Application = EngineServer(engine, model="paced").application()
            served = listening(app, "127.0.0.1", 0, guard=Guard(token=None), shutdown_s=0.1)
            addresses.append(await stack.enter_async_context(served))
        print(json.dumps({"engines": addresses[:-1], "fixed": addresses[-1]}), flush=True)
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        waiting = asyncio.ensure_future(reader.read())
        waiting.add_done_callback(lambda _: ended.set())
        await ended.wait()


def main() -> None:
    """Serve as many engines, of as many slots and of the seconds a token, as the
    arguments say.
    """
    engines, slots, token_ms = sys.argv[1:]
    asyncio.run(_serve(int(engines), int(slots), float(token_ms) / 1e3))


if __name__ == "__main__":
    main()
