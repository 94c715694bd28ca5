"""The environment and the engine of bench `workers`. Both only wait, so that what
remains is the cost of the controller and its workers.

As a program, `python -m benchmarks.workers.world`, it is the engine, in the place of
`runtime/entrypoints/engine`: it answers each turn with equal tokens after `TURN_S`.
"""

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import ClassVar

from rollweave.envs.base import Observation, Options, Step
from rollweave.io.parent import Parent
from rollweave.io.wire import decoder_of, encode
from rollweave.schema.serving import (
    Abort,
    Add,
    EngineCommand,
    EngineReply,
    EngineSpec,
    EngineStats,
    FinishReason,
    Generated,
    GenerateResult,
    Ready,
    Sampled,
    Shutdown,
    Stats,
    VersionSpan,
)
from rollweave.schema.work import Task

PROMPT_WORDS, ANSWER_WORDS, TURN_TOKENS = 256, 64, 32
"""Words of the first prompt and of each observation, and tokens that the agent samples
in a turn: a context of some 1,200 tokens after ten turns.
"""

TURN_S = 0.2
"""Seconds of a turn on the engine."""

WORD = " part"


class Waiting:
    """An environment whose steps wait `step_s`, at most `at_once` of them at once in
    each process, if that is not 0, and whose episodes have `turns` turns.
    """

    _free: ClassVar[asyncio.Semaphore | None] = None

    def __init__(self, *, turns: int, step_s: float, at_once: int = 0) -> None:
        self._left, self._step_s = turns, step_s
        if at_once and Waiting._free is None:
            Waiting._free = asyncio.Semaphore(at_once)

    async def reset(self, task: Task) -> Observation:
        return Observation.of(WORD * PROMPT_WORDS)

    async def step(self, action: str) -> Step:
        async with self._free or contextlib.nullcontext():
            await asyncio.sleep(self._step_s)
        self._left -= 1
        if not self._left:
            return Step(reward=1.0, done=True, success=True)
        return Step.of(WORD * ANSWER_WORDS)

    @classmethod
    def words(cls, options: Options) -> Sequence[str]:
        return [WORD]


class WaitingEngine:
    """Answers turns after `TURN_S`, at any number of them at once."""

    def __init__(self, parent: Parent, spec: EngineSpec) -> None:
        self._parent, self._spec = parent, spec
        self._loop = asyncio.get_running_loop()
        self.stopped = asyncio.Event()
        self._waiting: dict[str, asyncio.TimerHandle] = {}
        self._reply(
            Ready(
                version=spec.version,
                kv_total_tokens=spec.kv_tokens,
                max_slots=spec.max_slots,
                max_context=spec.kv_tokens,
            )
        )

    def execute(self, command: EngineCommand) -> None:
        match command:
            case Add(request=request):
                self._waiting[request.id] = self._loop.call_later(TURN_S, self._answer, request.id)
            case Abort(id=name):
                handle = self._waiting.pop(name, None)
                if handle is not None:
                    handle.cancel()
            case Stats():
                self._reply(Sampled(stats=self._stats()))
            case Shutdown():
                self.stopped.set()
            case _:
                raise AssertionError(f"a service sends no {command}")

    def _answer(self, name: str) -> None:
        del self._waiting[name]
        self._reply(
            Generated(
                result=GenerateResult(
                    id=name,
                    tokens=(5,) * TURN_TOKENS,
                    logprobs=(-0.5,) * TURN_TOKENS,
                    versions=(VersionSpan(start=0, end=TURN_TOKENS, version=0),),
                    finish=FinishReason.LENGTH,
                    generate_s=TURN_S,
                )
            )
        )

    def _stats(self) -> EngineStats:
        return EngineStats(
            version=0,
            running=len(self._waiting),
            waiting=0,
            kv_used_tokens=0,
            kv_total_tokens=self._spec.kv_tokens,
        )

    def _reply(self, reply: EngineReply) -> None:
        self._parent.send(encode(reply))


async def serve(parent: Parent, spec: EngineSpec) -> None:
    """Answer turns until `Shutdown`."""
    loop, decode = asyncio.get_running_loop(), decoder_of(EngineCommand)
    engine = WaitingEngine(parent, spec)

    def on_frame(payload: bytes) -> None:
        loop.call_soon_threadsafe(engine.execute, decode(payload))

    parent.listen(on_frame)
    await engine.stopped.wait()


def main() -> None:
    parent = Parent.from_arguments()
    asyncio.run(serve(parent, decoder_of(EngineSpec)(parent.receive())))


if __name__ == "__main__":
    main()
    os._exit(0)
